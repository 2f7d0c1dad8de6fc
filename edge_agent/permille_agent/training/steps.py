"""The steps of a run: one or more descents with evaluations.

A descent is a series of steps with a linearly falling learning rate. If its steps are too long
(`stop_of`), another descent starts again with half the learning rate. A run has at most `MAX_DESCENTS`
descents. With a time limit, a later descent has only the remaining steps. The select split selects the best
state of all descents.

Each step is a function of durable results, so a resumed run computes the same bits.

A short text has no select split. In place of each descent, it has an attempt of several descents: one for
each judged part, and a last one on the whole text. Each descent has a fixed number of steps, and its last
state is used. The evaluations use training rows. They select nothing, and only detect divergence. If a
descent diverges, the attempt ends, and another attempt starts with half the learning rate.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from permille.training.adam import unit_exponent
from permille.zo.estimators import Descent
from permille.zo.header import LogHeader, Schedule
from permille.zo.journal import Journal
from permille.zo.lattice import values
from permille_agent.training.durable_steps import GradientSteps, LoggedSteps, Steps, store_best_state
from permille_agent.training.evaluation import mean_loss
from permille_agent.training.plan import Plan
from permille_agent.training.run import Evaluation, Run, finite_or_none

MAX_DESCENTS = 4
BASIS_STEPS = 4  # steps in the package's basis, which are the first ones
WATCHED_ROWS = 8  # training rows that detect divergence on a short text

# Limits of `stop_of`. Measured in docs/adr/0030.
DIVERGED = 1.10  # ratio of a loss to the first loss
LONG_SHARE = 0.15  # share of the steps that is a long time
LEAST_EVALUATIONS = 3  # number of evaluations in a long time
MAX_REJECTED_SHARE = 0.1  # share of the steps so far
MIN_REJECTED = 5  # so that a short descent does not end after its first rejected step


class Stop(StrEnum):
    """Reason for the end of a descent."""

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
    """Return why a descent stops before `step`, or None if it continues.

    The steps of a descent are too long in two cases:

    - `DIVERGED` or `REJECTED`: the loss is not finite, is a tenth above the first loss, or stays above it for
      a long time without an earlier gain. Or a tenth of the steps, and at least five, are rejected. No state
      of such a descent is kept.
    - `LEVEL`: the loss has no new minimum for a long time in the first half of the descent, or it rises above
      the first loss again and stays there for a long time. The best state of the descent may still be
      selected.

    A long time is `LONG_SHARE` of the steps and at least `LEAST_EVALUATIONS` evaluations, because one loss
    may be high by chance. If `last` is true, the loss may stay above the first loss or be level. The limits
    are measured in docs/adr/0030.

    Args:
        evaluations: all evaluations by step, beginning with the evaluation of the start.
        step: the next step.
        total_steps: number of steps of the descent.
        rejected: number of rejected steps.
        out_of_time: whether the time limit has passed.
        last: whether no other descent may follow, or another one would not help.
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
    """Return the first evaluation with the lowest loss, or that of the start if no loss is finite.

    Example:
        >>> best_of([Evaluation(0, 3.0), Evaluation(5, 2.0), Evaluation(10, 2.0)]).step
        5
    """
    finite = [evaluation for evaluation in evaluations if evaluation.loss is not None]
    return min(finite, key=lambda evaluation: (evaluation.loss, evaluation.step), default=evaluations[0])


def _long_since(step: int, evaluations: Sequence[Evaluation], total_steps: int) -> bool:
    """Return whether a long time has passed since `step`, as `stop_of` defines it."""
    count = sum(evaluation.step > step for evaluation in evaluations)
    return count >= LEAST_EVALUATIONS and evaluations[-1].step - step >= LONG_SHARE * total_steps


