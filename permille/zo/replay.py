"""Replay: from the integers of a log to the state, exactly, on every machine and in every order.

The state `s = sum_t sum_i c[t, i] * z[t, i]` is a sum of integers, so any grouping of steps or weights gives
the same bits. With the estimator `split`, the two blocks are summed separately.

Shapes: T = steps, Q = queries, K = masked weights, D = directions whose coefficient is not 0.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError, PackageError
from permille.package.basis import Basis, required
from permille.zo.directions import Combination
from permille.zo.groups import group_sums
from permille.zo.header import MAX_STEPS, DirectionKind, LogHeader
from permille.zo.log import read_head
from permille.zo.records import check_weight, weight_of_rows

MAX_REPLAY_WORK: Final = 10**13
"""The largest accepted work of a replay, in additions. One core needs some three minutes for it."""
_GROUPS_COST = 100  # additions per weight (measured: a core does 6e8 weights, or 6e10 additions, a second)


def replay(
    header: LogHeader,
    coefficients_TQ: NDArray[np.int64],
    *,
    start: int = 0,
    threads: int = 1,
    basis: Basis | None = None,
) -> NDArray[np.int64]:
    """Return the state that steps `start`, `start + 1`, ... of a log add up to, int64 [K] (FORMAT 7.5).

    The states of parts of a log add up to the state of the whole log. For example, with two halves:

        s_K = replay(header, c_TQ[:50]) + replay(header, c_TQ[50:], start=50)

    Args:
        header: the header of the log.
        coefficients_TQ: int64.
        start: the number of the first step.
        threads: the number of threads. Each of them sums a different part of the weights.
        basis: the basis of the package, which a log with `basis_steps` needs.

    Raises:
        InputError: the coefficients are not [T, queries], or could leave the exact range (FORMAT 7.3), or a
            basis is missing or does not fit.
    """
    if coefficients_TQ.ndim != 2 or coefficients_TQ.shape[1] != header.queries:
        raise InputError(f"expected coefficients [T, {header.queries}], got {coefficients_TQ.shape}")
    if not 0 <= start <= MAX_STEPS - len(coefficients_TQ):
        raise InputError(f"expected steps below {MAX_STEPS}, got {len(coefficients_TQ)} from {start}")
    # Check before the sum. Within this bound, no order of additions can overflow.
    in_basis = min(len(coefficients_TQ), max(0, header.basis_steps - start))
    check_weight(weight_of_rows(coefficients_TQ, in_basis))
    if in_basis:
        s_K = required(basis).sums(coefficients_TQ[:in_basis])
        return s_K + replay(header, coefficients_TQ[in_basis:], start=start + in_basis, threads=threads)
    if header.directions is DirectionKind.GROUPS:
        s_K = group_sums(header, coefficients_TQ, start=start, threads=threads)
        # Groups cover all weights, but the weights before `first_tensor` do not move (FORMAT 8.1).
        s_K[: header.moving.start] = 0
        return s_K
    return _sums_of_signs(header, coefficients_TQ, start, threads)


def work_of(header: LogHeader, steps: int) -> int:
    """Return the cost of a replay in additions of signs. A core does 6e10 a second with the native kernels.

    If the directions are groups, a step is one pass over the weights, for any number of groups. A weight then
    takes as long as a hundred additions of signs.
    """
    a_step = _GROUPS_COST if header.directions is DirectionKind.GROUPS else header.queries
    return steps * a_step * header.k


def check_replay_work(head: bytes) -> None:
    """Refuse a log whose replay would cost more than `MAX_REPLAY_WORK`.

    `head` is the first `log.MAX_HEAD_BYTES` of the log, or more. A head that cannot be read is accepted here,
    because decoding the log refuses it without a replay.

    Raises:
        PackageError: `log-limit`.
    """
    try:
        header, steps = read_head(head)
    except PackageError:
        return
    work = work_of(header, steps)
    if work > MAX_REPLAY_WORK:
        raise PackageError(
            "log-limit",
            f"The replay of this log costs {work} additions, and at most {MAX_REPLAY_WORK} are accepted. "
            f"The log has {steps} steps of {header.queries} directions ({header.directions.value}) over "
            f"{header.k} weights.",
        )


def _sums_of_signs(
    header: LogHeader, coefficients_TQ: NDArray[np.int64], start: int, threads: int
) -> NDArray[np.int64]:
    # Tensors before `first_tensor` are in no block and stay zero.
    s_K = np.zeros(header.k, dtype=np.int64)
    for queries, tensors in header.blocks():
        block_TQ = coefficients_TQ[:, queries]
        # Rejected steps have only zeros and cost nothing.
        step_D, query_D = np.nonzero(block_TQ)
        sums = Combination(
            seed=header.seed,
            step_D=step_D + start,
            query_D=query_D + queries.start,
            c_D=block_TQ[step_D, query_D],
        )
        s_K[header.weights_of(tensors)] = sums.over(header.counts, tensors, threads=threads)
    return s_K
