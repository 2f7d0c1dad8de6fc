"""A device's part in a round: K steps from the pooled state on its own text (FORMAT 13.2).

A step is like a step of a log (`permille.zo.steps`), with the same directions. The device sends the
integers of its steps, and the same integers move its state before the next step. So the integers that
it sends add up exactly to its local state. With the estimator `gradient`, one step holds the sum of
`local_steps` Adam steps on every weight.

Each step is durable before the next one begins. A device that is killed continues with the same
integers.

Shapes: T = steps done, Q = queries, W = masked weights.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from permille.choices import EstimatorKind
from permille.training.adam import Moments, adam_step
from permille.zo.estimators import Batch, Descent, LossEngine, differentiable
from permille.zo.header import LogHeader
from permille.zo.journal import Journal
from permille.zo.lattice import values
from permille.zo.records import StepFlag, StepRecord, coefficients_of
from permille.zo.replay import replay
from permille.zo.steps import JournaledSteps, change_step, take_step
from permille_rounds.definition import MAX_CONTRIBUTED, Definition

JOURNAL = "steps.journal"
MOMENTS = "steps.moments"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LocalRound:
    """A device's part in a round.

    Attributes:
        number: the number of the round.
        start_W: int64, the pooled state before the round, in the unit of the history.
        w_base_W: the weights at state zero.
    """

    definition: Definition
    number: int
    start_W: NDArray[np.int64]
    w_base_W: NDArray[np.float32]

    @property
    def first_step(self) -> int:
        """The number of the round's first step in the history."""
        return self.number * self.definition.steps

    def descent(self) -> Descent:
        """Return the settings of the device's steps. They begin at the pooled state, with a state of 0."""
        rules = self.definition
        return Descent(
            header=rules.device_log(),
            w_base_K=values(self.w_base_W, self.start_W, rules.log.step_unit_exponent),
        )

    def moved(self, c_TQ: NDArray[np.int64]) -> NDArray[np.int64]:
        """Replay the round's first steps. Return the change of the state, int64 [W], in the device's unit."""
        return replay(self.definition.log, c_TQ, start=self.first_step)


def take_local_steps(
    part: LocalRound,
    engine: LossEngine,
    batches: Callable[[int], Batch],
    folder: Path,
) -> NDArray[np.int64]:
    """Take the steps of a round that are not done yet. Return the integers of all steps, int64 [T, Q].

    Args:
        part: the constants of the round.
        engine: an engine of the package. For the estimator `gradient`, it needs a reverse pass.
        batches: a function that returns the batch of a step by its number. Steps are counted through the
            whole history. With the estimator `gradient`, they are local steps, else steps of the log.
        folder: a folder for this round alone, where the steps are stored.

    Raises:
        InputError: the engine cannot do what the estimator needs.
        PackageError, OperatorError: a file in the folder is damaged.
    """
    descent, path = part.descent(), folder / JOURNAL
    header, follows = descent.header, descent.header.estimator is EstimatorKind.GRADIENT
    with Journal.open(path) if path.exists() else Journal.create(path, header) as journal:
        steps = JournaledSteps(journal, descent, first_step=part.first_step)
        gradient = _GradientSteps(part, descent, folder / MOMENTS) if follows else None
        while steps.done < part.definition.steps:
            if gradient is None:
                batch = batches(steps.step)
                record = take_step(engine, batch, descent, steps.s_K, steps.step, normalised=True)
            else:
                record = gradient.record(engine, batches, steps.s_K, steps.step)
            steps.append(_bounded(record))
        return coefficients_of(journal.records(), header)


class _GradientSteps:
    """Records of steps along a gradient, projected on the groups of the history.

    The projection loses what groups cannot express, and Adam begins anew in each round. Carrying over
    the lost part, or Adam's moments, to the next round made the pooled loss higher. There was one exception:
    with 256 groups and 8 steps, carrying over the moments made it lower (ADR 14).
    """

    def __init__(self, part: LocalRound, descent: Descent, path: Path) -> None:
        self._rules = part.definition
        self._descent = descent
        self._path = path
        first_W = np.zeros(descent.header.k, np.int64)
        first = replace(Moments.first(len(first_W), first_W), step=part.first_step)
        self._moments = Moments.load(path) or first

    def record(
        self, engine: LossEngine, batches: Callable[[int], Batch], s_W: NDArray[np.int64], step: int
    ) -> StepRecord:
        """Take the local steps that make one step of the log. They are durable on return."""
        if self._moments.step == step + 1:
            # A kill came between storing the moments and appending to the journal: append this record.
            return self._moments.record()
        gradients, rules, header = differentiable(engine), self._rules, self._descent.header
        exponent = rules.log.step_unit_exponent
        # The device's unit is coarser than the history's by the guard bits.
        before_W = s_W << rules.guard_bits
        moments, losses = replace(self._moments, s_K=before_W), []
        for number in range(step * rules.local_steps, (step + 1) * rules.local_steps):
            values_W = values(self._descent.w_base_K, moments.s_K, exponent)
            loss, gradient_W = gradients.gradient(values_W, batches(number))
            # The schedule counts steps of the log, so the local steps of one step have the same rate.
            rate = header.learning_rate_at(step)
            moments = adam_step(moments, loss, gradient_W, rate=rate, step_unit_exponent=exponent)
            losses.append(loss)
        # FORMAT 13.1: a step of the log holds the change of all its local steps.
        change_W = (moments.s_K - before_W) * math.ldexp(1.0, exponent)
        loss = math.fsum(losses) / len(losses)
        record = change_step(_stretched(change_W, header), loss, header, step)
        self._moments = replace(
            moments,
            step=step + 1,
            coefficients=np.array(record.coefficients, np.int64),
            loss=loss,
            flags=int(record.flags),
        )
        # Store the moments before the journal gets the record. The file of moments contains the record, so a
        # kill in between loses nothing. In the reverse order, it would lose the moments.
        self._moments.store(self._path)
        return record


def _stretched(change_K: NDArray[np.float64], header: LogHeader) -> NDArray[np.float64]:
    """Lengthen a change by about as much as its projection on groups of weights shortens it."""
    weights = header.k / header.queries  # g, the weights of a group
    # Of the factors that we measured, `min(g, 2 sqrt(g))` lowered the loss the most.
    return change_K * max(1.0, min(weights, 2 * math.sqrt(weights)))


def _bounded(record: StepRecord) -> StepRecord:
    """Return the step with its integers scaled into the limit of FORMAT 13.2, if they exceed it."""
    largest = max(abs(c) for c in record.coefficients)
    if largest <= MAX_CONTRIBUTED:
        return record
    # Round toward zero, so that no integer exceeds the limit.
    shorter = tuple((1 if c > 0 else -1) * (abs(c) * MAX_CONTRIBUTED // largest) for c in record.coefficients)
    return replace(record, coefficients=shorter, flags=record.flags | StepFlag.CLIPPED)