def _last_good(evaluations: Sequence[Evaluation]) -> int:
    """Return the step of the last loss that was not above the start's."""
    base = evaluations[0].loss
    return max(e.step for e in evaluations if base is None or (e.loss is not None and e.loss <= base))


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedState:
    """The state that a run selects, before its judgement.

    Attributes:
        descent: index of the descent that the state comes from.
        step: number of steps of that descent up to the state. 0 is the start.
        loss: loss of the state on the select split, in nats per token. It is infinite for a short text.
        steps: number of all steps of that descent.
        rejected: number of rejected steps of that descent.
        s_K: the state.
        header: header of the descent's log. A gradient descent has this header, but no log.
        stopped: why the run's last descent stopped.
        judges: for each judging part of a short text, the state that it judges. This state was trained on the
            earlier parts only.
    """

    descent: int
    step: int
    loss: float
    steps: int
    rejected: int
    s_K: NDArray[np.int64]
    header: LogHeader
    stopped: Stop
    judges: tuple[NDArray[np.int64], ...] = ()


def train(run: Run, plan: Plan) -> SelectedState:
    """Make attempts until the steps of one are short enough, or no time or attempt is left.

    Durable steps of an earlier call are not made again.

    Returns:
        The best state of all attempts. Of states with equal losses, the later one is returned.
    """
    found = [_attempt(run, plan, 0, plan.total_steps)]
    while found[-1].stopped in TOO_LONG and len(found) < MAX_DESCENTS:
        number, steps = len(found), _steps_left(plan, found)
        begun = run.folder.begun(number * _descents(run))
        if steps < 1 or (not begun and run.clock.passed(number, 0, plan.limit_s)):
            break
        run.progress.phase(f"steps too long ({found[-1].stopped}): starting again with steps half as long")
        found.append(_attempt(run, plan, number, steps))
    best = min(found, key=lambda selected: (selected.loss, -selected.descent))
    return replace(best, stopped=found[-1].stopped)


def _attempt(run: Run, plan: Plan, number: int, total_steps: int) -> SelectedState:
    """Make one descent. For a short text, make one descent for each judged part and one on the whole text."""
    first, judges, prepared = number * _descents(run), list[SelectedState](), run.prepared
    for place, stage in enumerate(prepared.stages):
        # The earlier parts have less text than the whole. They get fewer steps, but as many passes over their
        # text.
        run.progress.phase(f"training the state that part {place + 2} of {len(prepared.stages) + 1} judges")
        part = replace(run, prepared=replace(prepared, train=stage.train))
        steps = math.ceil(total_steps * len(stage.train) / len(prepared.train))
        judge = _DescentLoop(part, plan, first + place, steps).train()
        # The next attempt begins again with the first part and shorter steps.
        if judge.stopped in FAILED:
            return judge
        judges.append(judge)
    if judges:
        run.progress.phase("training on the whole text")
    last = _DescentLoop(run, plan, first + len(judges), total_steps).train()
    return replace(last, judges=tuple(judge.s_K for judge in judges))


def _descents(run: Run) -> int:
    """Count the descents of an attempt."""
    return len(run.prepared.stages) + 1


