"""When an attempt ends, and whether its step size was too long: a function of its durable evaluations.

A step size is too long where the loss on the select split

- grows by a tenth (`DIVERGED`), stays above the base's from the beginning for `LONG_SHARE` of the steps, or
  is not finite in many of them: nothing of such an attempt is kept;
- finds no new lowest for `LONG_SHARE` of the steps in the first half of an attempt, or stays above the base's
  so long after it has been below: it has wandered off where shorter steps would have gone on. What it has
  found may still be chosen.

A share of the steps holds at least `LEAST_EVALUATIONS` evaluations: one may be high by chance.

The last attempt that there is may stay above the base, or level. Measured in docs/adr/0077.
"""

from collections.abc import Sequence
from enum import StrEnum

from permille_agent.training.run import Evaluation

DIVERGED = 1.10
LONG_SHARE = 0.15
LEAST_EVALUATIONS = 3
MAX_REJECTED_SHARE = 0.1
MIN_REJECTED = 5


class End(StrEnum):
    """Why an attempt ended."""

    STEPS = "steps"
    TIME = "time"
    PATIENCE = "patience"
    LEVEL = "level"
    DIVERGED = "diverged"
    REJECTED = "rejected"


FAILED = frozenset({End.DIVERGED, End.REJECTED})
TOO_LONG = FAILED | {End.LEVEL}


def end_of(
    evaluations: Sequence[Evaluation],
    *,
    step: int,
    total_steps: int,
    rejected: int,
    out_of_time: bool,
    patience: int | None,
    last: bool,
) -> End | None:
    """Why an attempt ends before `step`, or None.

    Args:
        evaluations: so far, by step; the first is the base's.
        total_steps: of the attempt.
        rejected: how many of its steps were.
        patience: evaluations without a new lowest that end a run, or None.
        last: no attempt comes after it.
    """
    if rejected >= max(MIN_REJECTED, MAX_REJECTED_SHARE * step):
        return End.REJECTED
    base, newest = evaluations[0], evaluations[-1]
    if newest.step == step:
        if newest.loss is None or (base.loss is not None and newest.loss > DIVERGED * base.loss):
            return End.DIVERGED
        best = best_of(evaluations)
        if not last and _long_since(_last_good(evaluations), evaluations, total_steps):
            return End.LEVEL if best.step else End.DIVERGED
        level = _long_since(best.step, evaluations, total_steps)
        if level and not last and 2 * step <= total_steps:
            return End.LEVEL
    if step >= total_steps:
        return End.STEPS
    if out_of_time:
        return End.TIME
    if patience is not None and _waited(evaluations) >= patience:
        return End.PATIENCE
    return None


def best_of(evaluations: Sequence[Evaluation]) -> Evaluation:
    """The first of the lowest loss; the base's where none is finite."""
    finite = [evaluation for evaluation in evaluations if evaluation.loss is not None]
    return min(finite, key=lambda evaluation: (evaluation.loss, evaluation.step), default=evaluations[0])


def _long_since(step: int, evaluations: Sequence[Evaluation], total_steps: int) -> bool:
    """Whether the newest evaluation is a share of the steps, and several evaluations, behind a step."""
    count = sum(evaluation.step > step for evaluation in evaluations)
    return count >= LEAST_EVALUATIONS and evaluations[-1].step - step >= LONG_SHARE * total_steps


def _last_good(evaluations: Sequence[Evaluation]) -> int:
    """Step of the last evaluation that was not above the base's."""
    base = evaluations[0].loss
    return max(e.step for e in evaluations if base is None or (e.loss is not None and e.loss <= base))


def _waited(evaluations: Sequence[Evaluation]) -> int:
    best = best_of(evaluations)
    return sum(evaluation.step > best.step for evaluation in evaluations)
