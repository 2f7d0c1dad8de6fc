"""The output head: losses of target tokens in float32, block by block of the vocabulary.

    loss(h, target) = logsumexp(W h) - (W h)[target]

Logits exist for target positions only, and for one block of the vocabulary and some rows at a time. The
head's weight stays in the dtype in which it is stored and is widened one block at a time, so that a bf16
head costs no float32 copy and its logits are still float32: a loss rounded to bf16 would drown the
difference of two perturbed losses.

# Legend: R rows (target positions), H hidden size, D vocabulary, B a block of it.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

# Logits of one block are 4 MiB of float32, a widened block of the weight at most 8 MiB.
_BLOCK_TOKENS = 1024
_BLOCK_ROWS = 1024
_BLOCK_WEIGHTS = 2 << 20


class OutputHead:
    """Logits, losses and their gradients with respect to hidden states."""

    def __init__(self, weight_DH: Tensor, softcap: float | None) -> None:
        """`softcap` c: logits are `c * tanh(logits / c)` (Gemma 2); None: as they are."""
        self._weight_DH = weight_DH
        self._softcap = softcap

    def losses(self, hidden_RH: Tensor, target_R: Tensor) -> Tensor:
        """Negative log-likelihood of each target, [R], float32 (float64 for float64 hidden states)."""
        return torch.cat([self._losses(*rows)[0] for rows in _row_blocks(hidden_RH, target_R)])

    def gradients(self, hidden_RH: Tensor, target_R: Tensor) -> tuple[Tensor, Tensor]:
        """The losses [R], and `d loss / d hidden` [R, H]: `softmax(logits) W - W[target]`, through the soft
        cap if any."""
        blocks = [self._gradients(*rows) for rows in _row_blocks(hidden_RH, target_R)]
        return torch.cat([loss_R for loss_R, _ in blocks]), torch.cat(
            [gradient_RH for _, gradient_RH in blocks]
        )

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """[R, D] float32: for the few rows of a generation."""
        wide_RH = _wide(hidden_RH)
        return torch.cat([self._capped(wide_RH @ w_BH.T) for _, w_BH in self._blocks(wide_RH)], dim=1)

    def _losses(self, hidden_RH: Tensor, target_R: Tensor) -> tuple[Tensor, Tensor]:
        """(loss [R], logsumexp [R])."""
        normalizer_R = hidden_RH.new_full((len(hidden_RH),), -torch.inf)
        chosen_R = torch.zeros_like(normalizer_R)
        for first, w_BH in self._blocks(hidden_RH):
            logit_RB = self._capped(hidden_RH @ w_BH.T)
            row, inside = _inside(target_R, first, len(w_BH))
            chosen_R[row] = logit_RB[row, inside]
            # As torch.logsumexp, in place: copies of the logits would be most of the memory.
            largest_R = logit_RB.amax(dim=1)
            sum_R = logit_RB.sub_(largest_R[:, None]).exp_().sum(dim=1)
            normalizer_R = torch.logaddexp(normalizer_R, largest_R + sum_R.log())
        return normalizer_R - chosen_R, normalizer_R

    def _gradients(self, hidden_RH: Tensor, target_R: Tensor) -> tuple[Tensor, Tensor]:
        loss_R, normalizer_R = self._losses(hidden_RH, target_R)
        gradient_RH = torch.zeros_like(hidden_RH)
        for first, w_BH in self._blocks(hidden_RH):
            logit_RB = self._capped(hidden_RH @ w_BH.T)
            slope_RB = None if self._softcap is None else 1 - (logit_RB / self._softcap).square_()
            error_RB = logit_RB.sub_(normalizer_R[:, None]).exp_()
            row, inside = _inside(target_R, first, len(w_BH))
            error_RB[row, inside] -= 1
            if slope_RB is not None:
                error_RB *= slope_RB
            gradient_RH.addmm_(error_RB, w_BH)
        return loss_R, gradient_RH

    def _blocks(self, like: Tensor) -> Iterator[tuple[int, Tensor]]:
        """First word of each block, and its weights in `like`'s dtype, which hold until the next block."""
        vocabulary, width = self._weight_DH.shape
        step = max(1, min(_BLOCK_TOKENS, _BLOCK_WEIGHTS // width))
        if self._weight_DH.dtype == like.dtype:
            for first in range(0, vocabulary, step):
                yield first, self._weight_DH[first : first + step]
            return
        # One buffer for all: the allocator keeps freed blocks of this size, several of them.
        wide_BH = like.new_empty((min(step, vocabulary), width))
        for first in range(0, vocabulary, step):
            block_BH = self._weight_DH[first : first + step]
            yield first, wide_BH[: len(block_BH)].copy_(block_BH)

    def _capped(self, logit_RB: Tensor) -> Tensor:
        """The logits through the soft cap, in place."""
        if self._softcap is None:
            return logit_RB
        return logit_RB.div_(self._softcap).tanh_().mul_(self._softcap)


def _row_blocks(hidden_RH: Tensor, target_R: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for first in range(0, len(target_R), _BLOCK_ROWS):
        rows = slice(first, first + _BLOCK_ROWS)
        yield _wide(hidden_RH[rows]), target_R[rows]


def _wide(hidden_RH: Tensor) -> Tensor:
    return hidden_RH.to(torch.promote_types(hidden_RH.dtype, torch.float32))


def _inside(target_R: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Rows whose target lies in the block, and its index there."""
    row = torch.nonzero((target_R >= first) & (target_R < first + count)).flatten()
    return row, target_R[row] - first
