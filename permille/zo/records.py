"""The step records of both forms of the log, and the rules that bound them (FORMAT 7.3, 8.2).

Shapes: T = steps, Q = queries.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntFlag

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille.package.limits import LARGEST_ELEMENT
from permille.zo.header import LogHeader
from permille.zo.lattice import MAX_COEFFICIENT, STATE_LIMIT

# The number of rows that are summed at once. It keeps the float64 copies small.
_ROWS = 1024


class StepFlag(IntFlag):
    """Outcome of the checks of a step (FORMAT 8.2).

    CLIPPED: the step was too large for a limit, and was scaled down. REJECTED: a number of the step was not
    finite or too large, so all coefficients are 0.
    """

    NONE = 0
    CLIPPED = 1
    REJECTED = 2


KNOWN_FLAGS = int(StepFlag.CLIPPED | StepFlag.REJECTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A step as it was applied.

    Attributes:
        step: the number of the step.
        coefficients: one integer for each query, all 0 if the step was rejected.
        loss: the mean of the step's losses. It stays on the device: the canonical log has no losses.
        flags: the outcome of the checks.
    """

    step: int
    coefficients: tuple[int, ...]
    loss: float
    flags: StepFlag = StepFlag.NONE


def coefficients_of(records: Iterable[StepRecord], header: LogHeader) -> NDArray[np.int64]:
    """Return the coefficients of a log's records, int64 [T, Q], in the form that replay takes."""
    rows = [record.coefficients for record in records]
    return np.array(rows, dtype=np.int64).reshape(len(rows), header.queries)


def check_record(record: StepRecord, header: LogHeader, *, expected_step: int) -> None:
    """Check that a record continues the log of `header` at `expected_step` (FORMAT 8.2).

    Raises:
        InputError: the message names the broken rule.
    """
    # FORMAT 8.2: step numbers have no gaps.
    if record.step != expected_step:
        raise InputError(f"expected step {expected_step}, got {record.step}")
    if record.step >= header.total_steps:
        raise InputError(f"expected at most {header.total_steps} steps, got step {record.step}")
    if len(record.coefficients) != header.queries:
        raise InputError(f"expected {header.queries} coefficients, got {len(record.coefficients)}")
    if any(abs(c) > MAX_COEFFICIENT for c in record.coefficients):
        raise InputError(f"expected coefficients within {MAX_COEFFICIENT}, got {record.coefficients}")
    if not 0 <= int(record.flags) <= KNOWN_FLAGS:
        raise InputError(f"expected flags of FORMAT 8.2, got {int(record.flags)}")
    if StepFlag.REJECTED in record.flags and any(record.coefficients):
        raise InputError(f"expected zero coefficients in a rejected step, got {record.coefficients}")


def weight_of(record: StepRecord, header: LogHeader) -> int:
    """Return the weight of a step. The bound on |s| grows by this number (FORMAT 7.3)."""
    largest = LARGEST_ELEMENT if record.step < header.basis_steps else 1
    return largest * sum(abs(c) for c in record.coefficients)


def weight_of_rows(coefficients_TQ: NDArray[np.int64], basis_steps: int = 0) -> int:
    """Return the weight of many steps, of which the first `basis_steps` are in a basis.

    If it exceeds `STATE_LIMIT`, return any number above the limit.
    """
    if basis_steps:
        in_basis = weight_of_rows(coefficients_TQ[:basis_steps])
        return LARGEST_ELEMENT * in_basis + weight_of_rows(coefficients_TQ[basis_steps:])
    total = 0
    for first in range(0, len(coefficients_TQ), _ROWS):
        rows_TQ = coefficients_TQ[first : first + _ROWS]
        # Sum in float64 first, because the int64 sum of hostile coefficients may wrap.
        if np.abs(rows_TQ.astype(np.float64)).sum() > STATE_LIMIT:
            return 2 * STATE_LIMIT
        total += int(np.abs(rows_TQ).sum())
        if total > STATE_LIMIT:
            break
    return total


def check_weight(weight: int) -> None:
    """Check that the state of a log stays within 2**53. `weight` is the log's weight (FORMAT 7.3).

    Raises:
        InputError: the state may leave this range.
    """
    if weight > STATE_LIMIT:
        raise InputError(f"expected sum |c| within 2**53, got {weight}")
