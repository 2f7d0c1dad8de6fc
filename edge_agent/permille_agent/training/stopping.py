"""When a descent stops, and whether its steps were too long: a function of its durable evaluations.

Steps are too long where the loss on the select split

- grows by a tenth (`DIVERGED`), stays above the base's from the beginning for `LONG_SHARE` of the steps, or
  is not finite in many of them: nothing of such a descent is kept;
- finds no new lowest for `LONG_SHARE` of the steps in the first half of a descent, or stays above the base's
  so long after it has been below: it has wandered off where shorter steps would have gone on. What it has
  found may still be selected.

A share of the steps holds at least `LEAST_EVALUATIONS` evaluations: one may be high by chance. The last
descent that there is may stay above the base, or level. Measured in docs/adr/0030.
"""

from collections.abc import Sequence
from enum import StrEnum

from permille_agent.training.run import Evaluation

DIVERGED = 1.10
LONG_SHARE = 0.15
LEAST_EVALUATIONS = 3
MAX_REJECTED_SHARE = 0.1
MIN_REJECTED = 5


class Stop(StrEnum):
    """Why a descent stopped."""

    STEPS = "steps"
    TIME = "time"
    LEVEL = "level"
    DIVERGED = "diverged"
    REJECTED = "rejected"


FAILED = frozenset({Stop.DIVERGED, Stop.REJECTED})
TOO_LONG = FAILED | {Stop.LEVEL}


def stop_of(
    evaluations: Sequence[Evaluation],
    *,
    step: int,
    total_steps: int,
    rejected: int,
    out_of_time: bool,
    last: bool,
) -> Stop | None:
    """Say why a descent stops before `step`, or None.

    Args:
        evaluations: so far, by step; the first is the base's.
        step: the next one.
        total_steps: of the descent.
        rejected: how many of its steps were.
        out_of_time: the time limit has passed.
        last: no descent comes after it.
    """
    if rejected >= max(MIN_REJECTED, MAX_REJECTED_SHARE * step):
        return Stop.REJECTED
    base, newest = evaluations[0], evaluations[-1]
    if newest.step == step:
        if newest.loss is None or (base.loss is not None and newest.loss > DIVERGED * base.loss):
            return Stop.DIVERGED
        best = best_of(evaluations)
        if not last and _long_since(_last_good(evaluations), evaluations, total_steps):
            return Stop.LEVEL if best.step else Stop.DIVERGED
        level = _long_since(best.step, evaluations, total_steps)
        if level and not last and 2 * step <= total_steps:
            return Stop.LEVEL
    if step >= total_steps:
        return Stop.STEPS
    return Stop.TIME if out_of_time else None


def best_of(evaluations: Sequence[Evaluation]) -> Evaluation:
    """Find the first of the lowest loss; the base's where none is finite."""
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
