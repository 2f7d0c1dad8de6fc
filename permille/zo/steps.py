"""Steps of zeroth-order descent: perturb, measure losses, round to integers (FORMAT 7).

`take_step` makes the record of a step and changes nothing. `apply_record` moves a state by a record.

Shapes: K = masked weights, Q = queries.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille.package.basis import Basis, required
from permille.zo.estimators import Batch, Descent, LossEngine, directions_of, estimate
from permille.zo.groups import group_sums, grouping
from permille.zo.header import DirectionKind, LogHeader
from permille.zo.journal import Journal
from permille.zo.lattice import MAX_COEFFICIENT, STATE_LIMIT, add_scaled, coefficient
from permille.zo.records import StepFlag, StepRecord, coefficients_of, weight_of
from permille.zo.replay import replay

BASIS_MOMENTUM = 0.8
"""Share of the step before in a step in a basis."""


def take_step(
    engine: LossEngine,
    batch: Batch,
    descent: Descent,
    s_K: NDArray[np.int64],
    step: int,
    *,
    normalised: bool,
) -> StepRecord:
    """Estimate one step at state `s_K`, without changing the state.

    Args:
        normalised: divide the projected gradients by their root mean square, so that the learning rate alone
            sets the length of a step. (FZOO divides by the standard deviation of the losses instead.)

    Returns:
        The record. If a loss or projected gradient is not finite, or a coefficient exceeds the format's
        range, the record has zeros and is REJECTED.
    """
    loss, projected_grad_Q = estimate(engine, batch, descent, s_K, step)
    return rounded_step(loss, projected_grad_Q, descent.header, step, normalised=normalised)


def rounded_step(
    loss: float, projected_grad_Q: NDArray[np.float64], header: LogHeader, step: int, *, normalised: bool
) -> StepRecord:
    """Round the projected gradients of one step to its record. For `normalised`, see `take_step`."""
    rejected = StepRecord(step=step, coefficients=(0,) * header.queries, loss=loss, flags=StepFlag.REJECTED)
    # A rejected step keeps its number, so the directions of later steps stay the same.
    if not (math.isfinite(loss) and np.isfinite(projected_grad_Q).all()):
        return rejected
    # On a flat loss, all projected gradients are zero, so there is no length to divide by.
    if normalised and projected_grad_Q.any():
        largest = np.abs(projected_grad_Q).max()  # divide by it first, because squares may overflow
        projected_grad_Q = projected_grad_Q / largest
        projected_grad_Q /= np.sqrt(np.mean(projected_grad_Q * projected_grad_Q))
    try:
        coefficients = _coefficients(header, step, projected_grad_Q)
    except InputError:  # the quotient overflowed
        return rejected
    # Clipping would change the direction of the step, so the whole step is rejected.
    if max(abs(c) for c in coefficients) > MAX_COEFFICIENT:
        return rejected
    return StepRecord(step=step, coefficients=coefficients, loss=loss)


def basis_step(
    loss: float, slope_Q: NDArray[np.float64], descent: Descent, step: int, before: Sequence[int]
) -> StepRecord:
    """Round the derivatives along the columns of the basis to the record of a step (FORMAT 7.4).

    A step has the basis's length, which falls with the learning rate. Momentum adds a share of the step
    before, as it was logged, so it needs no state of its own.

    Args:
        before: the coefficients of the step before, or () before step 0.

    Returns:
        The record. It is REJECTED in the cases of `take_step`.
    """
    header, basis = descent.header, required(descent.basis)
    rejected = StepRecord(step=step, coefficients=(0,) * header.queries, loss=loss, flags=StepFlag.REJECTED)
    if not (math.isfinite(loss) and np.isfinite(slope_Q).all()):
        return rejected
    moved_Q = np.zeros(header.queries)
    if slope_Q.any():
        slope_Q = slope_Q / np.abs(slope_Q).max()  # squares may overflow
        length = basis.length * header.learning_rate_at(step) / header.learning_rate
        unit = math.ldexp(basis.norm, header.step_unit_exponent)
        moved_Q = slope_Q / np.linalg.norm(slope_Q) * (-length / unit)
    if before:
        moved_Q = moved_Q + BASIS_MOMENTUM * np.array(before)
    # NaN and infinity fail the comparison, too.
    if not (np.abs(moved_Q) <= MAX_COEFFICIENT).all():
        return rejected
    return StepRecord(step=step, coefficients=tuple(np.rint(moved_Q).astype(np.int64).tolist()), loss=loss)


def change_step(change_K: NDArray[np.floating], loss: float, header: LogHeader, step: int) -> StepRecord:
    """Make the record of the part of a change that the step's groups can express (FORMAT 7.4).

    `c_i = rint(<change, z_i> / (<z_i, z_i> 2**e))`: the orthogonal projection of the change, rounded to units
    of the lattice, `2**e`.

    Returns:
        The record. If the loss or change is not finite, or a coefficient exceeds the format's range, the
        record has zeros and is REJECTED.
    """
    # Groups are disjoint, so the directions are orthogonal, and the projection is one quotient each.
    found_Q = grouping(header, step).project(change_K)
    c_Q = np.rint(found_Q / math.ldexp(1.0, header.step_unit_exponent))
    if not math.isfinite(loss) or not (np.abs(c_Q) <= MAX_COEFFICIENT).all():  # NaN fails, too
        rejected = (0,) * header.queries
        return StepRecord(step=step, coefficients=rejected, loss=loss, flags=StepFlag.REJECTED)
    return StepRecord(step=step, coefficients=tuple(c_Q.astype(np.int64).tolist()), loss=loss)


def apply_record(
    s_K: NDArray[np.int64], record: StepRecord, header: LogHeader, basis: Basis | None = None
) -> None:
    """Move a state by one record, in place: `s += sum_i c_i * z_i`.

    Raises:
        InputError: the state would leave the exact range (FORMAT 7.3), or the step needs a basis and there
            is none. The state is then unchanged.
    """
    if len(s_K) != header.k or len(record.coefficients) != header.queries:
        raise InputError(
            f"expected a state of {header.k} and {header.queries} coefficients, "
            f"got {len(s_K)} and {len(record.coefficients)}"
        )
    reach = weight_of(record, header)
    # `-int(min)`, not `abs`: the absolute value of the smallest int64 overflows.
    if reach and max(int(s_K.max()), -int(s_K.min())) + reach > STATE_LIMIT:
        raise InputError(f"expected a state within 2**53, got a step of {reach} that may leave it")
    if not reach:
        return
    if record.step < header.basis_steps:
        s_K += required(basis).sums(np.array([record.coefficients], np.int64))
    elif header.directions is DirectionKind.GROUPS:
        moved_K = group_sums(header, np.array([record.coefficients], np.int64), start=record.step)
        moved_K[: header.moving.start] = 0
        s_K += moved_K
    else:
        for c, z_K in zip(record.coefficients, directions_of(header, record.step), strict=True):
            if c:
                add_scaled(s_K, c, z_K)


class JournaledSteps:
    """The steps in a journal, and the state that they lead to. A step is durable before it moves the state.

    Personal runs and rounds of a federation use this class to continue after a kill:

        steps = JournaledSteps(journal, descent)
        while steps.done < 100:
            record = take_step(engine, batch, descent, steps.s_K, steps.step, normalised=True)
            steps.append(record)

    Attributes:
        s_K: the state before the next step.
    """

    def __init__(self, journal: Journal, descent: Descent, *, first_step: int = 0) -> None:
        """Replay the journal.

        Args:
            journal: the open journal.
            descent: the settings of the log.
            first_step: the number that the journal's first step has in the whole history. The directions of a
                step depend on this number. A journal counts its own steps from zero.
        """
        self._journal, self._descent, self._first_step = journal, descent, first_step
        self.s_K = self.before(journal.next_step)

    @property
    def done(self) -> int:
        """Return the number of steps in the journal."""
        return self._journal.next_step

    @property
    def step(self) -> int:
        """Return the number of the next step in the whole history."""
        return self._first_step + self.done

    def append(self, record: StepRecord) -> None:
        """Make the record of step `step` durable, and move the state by it."""
        # Append first, because a state ahead of its journal could not be replayed after a kill.
        self._journal.append(replace(record, step=self.done))
        apply_record(self.s_K, record, self._descent.header, self._descent.basis)

    def before(self, done: int) -> NDArray[np.int64]:
        """Replay the state after the first `done` steps."""
        header, records = self._descent.header, list(self._journal.records())[:done]
        c_TQ = coefficients_of(records, header)
        return replay(header, c_TQ, start=self._first_step, basis=self._descent.basis)


def _coefficients(header: LogHeader, step: int, projected_grad_Q: NDArray[np.float64]) -> tuple[int, ...]:
    """Round the projected gradients (FORMAT 7.4).

    With two blocks (`split`), the step of each block is the mean over the directions of that block.
    """
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
