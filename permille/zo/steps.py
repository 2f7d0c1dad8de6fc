"""One step of zeroth-order descent: perturb, ask the engine for losses, round to integers (FORMAT 7).

`take_step` is pure and makes the record; `apply_record` is the one place where a record changes a state.

Shapes: K = masked weights, Q = queries.
"""

import math

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille.zo.estimators import Batch, Descent, LossEngine, directions_of, estimate
from permille.zo.exponents import Exponents
from permille.zo.header import LogHeader
from permille.zo.lattice import MAX_COEFFICIENT, STATE_LIMIT, add_scaled, coefficient
from permille.zo.records import StepFlag, StepRecord, weight_of


def take_step(
    engine: LossEngine,
    batch: Batch,
    descent: Descent,
    s_K: NDArray[np.int64],
    step: int,
    *,
    clip: float | None,
) -> StepRecord:
    """Estimate one step at state `s_K`, without changing it.

    Args:
        clip: bound on |projected_grad|, or None. What is clipped is flagged, and logged as applied.

    Returns:
        The record. A non-finite loss or scalar, or a coefficient beyond the format, gives zeros, REJECTED.

    Raises:
        PackageError: `log-binding`: the header needs exponents that are absent or other ones.
    """
    loss, projected_grad_Q = estimate(engine, batch, descent, s_K, step)
    header = descent.header
    rejected = StepRecord(step=step, coefficients=(0,) * header.queries, loss=loss, flags=StepFlag.REJECTED)
    # Before any clipping: min(max(-100, nan), 100) is -100
    if not (math.isfinite(loss) and np.isfinite(projected_grad_Q).all()):
        return rejected
    flags = StepFlag.NONE
    if clip is not None:
        if np.abs(projected_grad_Q).max() > clip:
            flags = StepFlag.CLIPPED
        projected_grad_Q = np.clip(projected_grad_Q, -clip, clip)
    try:
        coefficients = _coefficients(header, step, projected_grad_Q)
    except InputError:  # the quotient overflowed
        return rejected
    if max(abs(c) for c in coefficients) > MAX_COEFFICIENT:
        return rejected
    return StepRecord(step=step, coefficients=coefficients, loss=loss, flags=flags)


def apply_record(
    s_K: NDArray[np.int64], record: StepRecord, header: LogHeader, exponents: Exponents | None = None
) -> None:
    """Move a state by one record, in place: `s += sum_i c_i * z_i`.

    Raises:
        InputError: the state would leave the exact range (FORMAT 7.3); it is then unchanged.
        PackageError: `log-binding`: the header needs exponents that are absent or other ones.
    """
    if len(s_K) != header.k or len(record.coefficients) != header.queries:
        raise InputError(
            f"expected a state of {header.k} and {header.queries} coefficients, "
            f"got {len(s_K)} and {len(record.coefficients)}"
        )
    reach = weight_of(record, header)
    if reach and max(int(s_K.max()), -int(s_K.min())) + reach > STATE_LIMIT:
        raise InputError(f"expected a state within 2**53, got a step of {reach} that may leave it")
    header.needed_exponents(exponents)
    if reach:
        for c, z_K in zip(record.coefficients, directions_of(header, record.step, exponents), strict=True):
            if c:
                add_scaled(s_K, c, z_K)


def _coefficients(header: LogHeader, step: int, projected_grad_Q: NDArray[np.float64]) -> tuple[int, ...]:
    """FORMAT 7.4; a block's step is the mean over its own directions."""
    learning_rate = header.learning_rate_at(step)
    return tuple(
        coefficient(
            learning_rate=learning_rate,
            projected_grad=projected_grad,
            queries=queries.stop - queries.start,
            sigma=header.sigma,
            step_unit_exponent=header.step_unit_exponent,
        )
        for queries, _ in header.blocks()
        for projected_grad in projected_grad_Q[queries].tolist()
    )
