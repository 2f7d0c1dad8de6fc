"""The steps of a run: descents, evaluated on the way, until one's steps are short enough.

A descent is what one log holds, or would hold: steps with one learning rate that falls over them. Where its
steps prove too long (`stop_of` says when), the next descent starts again with half the learning rate;
there are at most `MAX_DESCENTS`. With a time limit a later descent has the steps that are left.

Every step is a function of what is durable before it, so a run that is killed goes on with the same bits.
The state is selected on the select split, among those of all descents.

Little text has no select split: an attempt is a descent of a fixed number of steps for each part that is
judged, and one on all of it, whose last state is the run's. What is evaluated on the way are rows that train:
they select nothing and tell whether the steps diverge. One part that does ends the attempt.
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
from permille_agent.training.durable_steps import GradientSteps, LoggedSteps, Steps
from permille_agent.training.evaluation import mean_loss
from permille_agent.training.plan import Plan
from permille_agent.training.run import Evaluation, Run, finite_or_none
from permille_agent.training.step_size import with_step_unit

MAX_DESCENTS = 4
WATCHED_ROWS = 8  # of little text

DIVERGED = 1.10
LONG_SHARE = 0.15
LEAST_EVALUATIONS = 3
MAX_REJECTED_SHARE = 0.1
MIN_REJECTED = 5


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
    """Say why a descent stops before `step`, or None: a function of its durable evaluations.

    Steps are too long where the loss on the select split

    - grows by a tenth (`DIVERGED`), stays above the base's from the beginning for `LONG_SHARE` of the steps,
      or is not finite in many of them: nothing of such a descent is kept;
    - finds no new lowest for `LONG_SHARE` of the steps in the first half of a descent, or stays above the
      base's so long after it has been below: it has wandered off where shorter steps would have gone on. What
      it has found may still be selected.

    A share of the steps holds at least `LEAST_EVALUATIONS` evaluations: one may be high by chance. The last
    descent that there is may stay above the base, or level. Measured in docs/adr/0030.

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
    """Return whether the newest evaluation is far enough behind a step.

    Far enough means a share of the steps and several evaluations.
    """
    count = sum(evaluation.step > step for evaluation in evaluations)
    return count >= LEAST_EVALUATIONS and evaluations[-1].step - step >= LONG_SHARE * total_steps


def _last_good(evaluations: Sequence[Evaluation]) -> int:
    """Step of the last evaluation that was not above the base's."""
    base = evaluations[0].loss
    return max(e.step for e in evaluations if base is None or (e.loss is not None and e.loss <= base))


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedState:
    """The state that a run ends with, before it is judged.

    Attributes:
        descent: which descent it is from.
        step: how many of its steps it is made of; 0 is the base.
        loss: of the state on the select split, nats per token.
        steps: how many steps the descent made.
        rejected: how many of them were.
        s_K: the state.
        header: of its log, or what would be that.
        stopped: why the descent stopped; of a run: the last one.
        judges: of little text, the states that judge its parts: each knows only the parts before.
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
    """Make attempts until one's steps prove short enough; resumes where the journals end.

    Returns:
        The best state of all attempts, the later one of equals.
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
    """Make one descent; of little text, those that judge its parts and the one on all parts."""
    first, judges, prepared = number * _descents(run), list[SelectedState](), run.prepared
    for place, stage in enumerate(prepared.stages):
        run.progress.phase(f"training to judge part {place + 2} of {len(prepared.stages) + 1}")
        part = replace(run, prepared=replace(prepared, train=stage.train))
        steps = math.ceil(total_steps * len(stage.train) / len(prepared.train))
        judge = _DescentLoop(part, plan, first + place, steps).train()
        if judge.stopped in FAILED:
            return judge
        judges.append(judge)
    if judges:
        run.progress.phase("training on all of it")
    last = _DescentLoop(run, plan, first + len(judges), total_steps).train()
    return replace(last, judges=tuple(judge.s_K for judge in judges))


def _descents(run: Run) -> int:
    """Count the descents of an attempt."""
    return len(run.prepared.stages) + 1


def planned_descent(run: Run, plan: Plan, number: int, total_steps: int) -> Descent:
    """Describe descent `number`: each attempt has half the learning rate of the one before."""
    rate = plan.learning_rate * 0.5 ** (number // _descents(run))
    descent = run.descent(
        seed=run.options.seed,
        epsilon=plan.epsilon,
        learning_rate=rate,
        total_steps=total_steps,
        schedule=Schedule.LINEAR,
    )
    if run.options.has_log:
        return with_step_unit(descent)
    exponent = unit_exponent(rate)
    if run.start is not None:  # a state goes on exactly on a unit that is as fine
        exponent = min(exponent, run.start.step_unit_exponent)
    return replace(descent, header=replace(descent.header, step_unit_exponent=exponent))


def _steps_left(plan: Plan, descents: Sequence[SelectedState]) -> int:
    """Return the steps of the next descent: as many as in the first, within the time limit."""
    spent = sum(selected.steps for selected in descents)
    return plan.total_steps if plan.limit_s is None else plan.total_steps - spent


class _DescentLoop:
    """Steps of one descent, which it resumes where it ended."""

    def __init__(self, run: Run, plan: Plan, number: int, total_steps: int) -> None:
        self._run = run
        self._plan = plan
        self._number = number
        self._descent = planned_descent(run, plan, number, total_steps)
        self._evaluations = run.folder.evaluations(number)

    def train(self) -> SelectedState:
        """Step and evaluate until there is a reason to stop."""
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
        """Return whether a level loss ends the search, so that no shorter steps are tried.

        Along a gradient that is the text's end, not that of the step size; of little text nothing is
        selected.
        """
        if self._run.prepared.stages:
            return True
        gradient = not self._run.options.has_log
        return self._number + 1 == MAX_DESCENTS or (gradient and best_of(self._evaluations).step > 0)

    def _is_due(self, step: int, out_of_time: bool) -> bool:
        if self._evaluations and self._evaluations[-1].step >= step:
            return False
        return (
            out_of_time or step % self._plan.evaluate_every == 0 or step == self._descent.header.total_steps
        )

    def _evaluate(self, step: int, steps: Steps) -> None:
        """Evaluate a state on the select split, or of little text on rows that train; durable on return, the
        best state before its loss."""
        run, selects = self._run, not self._run.prepared.stages
        loss: float | None = self._plan.base_loss
        if step or not selects:
            values_K = values(run.w_base_K, steps.s_K, self._descent.header.step_unit_exponent)
            rows = run.prepared.select if selects else run.prepared.train[:WATCHED_ROWS]
            loss = finite_or_none(mean_loss(run.engine, values_K, rows))
        evaluation = Evaluation(step, loss, run.clock.seconds())
        self._evaluations.append(evaluation)
        best = best_of(self._evaluations) if selects else evaluation
        if (step or run.judges_start) and best is evaluation:
            steps.keep()
        run.folder.append_evaluation(self._number, evaluation)
        run.clock.store()
        if loss is not None and selects:
            run.progress.evaluated(step, loss, self._plan.base_loss)

    def _select(self, steps: Steps, stopped: Stop) -> SelectedState:
        selects = not self._run.prepared.stages
        best = best_of(self._evaluations) if selects else self._evaluations[-1]
        if stopped in FAILED:
            best = self._evaluations[0]
        return SelectedState(
            descent=self._number,
            step=best.step,
            loss=best.loss if selects and best.loss is not None else math.inf,
            steps=steps.step,
            rejected=steps.rejected,
            s_K=steps.best(best.step),
            header=self._descent.header,
            stopped=stopped,
        )
