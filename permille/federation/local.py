"""What one device does in a round: K steps from the pooled state on text of its own (FORMAT 13.2).

A step is one of a log (`permille.zo.steps`), along its directions. Its integers are what
is sent, and what moves the state for the next step; so they add up to exactly the local state. A sketch's
step holds the change that `local_steps` steps of Adam on every weight have made.

Each step is durable before it counts: a device that is killed goes on with the same integers.

Shapes: T = steps done, Q = queries, W = masked weights.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from permille.choices import EstimatorKind
from permille.errors import InputError, OperatorError
from permille.federation.definition import MAX_CONTRIBUTED, Definition
from permille.files import write_atomic
from permille.training.adam import Moments, stretched, unlogged_step
from permille.zo.estimators import Batch, Descent, LossEngine
from permille.zo.exponents import Exponents
from permille.zo.journal import Journal
from permille.zo.lattice import values
from permille.zo.records import StepFlag, StepRecord, coefficients_of
from permille.zo.replay import replay
from permille.zo.steps import sketch_step, take_step

JOURNAL = "steps.journal"
MOMENTS = "steps.moments"


class _Gradients(Protocol):
    def gradient(self, values_W: NDArray[np.float32], batch: Batch) -> tuple[float, NDArray[np.float32]]: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LocalRound:
    """One device's part of one round.

    Attributes:
        number: of the round.
        start_W: int64, the pooled state before the round, on the history's unit.
        w_base_W: the values that state zero stands for.
        exponents: of the package, as far as the history needs them.
    """

    definition: Definition
    number: int
    start_W: NDArray[np.int64]
    w_base_W: NDArray[np.float32]
    exponents: Exponents | None = None

    @property
    def first_step(self) -> int:
        """The history's number of the first step."""
        return self.number * self.definition.steps

    def descent(self) -> Descent:
        """Steps from the pooled state; their state begins at zero."""
        rules = self.definition
        return Descent(
            header=rules.device_log(),
            w_base_K=values(self.w_base_W, self.start_W, rules.log.step_unit_exponent),
            exponents=self.exponents,
        )

    def moved(self, c_TQ: NDArray[np.int64], *, after: int = 0) -> NDArray[np.int64]:
        """Where steps from `after` on move the state, on the device's unit, int64 [W]."""
        return replay(self.definition.log, c_TQ, self.exponents, start=self.first_step + after)


def take_local_steps(
    part: LocalRound,
    engine: LossEngine,
    batches: Callable[[int], Batch],
    folder: Path,
) -> NDArray[np.int64]:
    """Take the steps of a round, or what is left of them; returns their integers, int64 [T, Q].

    Args:
        part: what is the same at every step.
        engine: of the package; for a sketch one that also differentiates backward.
        batches: the batch of each step of the history, of a sketch's each local step; a pure function.
        folder: of this round alone, where the steps are durable.

    Raises:
        InputError: the engine cannot do what the estimator needs.
        PackageError, OperatorError: what is in the folder is damaged.
    """
    descent, path = part.descent(), folder / JOURNAL
    with Journal.open(path) if path.exists() else Journal.create(path, descent.header) as journal:
        if descent.header.estimator is EstimatorKind.SKETCH:
            steps: _Steps = _SketchedSteps(part, descent, journal, folder / MOMENTS)
        else:
            steps = _Steps(part, descent, journal)
        while journal.next_step < part.definition.steps:
            steps.take(engine, batches)
        return coefficients_of(journal.records(), descent.header)


class _Steps:
    """Steps of losses or derivatives."""

    def __init__(self, part: LocalRound, descent: Descent, journal: Journal) -> None:
        self._part = part
        self._descent = descent
        self._journal = journal
        self._s_W = part.moved(coefficients_of(journal.records(), descent.header))

    def take(self, engine: LossEngine, batches: Callable[[int], Batch]) -> None:
        """Take one step; durable on return."""
        step = self._part.first_step + self._journal.next_step
        self._append(take_step(engine, batches(step), self._descent, self._s_W, step, normalised=True))

    def _append(self, record: StepRecord) -> None:
        """Make a step of the history durable as one of the round, and move by it."""
        done = self._journal.next_step
        record = replace(_bounded(record), step=done)
        self._journal.append(record)
        self._s_W += self._part.moved(coefficients_of([record], self._descent.header), after=done)


class _SketchedSteps(_Steps):
    """Steps along a gradient, as far as the groups of the history hold them.

    What the groups do not hold is lost, and Adam begins anew in each round: to carry either over did not make
    the pooled loss lower (docs/adr/0014). What Adam remembers is durable before the journal is, so a kill
    leaves a record to append, or nothing.
    """

    def __init__(self, part: LocalRound, descent: Descent, journal: Journal, path: Path) -> None:
        super().__init__(part, descent, journal)
        self._path = path
        moments = _load_moments(path)
        if moments is None:
            moments = replace(Moments.first(len(self._s_W), self._s_W), step=part.first_step)
        if moments.step == part.first_step + journal.next_step + 1:
            self._append(moments.record())
        self._moments = moments

    def take(self, engine: LossEngine, batches: Callable[[int], Batch]) -> None:
        """Take the local steps of one step; durable on return."""
        if not hasattr(engine, "gradient"):
            raise InputError("expected an engine with a reverse pass for a federation of sketches")
        gradients, rules, header = cast("_Gradients", engine), self._part.definition, self._descent.header
        step, exponent = self._moments.step, rules.log.step_unit_exponent
        before_W = self._s_W << rules.guard_bits
        moments, losses = replace(self._moments, s_K=before_W), []
        for number in range(step * rules.local_steps, (step + 1) * rules.local_steps):
            values_W = values(self._descent.w_base_K, moments.s_K, exponent)
            loss, gradient_W = gradients.gradient(values_W, batches(number))
            rate = header.learning_rate_at(step)
            moments = unlogged_step(moments, loss, gradient_W, rate=rate, step_unit_exponent=exponent)
            losses.append(loss)
        change_W = (moments.s_K - before_W) * math.ldexp(1.0, exponent)
        loss = math.fsum(losses) / len(losses)
        record = _bounded(sketch_step(stretched(change_W, header), loss, header, step, self._part.exponents))
        self._moments = replace(
            moments,
            step=step + 1,
            coefficients=np.array(record.coefficients, np.int64),
            loss=loss,
            flags=int(record.flags),
        )
        write_atomic(self._path, self._moments.to_bytes(), mode=0o600)
        self._append(record)


def _load_moments(path: Path) -> Moments | None:
    try:
        return Moments.from_bytes(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as exc:
        raise OperatorError(f"expected the moments of a round in {path}, got {exc}") from exc


def _bounded(record: StepRecord) -> StepRecord:
    """A step whose integers are within what may be sent (FORMAT 13.2); a longer one is made shorter."""
    largest = max(abs(c) for c in record.coefficients)
    if largest <= MAX_CONTRIBUTED:
        return record
    shorter = tuple((1 if c > 0 else -1) * (abs(c) * MAX_CONTRIBUTED // largest) for c in record.coefficients)
    return replace(record, coefficients=shorter, flags=record.flags | StepFlag.CLIPPED)
