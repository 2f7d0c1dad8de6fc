"""The output head: losses and logits, block by block of the vocabulary.

    loss(h, target) = logsumexp(W h) - (W h)[target]
    loss(h, p)      = sum_i p_i log(p_i / q_i),  q = softmax(W h)       soft targets (`SoftTargets`)

Logits are computed for target positions only, one block of the vocabulary and some rows at a time. The
largest logit and the sum of the exponentials are carried from block to block (Milakov and Gimelshein,
"Online normalizer calculation for softmax", algorithm 3).

Embedding and head stay in the mapped file, in the dtype of the package. Rows are converted to float32 a block
at a time. A table is never converted as a whole.

# Legend: R rows (target positions), H hidden size, D vocabulary, B a block of the vocabulary, N named tokens
# of a row: its target, or the tokens that its soft target lists.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from permille.engines.light.linear import Tools
from permille.engines.light.threads import blocks
from permille.native.layers import product_bf16, product_q8_0
from permille.native.library import load
from permille.native.weights import widen_bf16, widen_f16, widen_q8_0
from permille.tensors import Q8_0, RawTensor
from permille.zo.estimators import SoftTargets

Array = NDArray[np.float32]

# How many rows are copied from the mapped file and converted at a time.
_LOOK_UP_ROWS = 64
# numpy has no bfloat16, so its bits are read as integers, and a kernel converts them.
_STORED = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", Q8_0: "u1"}
# How many weights a block of the vocabulary has (4 MB in float32), and how many rows a task has.
_BLOCK_WEIGHTS = 1 << 20
_BLOCK_ROWS = 256
# Lower bound for the total probability of the tokens that a soft target does not name. A smaller total is
# only rounding error.
_LEAST_REST = 1e-6


class StoredMatrix:
    """A matrix [rows, width] in the dtype of the package, floats or Q8_0."""

    def __init__(self, raw: RawTensor) -> None:
        self._dtype = raw.dtype
        self._stored: NDArray[np.generic] = raw.data.view(_STORED[raw.dtype]).reshape(raw.shape[0], -1)
        self.rows, self.width = raw.shape

    def look_up(self, row_M: NDArray[np.int64], out_MH: Array) -> None:
        """Convert some rows to float32, a few at a time."""
        for part in blocks(len(row_M), _LOOK_UP_ROWS):
            self._widen(np.ascontiguousarray(self._stored[row_M[part]]), out_MH[part])

    def block(self, rows: slice, scratch: Array) -> Array:
        """Return rows as float32: a view if they are stored as float32, else converted into `scratch`."""
        found = self._stored[rows]
        if self._dtype == "F32":
            view: Array = found.astype(np.float32, copy=False)
            return view
        out_RH = scratch[: len(found) * self.width].reshape(-1, self.width)
        self._widen(found, out_RH)
        return out_RH

    @property
    def has_row_product(self) -> bool:
        """Return whether `row_product` is available."""
        return self._dtype in ("BF16", Q8_0) and load() is not None

    def row_product(self, x_H: Array, rows: slice, out_R: Array) -> None:
        """Set `out = W[rows] x` for bfloat16 or Q8_0, without writing converted rows to memory."""
        if self._dtype == Q8_0:
            product_q8_0(x_H, self._stored[rows].view(np.uint8), out_R)
            return
        product_bf16(x_H, self._stored[rows].view(np.uint16), out_R)

    @property
    def is_float32(self) -> bool:
        """Return whether `block` works without scratch memory."""
        return self._dtype == "F32"

    def _widen(self, stored: NDArray[np.generic], out: Array) -> None:
        if self._dtype == Q8_0:
            widen_q8_0(stored.view(np.uint8), out)
        elif self._dtype == "BF16":
            widen_bf16(stored.view(np.uint16), out)
        elif self._dtype == "F16":
            widen_f16(stored.view(np.uint16), out)
        else:
            np.copyto(out, stored)


@dataclass(slots=True, eq=False)
class _Running:
    """Running sums of some rows over the blocks so far.

    Attributes:
        top_R: the largest logit.
        sum_R: the sum of `exp(logit - top)`.
        chosen_RN: the logits of the named tokens.
        gradient_RH: the sum of `exp(logit - top) W`. It is divided by `sum_R` only at the end.
        chosen_slope_RN: the derivatives of the soft cap at `chosen_RN`.
    """

    hidden_RH: Array
    named_RN: NDArray[np.int64]
    probability_RN: Array | None
    top_R: Array
    sum_R: Array
    chosen_RN: Array
    gradient_RH: Array | None
    chosen_slope_RN: Array


class LightHead:
    """Logits, losses, and their gradients with respect to hidden states."""

    def __init__(self, tools: Tools, table: StoredMatrix, softcap: float | None) -> None:
        """Keep the table of the head, and its soft cap.

        With a `softcap` of c, logits are `c * tanh(logits / c)` (Gemma 2). With None, they stay as they are.
        """
        self._tools = tools
        self._table = table
        self._softcap = softcap
        self._blocks = blocks(table.rows, max(64, _BLOCK_WEIGHTS // table.width))

    def losses(self, hidden_RH: Array, target_R: NDArray[np.int64], soft: SoftTargets | None = None) -> Array:
        """Return the loss of each row, or its divergence from a soft target, float32 [R]."""
        return _losses(self._run(hidden_RH, target_R, soft, gradients=False))

    def gradients(
        self, hidden_RH: Array, target_R: NDArray[np.int64], soft: SoftTargets | None = None
    ) -> tuple[Array, Array]:
        """Return the losses [R] and `d loss / d hidden` [R, H].

        For a target token, the gradient is `softmax(logits) W - W[target]`. With a soft cap, the coefficient
        of each row of W is also multiplied by the derivative of the cap at its logit. For soft targets, see
        `_pulls`.
        """
        parts = self._run(hidden_RH, target_R, soft, gradients=True)
        gradient_RH = np.empty_like(hidden_RH)
        at = 0
        for part in parts:
            rows = slice(at, at + len(part.named_RN))
            # sum_j exp(l_j) W_j over sum_j exp(l_j) is `softmax(logits) W`.
            np.divide(part.gradient_RH, part.sum_R[:, None], out=gradient_RH[rows])  # type: ignore[arg-type]
            whole_R, named_RN = _pulls(part)
            gradient_RH[rows] *= whole_R[:, None]
            # The soft cap also applies to the term of the named tokens.
            named_RN *= part.chosen_slope_RN
            chosen_RH = np.empty_like(part.hidden_RH)
            # Work column by column. The rows of all named tokens would take N times as much memory.
            for column in range(named_RN.shape[1]):
                self._table.look_up(part.named_RN[:, column], chosen_RH)
                chosen_RH *= named_RN[:, column, None]
                gradient_RH[rows] += chosen_RH
            at = rows.stop
        return _losses(parts), gradient_RH

    def logits(self, hidden_RH: Array) -> Array:
        """Return logits [R, D], for the few rows of a generation."""
        logit_RD = np.empty((len(hidden_RH), self._table.rows), np.float32)

        def block(rows: slice) -> None:
            if whole:
                self._table.row_product(hidden_RH[0], rows, logit_RD[0, rows])
            else:
                self._tools.blas.product(hidden_RH, self._weight(rows), logit_RD[:, rows])
            self._cap(logit_RD[:, rows])

        whole = len(hidden_RH) == 1 and self._table.has_row_product
        # Multiply a single row by the stored bytes, with one task for each thread. For several rows, convert
        # each block once.
        tasks = blocks(self._table.rows, -(-self._table.rows // self._tools.threads.count))
        self._tools.threads.each(block, tasks if whole else self._blocks)
        return logit_RD

    def _run(
        self, hidden_RH: Array, target_R: NDArray[np.int64], soft: SoftTargets | None, *, gradients: bool
    ) -> list[_Running]:
        # Cut the few rows of a gradient for all threads. Cut those of losses into fixed numbers, so that the
        # loss of a variant has the same bits beside any other variants.
        share = -(-len(target_R) // self._tools.threads.count) if gradients else _BLOCK_ROWS
        parts = [
            _begin(hidden_RH[rows], target_R[rows], None if soft is None else soft.rows(rows), gradients)
            for rows in blocks(len(target_R), max(1, min(share, _BLOCK_ROWS)))
        ]
        for rows in self._blocks:
            # Convert each block once for all rows.
            weight_BH = self._shared_weight(rows)
            self._tools.threads.each(self._step(weight_BH, rows.start), parts)
        return parts

    def _step(self, weight_BH: Array, first: int) -> Callable[[_Running], None]:
        def step(part: _Running) -> None:
            width = len(weight_BH)
            logit_RB = self._tools.threads.scratch("logits", len(part.named_RN) * width).reshape(-1, width)
            self._tools.blas.product(part.hidden_RH, weight_BH, logit_RB)
            slope_RB = self._cap(logit_RB)
            # The named tokens of this block. Each token is in exactly one block.
            row, column = np.nonzero((part.named_RN >= first) & (part.named_RN < first + width))
            inside = part.named_RN[row, column] - first
            part.chosen_RN[row, column] = logit_RB[row, inside]
            if slope_RB is not None:
                part.chosen_slope_RN[row, column] = slope_RB[row, inside]
            self._accumulate(part, logit_RB, slope_RB, weight_BH)

        return step

    def _accumulate(self, part: _Running, logit_RB: Array, slope_RB: Array | None, weight_BH: Array) -> None:
        top_R = np.maximum(part.top_R, logit_RB.max(axis=1))
        # Rescale the sums so far to the new maximum, so that no exponential overflows.
        shrink_R = np.exp(part.top_R - top_R)
        logit_RB -= top_R[:, None]
        np.exp(logit_RB, out=logit_RB)
        part.sum_R *= shrink_R
        part.sum_R += logit_RB.sum(axis=1)
        part.top_R = top_R
        if part.gradient_RH is None:
            return
        if slope_RB is not None:
            logit_RB *= slope_RB
        added_RH = self._tools.threads.scratch("added", part.gradient_RH.size).reshape(part.gradient_RH.shape)
        self._tools.blas.plain_product(logit_RB, weight_BH, added_RH)
        part.gradient_RH *= shrink_R[:, None]
        part.gradient_RH += added_RH

    def _shared_weight(self, rows: slice) -> Array:
        """Convert a block to float32 with all threads. All threads then read it."""
        size = (rows.stop - rows.start) * self._table.width
        if self._table.is_float32:
            return self._table.block(rows, np.empty(0, np.float32))
        out_BH = self._tools.threads.scratch("head", size).reshape(-1, self._table.width)

        def widen(part: slice) -> None:
            moved = slice(rows.start + part.start, rows.start + part.stop)
            self._table.block(moved, out_BH[part].reshape(-1))

        self._tools.threads.each(widen, blocks(len(out_BH), -(-len(out_BH) // self._tools.threads.count)))
        return out_BH

    def _weight(self, rows: slice) -> Array:
        size = 0 if self._table.is_float32 else (rows.stop - rows.start) * self._table.width
        return self._table.block(rows, self._tools.threads.scratch("head block", size))

    def _cap(self, logit_RB: Array) -> Array | None:
        """Cap logits in place. Return the derivative of the cap, or None without one."""
        if self._softcap is None:
            return None
        cap = np.float32(self._softcap)
        tanh_RB = np.tanh(logit_RB / cap)
        np.multiply(tanh_RB, cap, out=logit_RB)
        slope_RB: Array = 1 - tanh_RB * tanh_RB
        return slope_RB


def _begin(
    hidden_RH: Array, target_R: NDArray[np.int64], soft: SoftTargets | None, gradients: bool
) -> _Running:
    named_RN = target_R[:, None] if soft is None else soft.ids_RN
    rows = len(named_RN)
    return _Running(
        hidden_RH=hidden_RH,
        named_RN=named_RN,
        probability_RN=None if soft is None else soft.probability_RN,
        # Start below every logit, so that the first block sets the maximum and rescales only zeros.
        top_R=np.full(rows, -np.inf, np.float32),
        sum_R=np.zeros(rows, np.float32),
        chosen_RN=np.zeros(named_RN.shape, np.float32),
        gradient_RH=np.zeros_like(hidden_RH) if gradients else None,
        chosen_slope_RN=np.ones(named_RN.shape, np.float32),
    )


def _losses(parts: list[_Running]) -> Array:
    return np.concatenate([_part_losses(part) for part in parts])


def _part_losses(part: _Running) -> Array:
    total_R = part.top_R + np.log(part.sum_R)
    if part.probability_RN is None:
        hard_R: Array = total_R - part.chosen_RN[:, 0]
        return hard_R
    p_RN, log_q_RN = part.probability_RN, part.chosen_RN - total_R[:, None]
    # By convention, 0 log 0 is 0.
    named_RN = np.where(p_RN > 0, p_RN * (np.log(np.maximum(p_RN, np.float32(1e-30))) - log_q_RN), 0)
    rest_R, rest_q_R = _rest(p_RN), _rest(np.exp(log_q_RN))
    losses_R: Array = named_RN.sum(axis=1) + rest_R * np.log(rest_R / rest_q_R)
    return losses_R


def _pulls(part: _Running) -> tuple[Array, Array]:
    """Return the derivative of each row's loss with respect to its logits, as `whole` and `named`.

    `d loss / d logit_j = whole q_j + named_j`, where `named_j` is 0 for tokens that the target does not name.
    P is the target's probability of the named tokens, `rest` is that of all other tokens, and
    `r = rest / q_rest`. Then `whole = P + rest - r` and `named_j = r q_j - p_j`. A hard target has P = 1.
    """
    if part.probability_RN is None:
        return np.ones(len(part.named_RN), np.float32), np.full(part.named_RN.shape, -1, np.float32)
    q_RN = np.exp(part.chosen_RN - (part.top_R + np.log(part.sum_R))[:, None])
    rest_R, rest_q_R = _rest(part.probability_RN), _rest(q_RN)
    # At its lower bound, `rest_q` is constant, so it adds nothing to the derivative.
    moves_R = rest_q_R > np.float32(_LEAST_REST)
    ratio_R = np.where(moves_R, rest_R / rest_q_R, np.float32(0))
    whole_R = part.probability_RN.sum(axis=1) + np.where(moves_R, rest_R, np.float32(0)) - ratio_R
    return whole_R, ratio_R[:, None] * q_RN - part.probability_RN


def _rest(share_RN: Array) -> Array:
    """Return the probability of all tokens that are not named, [R]."""
    rest_R: Array = np.maximum(1 - share_RN.sum(axis=1), np.float32(_LEAST_REST))
    return rest_R
