"""Choice of the weights of a linear layer that become zero, and new values for the others.

Shapes: N = outputs, K = inputs, B = columns of a block, M = columns of a group of the pattern.
`gram_KK` is the Gram matrix `X X^T` of the inputs X on the calibration text.
Everything is float32, as in the papers (see `PruningMethod`). If scores are equal, the weight with the lower
index is removed, so the same numbers give the same zeros.
"""

import torch
from torch import Tensor

from permille.errors import InputError
from permille_sparsify.plan import Pattern, PruningMethod

_BLOCK = 128  # SparseGPT chooses the weights to remove in blocks of this many columns
# The smallest and largest number to add to the Gram matrix's diagonal, as shares of the diagonal's mean.
_DAMPING = 0.01
_MOST_DAMPING = 10.0


def prune_linear(
    weight_NK: Tensor, gram_KK: Tensor, method: PruningMethod, rate: float, pattern: Pattern | None
) -> Tensor:
    """Return the pruned weight as a new tensor. Existing zeros stay, and count towards the rate.

    Weights and inputs must be finite.

    Raises:
        InputError: SparseGPT cannot invert the Gram matrix.
    """
    if rate == 0:
        return weight_NK.clone()
    if method is PruningMethod.SPARSEGPT:
        return _sparsegpt(weight_NK, gram_KK, rate, pattern)
    score_NK, per_row = weight_NK.abs(), method is PruningMethod.WANDA
    if per_row:
        # Wanda, equation 1: |w| times the norm of its input.
        score_NK = score_NK * gram_KK.diagonal().sqrt()
    # Wanda compares the weights of one output. Magnitude compares all weights of the matrix.
    count = int((weight_NK.shape[1] if per_row else weight_NK.numel()) * rate)
    return weight_NK.masked_fill(prune_mask(score_NK, weight_NK == 0, count, pattern, per_row=per_row), 0.0)


def prune_mask(
    score_NK: Tensor, zero_NK: Tensor, count: int, pattern: Pattern | None, *, per_row: bool
) -> Tensor:
    """Return the positions of zeros: the existing ones, and those with the smallest scores.

    Args:
        score_NK: the scores.
        zero_NK: the existing zeros.
        count: the number of zeros in each row, or in all rows together. This number includes existing zeros.
        pattern: the pattern, or None.
        per_row: if True, choose the same number in each row, as for Wanda. If False, compare the weights of
            all rows, as for magnitude and SparseGPT.
    """
    # Scores are not negative. With -1, existing zeros come first and count towards `count`.
    score_NK = score_NK.masked_fill(zero_NK, -1.0)
    rows = score_NK if per_row else score_NK.reshape(1, -1)
    if pattern is not None:
        candidate_NK = _smallest_of_groups(score_NK, pattern) | zero_NK
        if count >= int(rows.shape[1] * pattern.rate):
            return candidate_NK
        # Fewer zeros are wanted than the full pattern has. Choose them among the zeros of the full pattern.
        rows = rows.masked_fill(~candidate_NK.reshape(rows.shape), torch.inf)
    order = rows.sort(dim=1, stable=True).indices[:, :count]
    found = torch.zeros_like(rows, dtype=torch.bool).scatter_(1, order, value=True)
    return found.reshape(score_NK.shape) | zero_NK


def _smallest_of_groups(score_NK: Tensor, pattern: Pattern) -> Tensor:
    groups = score_NK.reshape(score_NK.shape[0], -1, pattern.of)
    order = groups.sort(dim=2, stable=True).indices[:, :, : pattern.of - pattern.kept]
    found = torch.zeros_like(groups, dtype=torch.bool).scatter_(2, order, value=True)
    return found.reshape(score_NK.shape)


def _sparsegpt(weight_NK: Tensor, gram_KK: Tensor, rate: float, pattern: Pattern | None) -> Tensor:
    """Prune by SparseGPT, algorithm 1: remove weights column by column, and adjust the later columns.

        error = w_j / [H^-1]_jj,    w_k -= error * [H^-1]_jk  for k > j

    H is the Gram matrix of the columns from j on. U is the upper Cholesky factor of the inverse of the whole
    Gram matrix. From column j on, row j of U is a multiple of row j of H^-1. The multiple cancels out.
    The score of a weight in column j is `(w / d_j)^2`, where d is the diagonal of U.

    If every group must have all zeros of the pattern (`full`), the weights of a group are chosen when the
    loop reaches the group. Otherwise, the weights of a whole block of columns are chosen at once. Without a
    pattern, a block loses one weight more than its share, as in the authors' program.
    """
    weight_NK, columns = weight_NK.clone(), weight_NK.shape[1]
    zero_NK = weight_NK == 0
    dead_K = gram_KK.diagonal() == 0
    weight_NK[:, dead_K] = 0  # the input is always 0, so these weights have no effect
    inverse_KK = _inverse_factor(gram_KK, dead_K)
    full = pattern is not None and rate >= pattern.rate
    block = _BLOCK if pattern is None else _BLOCK // pattern.of * pattern.of
    for start in range(0, columns, block):
        part = slice(start, min(start + block, columns))
        w_NB, inverse_BB = weight_NK[:, part].clone(), inverse_KK[part, part]
        scale_B = inverse_BB.diagonal()
        known_NB = zero_NK[:, part]
        if not full:
            count = int(w_NB.numel() * rate) + (pattern is None)
            removed_NB = prune_mask((w_NB / scale_B).square(), known_NB, count, pattern, per_row=False)
        else:
            removed_NB = known_NB.clone()
        error_NB = torch.zeros_like(w_NB)
        for j in range(w_NB.shape[1]):
            if full and pattern is not None and j % pattern.of == 0:
                group = slice(j, j + pattern.of)
                score_NM = (w_NB[:, group] / scale_B[group]).square()
                known_NM, count = known_NB[:, group], pattern.of - pattern.kept
                removed_NB[:, group] = prune_mask(score_NM, known_NM, count, None, per_row=True)
            error_N = torch.where(removed_NB[:, j], w_NB[:, j], 0.0) / scale_B[j]
            w_NB[:, j:] -= torch.outer(error_N, inverse_BB[j, j:])
            # Keep the errors of the block, to correct all later blocks by a single product below.
            error_NB[:, j] = error_N
        weight_NK[:, part] = w_NB.masked_fill(removed_NB, 0.0)
        weight_NK[:, part.stop :] -= error_NB @ inverse_KK[part, part.stop :]
    return weight_NK


def _inverse_factor(gram_KK: Tensor, dead_K: Tensor) -> Tensor:
    """Damp the Gram matrix until its inverse has a Cholesky factor. Return the upper factor."""
    damping = _DAMPING
    while True:
        damped_KK = gram_KK.clone()
        diagonal_K = damped_KK.diagonal()
        # A dead input has a row of zeros. Set its diagonal to 1, as in the authors' program.
        diagonal_K[dead_K] = 1
        diagonal_K += damping * diagonal_K.mean()
        factor_KK, failed = torch.linalg.cholesky_ex(damped_KK)
        if not int(failed):
            inverse_KK = torch.cholesky_inverse(factor_KK)
            upper_KK: Tensor
            upper_KK, failed = torch.linalg.cholesky_ex(inverse_KK, upper=True)
            if not int(failed):
                return upper_KK
        if damping >= _MOST_DAMPING:
            raise InputError(
                "The Gram matrix of the inputs cannot be inverted, even with damping. Use more calibration "
                "text."
            )
        damping *= 10
