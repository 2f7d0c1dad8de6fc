"""Plan of a run: epsilon, step size, and the number of steps, given directly or by time.

With a time limit, a step and an evaluation are timed once; from then on the budget is a function of those two
numbers and the limit. A quarter of the time at most goes into the search, about a fifth of training into
evaluations, and as much as judging the result takes is kept for that, within bounds. Little text has nothing
to select: its steps are fixed, and a few evaluations find out whether they diverge.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from permille.errors import OperatorError
from permille.training.adam import learning_rate
from permille_agent.text.rows import Row
from permille_agent.training.evaluation import mean_loss
from permille_agent.training.gradient_steps import pulled_gradient
from permille_agent.training.progress import duration
from permille_agent.training.run import BegunRun, Run, RunFolder, finite_or_none, other_runs
from permille_agent.training.step_size import LossFound, SearchFailed, find_epsilon, find_step_size

EVALUATIONS = 20
FEWEST_EVALUATIONS = 4
TRIAL_SHARE = 10
TRIAL_STEPS = (5, 40)
SEARCH_SHARE = 0.25
EVALUATION_SHARE = 0.2
JUDGEMENT_SHARE = (0.05, 0.4)
# Trials of a usual search, and models that are judged: the base, the selected one, and often an active one.
TRIALS = 4
JUDGED = 3
TIMED_ROWS = 8
# Along gradients: passes over the training text at most, but so many steps at least where time allows.
PASSES = 8
LEAST_STEPS = 40
# Stands in the header that a gradient's log would have, where nothing reads it.
NO_EPSILON = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that the steps depend on, written before the first of them.

    Attributes:
        epsilon: scale of perturbations.
        relative_error: of the projected gradients at that epsilon.
        learning_rate: of the first descent.
        losses: of the trials of learning rates, by their power.
        base_loss: of the base on the select split.
        total_steps: the learning rate falls over so many.
        evaluate_every: so many steps.
        limit_s: seconds of work after which no further step is made, or None.
    """

    epsilon: float
    relative_error: float
    learning_rate: float
    losses: dict[int, float | None]
    base_loss: float
    total_steps: int
    evaluate_every: int
    limit_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Time budgets of the parts of a run.

    Attributes:
        steps: of the run.
        trial_steps: of each trial of the search.
        evaluations: about so many on the way.
        limit_s: seconds of work after which no further step is made, or None.
    """

    steps: int
    trial_steps: int
    evaluations: int
    limit_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds of one step, and of evaluating one token, on this machine."""

    step_s: float
    token_s: float


def make_plan(run: Run) -> Plan:
    """Search where there is something to find, and fix what the steps depend on; durable before the first.

    Raises:
        SearchFailed: no usable epsilon or step size.
    """
    make = _plan if run.options.has_log else _gradient_plan
    plan = run.folder.once("plan", Plan, lambda: make(run))
    if (told := forecast(run, plan)) is not None:
        run.progress.phase(told)
    return plan


def forecast(run: Run, plan: Plan) -> str | None:
    """Say how long a step takes on this device, and how many there will be.

    By the steps that were timed for this run, else by those of the newest run of the same package that was
    timed here; None where there is neither.
    """
    pace, minutes = run.folder.load("search-pace", Pace), run.options.minutes
    if pace is not None and minutes is not None:
        step = duration(pace.step_s * _trainings(run))
        most = "" if plan.total_steps < _most_steps(run) else ", all that this text is good for"
        return f"a step takes {step} here: {_counted(plan.total_steps)} in {minutes:g} minutes{most}"
    step_s = next(filter(None, map(partial(_step_s, run), reversed(other_runs(run.folder)))), None)
    if step_s is None:
        return None
    step, total = duration(step_s), duration(step_s * _trainings(run) * plan.total_steps)
    return f"a step took {step} here before: {_counted(plan.total_steps)} will take about {total}"


def _counted(steps: int) -> str:
    return f"{steps} step" + "s" * (steps != 1)


def _step_s(run: Run, other: RunFolder) -> float | None:
    """Return the seconds of a step of another run.

    Return None if it was not timed or its steps were of another kind.
    """
    try:
        begun, pace = other.load("run", BegunRun), other.load("search-pace", Pace)
    except OperatorError:  # a damaged run is no reason not to begin this one
        return None
    if begun is None or pace is None or begun.definition.package != run.package.digest:
        return None
    ours, theirs = run.options, begun.definition.options
    same = (ours.estimator, ours.queries, ours.batch_rows, ours.row_tokens) == (
        *(theirs.estimator, theirs.queries, theirs.batch_rows, theirs.row_tokens),
    )
    return pace.step_s if same else None