def planned_descent(run: Run, plan: Plan, number: int, total_steps: int) -> Descent:
    """Return the description of a descent. Each attempt halves the learning rate."""
    rate = plan.learning_rate * 0.5 ** (number // _descents(run))
    descent = run.descent(
        seed=run.options.seed,
        epsilon=plan.epsilon,
        learning_rate=rate,
        total_steps=total_steps,
        schedule=Schedule.LINEAR,
        # If the first attempt failed, its steps were too long, so the next one takes none of them.
        basis_steps=min(BASIS_STEPS, total_steps) if run.basis and number < _descents(run) else 0,
    )
    if run.options.has_log:
        header = descent.header.with_step_unit()
        if run.basis and header.basis_steps:
            unit = min(header.step_unit_exponent, run.basis.step_unit_exponent)
            header = replace(header, step_unit_exponent=unit)
        return replace(descent, header=header)
    exponent = unit_exponent(rate)
    if run.start is not None:  # a coarser unit could not represent the start exactly
        exponent = min(exponent, run.start.step_unit_exponent)
    return replace(descent, header=replace(descent.header, step_unit_exponent=exponent))


def _steps_left(plan: Plan, descents: Sequence[SelectedState]) -> int:
    """Return the number of steps of the next descent. With a time limit, earlier steps are subtracted."""
    spent = sum(selected.steps for selected in descents)
    return plan.total_steps if plan.limit_s is None else plan.total_steps - spent


class _DescentLoop:
    """Loop over the steps of one descent, which can be resumed."""

    def __init__(self, run: Run, plan: Plan, number: int, total_steps: int) -> None:
        self._run = run
        self._plan = plan
        self._number = number
        self._descent = planned_descent(run, plan, number, total_steps)
        self._evaluations = run.folder.evaluations(number)

    def train(self) -> SelectedState:
        """Make steps and evaluations until `stop_of` stops the descent."""
        run = self._run
        if not run.options.has_log:
            return self._train(GradientSteps(run, self._descent, self._number))
        path, header = run.folder.journal(self._number), self._descent.header
        with Journal.open(path) if path.exists() else Journal.create(path, header) as journal:
            return self._train(LoggedSteps(run, self._descent, journal))

    def _train(self, steps: Steps) -> SelectedState:
        run, total_steps = self._run, self._descent.header.total_steps
        while True:
            step = steps.step
            out_of_time = run.clock.passed(self._number, step, self._plan.limit_s)
            if self._is_due(step, out_of_time):
                self._evaluate(step, steps)
            stopped = stop_of(
                self._evaluations,
                step=step,
                total_steps=total_steps,
                rejected=steps.rejected,
                out_of_time=out_of_time,
                last=self._is_last(),
            )
            if stopped:
                return self._select(steps, stopped)
            loss = steps.take()
            run.progress.step(step + 1, total_steps, loss)

    def _is_last(self) -> bool:
        """Return whether this descent continues when its loss is level.

        It does if no other descent may follow, or if another descent would not help.
        """
        if self._run.prepared.stages:
            return True  # the evaluations of a short text only detect divergence
        # A gradient descent that has improved and is level has learned the text. Shorter steps do not help.
        gradient = not self._run.options.has_log
        return self._number + 1 == MAX_DESCENTS or (gradient and best_of(self._evaluations).step > 0)

    def _is_due(self, step: int, out_of_time: bool) -> bool:
        if self._evaluations and self._evaluations[-1].step >= step:
            return False
        return (
            out_of_time or step % self._plan.evaluate_every == 0 or step == self._descent.header.total_steps
        )

    def _evaluate(self, step: int, steps: Steps) -> None:
        """Evaluate the state, and store the loss durably.

        The best state is stored before its loss. So after a kill, no loss refers to a missing state.
        """
        run, selects = self._run, not self._run.prepared.stages
        loss: float | None = self._plan.base_loss
        if step or not selects:
            values_K = values(run.w_base_K, steps.s_K, self._descent.header.step_unit_exponent)
            rows = run.prepared.select if selects else run.prepared.train[:WATCHED_ROWS]
            loss = finite_or_none(mean_loss(run.engine, values_K, rows))
        evaluation = Evaluation(step, loss, run.clock.seconds())
        self._evaluations.append(evaluation)
        best = best_of(self._evaluations) if selects else evaluation
        if step and best is evaluation:
            steps.keep()
        run.folder.append_evaluation(self._number, evaluation)
        run.clock.store()
        if loss is not None and selects:
            run.progress.evaluated(step, loss, self._plan.base_loss)

    def _select(self, steps: Steps, stopped: Stop) -> SelectedState:
        run, header = self._run, self._descent.header
        selects = not run.prepared.stages
        best = best_of(self._evaluations) if selects else self._evaluations[-1]
        # No trained state of a failed descent is kept.
        if stopped in FAILED:
            best = self._evaluations[0]
        s_K = steps.best(best.step)
        if not best.step and run.judges_start:
            # The start may be adopted, so store it, even in place of a better state of a failed descent.
            store_best_state(run, header, self._number, s_K)
        return SelectedState(
            descent=self._number,
            step=best.step,
            loss=best.loss if selects and best.loss is not None else math.inf,
            steps=steps.step,
            rejected=steps.rejected,
            s_K=s_K,
            header=header,
            stopped=stopped,
        )