def budget_of_steps(steps: int) -> Budget:
    """Divide a run of a number of steps. The budget depends on nothing else."""
    low, high = TRIAL_STEPS
    trial_steps = min(high, max(low, steps // TRIAL_SHARE))
    return Budget(steps=steps, trial_steps=trial_steps, evaluations=EVALUATIONS, limit_s=None)


def budget_of_time(available_s: float, *, step_s: float, evaluation_s: float, judgement_s: float) -> Budget:
    """Divide a run that may take `available_s` seconds in all.

    Args:
        available_s: of the whole run.
        step_s: of one step.
        evaluation_s: of one evaluation on the select split.
        judgement_s: of evaluating one model on the test split.
    """
    least, most = JUDGEMENT_SHARE
    kept_s = min(most * available_s, max(least * available_s, JUDGED * judgement_s))
    trial_s = SEARCH_SHARE * available_s / TRIALS
    trial_steps = min(TRIAL_STEPS[1], max(2, int((trial_s - evaluation_s) / step_s)))
    train_s = available_s - kept_s - TRIALS * (trial_steps * step_s + evaluation_s)
    evaluations = int(EVALUATION_SHARE * train_s / evaluation_s)
    evaluations = min(EVALUATIONS, max(FEWEST_EVALUATIONS, evaluations))
    steps = max(1, int((train_s - evaluations * evaluation_s) / step_s))
    return Budget(steps=steps, trial_steps=trial_steps, evaluations=evaluations, limit_s=available_s - kept_s)


def budget_of_gradient(
    available_s: float, *, step_s: float, evaluation_s: float, judgement_s: float, most_steps: float
) -> Budget:
    """Divide a gradient run that may take `available_s` seconds in all. It has no search.

    Args:
        most_steps: more of them learn the text by heart.
    """
    least, most = JUDGEMENT_SHARE
    kept_s = min(most * available_s, max(least * available_s, JUDGED * judgement_s))
    train_s = available_s - kept_s
    evaluations = int(EVALUATION_SHARE * train_s / evaluation_s)
    evaluations = min(EVALUATIONS, max(FEWEST_EVALUATIONS, evaluations))
    steps = max(1, int((train_s - evaluations * evaluation_s) / step_s))
    return Budget(
        steps=int(min(steps, most_steps)),
        trial_steps=0,
        evaluations=evaluations,
        limit_s=available_s - kept_s,
    )


def _gradient_plan(run: Run) -> Plan:
    rate = learning_rate(run.package)
    if not 0 < rate < math.inf:
        raise SearchFailed(
            f"All trained weights of the package are 0, so there is no learning rate (got {rate})."
        )
    run.progress.phase("looking at the text")
    start_K = run.first_values()
    rows = run.prepared.select or run.prepared.test
    base = run.folder.once(
        "search-base",
        LossFound,
        lambda: LossFound(loss=finite_or_none(mean_loss(run.engine, start_K, rows))),
    )
    if base.loss is None:
        raise SearchFailed("The loss of the base model on this text is not finite.")
    if run.options.steps is not None:
        budget = budget_of_steps(run.options.steps)
    else:
        pace = run.folder.once("search-pace", Pace, lambda: _gradient_pace(run, start_K))
        budget = budget_of_gradient(
            60.0 * float(run.options.minutes or 0.0),
            step_s=pace.step_s * _trainings(run),
            evaluation_s=pace.token_s * _tokens(rows),
            judgement_s=pace.token_s * _tokens(run.prepared.test),
            most_steps=_most_steps(run),
        )
    evaluations = FEWEST_EVALUATIONS if run.prepared.stages else budget.evaluations
    return Plan(
        epsilon=NO_EPSILON,
        relative_error=0.0,
        learning_rate=rate * run.options.rate_scale,
        losses={},
        base_loss=base.loss,
        total_steps=budget.steps,
        evaluate_every=max(1, math.ceil(budget.steps / evaluations)),
        limit_s=None if run.prepared.stages else budget.limit_s,
    )


def _most_steps(run: Run) -> float:
    """Return the most steps that do not learn the text by heart; zeroth order never does."""
    if run.options.has_log:
        return math.inf
    return max(LEAST_STEPS, math.ceil(PASSES * len(run.prepared.train) / run.options.batch_rows))


def _trainings(run: Run) -> float:
    """Return the work of all trainings, as a multiple of the one whose state is kept."""
    return 1.0 + sum(len(stage.train) for stage in run.prepared.stages) / len(run.prepared.train)


def _gradient_pace(run: Run, start_K: NDArray[np.float32]) -> Pace:
    durations = []
    for step in range(2):  # the first reads the model from the disk
        start = run.clock.seconds()
        pulled_gradient(run, start_K, step)
        durations.append(run.clock.seconds() - start)
    return Pace(step_s=max(1e-6, min(durations)), token_s=_token_s(run))


def _plan(run: Run) -> Plan:
    run.progress.phase("finding epsilon")
    probe = find_epsilon(run)
    budget = _budget(run, probe.epsilon)
    run.progress.phase("finding the step size")
    step_size = find_step_size(run, probe.epsilon, budget.trial_steps)
    return Plan(
        epsilon=probe.epsilon,
        relative_error=probe.relative_error or 0.0,
        learning_rate=step_size.learning_rate * run.options.rate_scale,
        losses=step_size.losses,
        base_loss=step_size.base_loss,
        total_steps=budget.steps,
        evaluate_every=max(1, math.ceil(budget.steps / budget.evaluations)),
        limit_s=budget.limit_s,
    )


def _budget(run: Run, epsilon: float) -> Budget:
    if run.options.steps is not None:
        return budget_of_steps(run.options.steps)
    pace = run.folder.once("search-pace", Pace, lambda: _pace(run, epsilon))
    return budget_of_time(
        60.0 * float(run.options.minutes or 0.0),
        step_s=pace.step_s,
        evaluation_s=pace.token_s * _tokens(run.prepared.select),
        judgement_s=pace.token_s * _tokens(run.prepared.test),
    )


def _pace(run: Run, epsilon: float) -> Pace:
    descent = run.descent(seed=0, epsilon=epsilon, total_steps=3)
    s_K = np.zeros(run.package.k, dtype=np.int64)
    durations = []
    for step in range(3):
        start = run.clock.seconds()
        run.take_step(descent, s_K, step)
        durations.append(run.clock.seconds() - start)
    return Pace(step_s=max(1e-6, sorted(durations)[1]), token_s=_token_s(run))


def _token_s(run: Run) -> float:
    rows = (run.prepared.select or run.prepared.test)[:TIMED_ROWS]
    start = run.clock.seconds()
    mean_loss(run.engine, run.w_base_K, rows)
    return max(1e-9, (run.clock.seconds() - start) / _tokens(rows))


def _tokens(rows: Sequence[Row]) -> int:
    return sum(len(row.ids_T) for row in rows)
