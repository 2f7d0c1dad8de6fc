"""Plan of a run: epsilon, step size, and the number of steps, given directly or by time.

With a time limit, a step and an evaluation are timed once; from then on the budget is a function of those two
numbers and the limit. A quarter of the time at most goes into the search, about a fifth of training into
evaluations, and as much as judging the result takes is kept for that, within bounds. Little text has nothing
to select: its steps are fixed, and a few evaluations find out whether they diverge.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from permille.training.adam import learning_rate
from permille_agent.text.rows import Row
from permille_agent.training.durable_steps import pulled_gradient
from permille_agent.training.evaluation import mean_loss
from permille_agent.training.progress import duration
from permille_agent.training.run import Run
from permille_agent.training.step_size import SearchFailed, base_loss, find_epsilon, find_step_size

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
    plan = run.folder.once("plan", Plan, lambda: _plan(run))
    if (told := forecast(run, plan)) is not None:
        run.progress.phase(told)
    return plan


def forecast(run: Run, plan: Plan) -> str | None:
    """Say how long a step takes on this device, and how many there will be; None of a run without a limit."""
    pace, minutes = run.folder.load("search-pace", Pace), run.options.minutes
    if pace is None or minutes is None:
        return None
    step, steps = duration(pace.step_s * _trainings(run)), plan.total_steps
    most = "" if steps < _most_steps(run) else ", all that this text is good for"
    return f"a step takes {step} here: {steps} step{'s' * (steps != 1)} in {minutes:g} minutes{most}"


def budget_of_steps(steps: int) -> Budget:
    """Divide a run of a number of steps. The budget depends on nothing else."""
    low, high = TRIAL_STEPS
    trial_steps = min(high, max(low, steps // TRIAL_SHARE))
    return Budget(steps=steps, trial_steps=trial_steps, evaluations=EVALUATIONS, limit_s=None)


def budget_of_time(
    available_s: float,
    *,
    step_s: float,
    evaluation_s: float,
    judgement_s: float,
    trials: int = TRIALS,
    most_steps: float = math.inf,
) -> Budget:
    """Divide a run that may take `available_s` seconds in all.

    Args:
        available_s: of the whole run.
        step_s: of one step.
        evaluation_s: of one evaluation on the select split.
        judgement_s: of evaluating one model on the test split.
        trials: of the search for a learning rate; along the gradient there is none.
        most_steps: more of them learn the text by heart.
    """
    least, most = JUDGEMENT_SHARE
    kept_s = min(most * available_s, max(least * available_s, JUDGED * judgement_s))
    trial_steps = 0
    if trials:
        trial_s = SEARCH_SHARE * available_s / trials
        trial_steps = min(TRIAL_STEPS[1], max(2, int((trial_s - evaluation_s) / step_s)))
    train_s = available_s - kept_s - trials * (trial_steps * step_s + evaluation_s)
    evaluations = int(EVALUATION_SHARE * train_s / evaluation_s)
    evaluations = min(EVALUATIONS, max(FEWEST_EVALUATIONS, evaluations))
    steps = max(1, int((train_s - evaluations * evaluation_s) / step_s))
    return Budget(
        steps=int(min(steps, most_steps)),
        trial_steps=trial_steps,
        evaluations=evaluations,
        limit_s=available_s - kept_s,
    )


def _plan(run: Run) -> Plan:
    options, losses = run.options, dict[int, float | None]()
    if options.has_log:
        run.progress.phase("finding epsilon")
        probe = find_epsilon(run)
        epsilon, error = probe.epsilon, probe.relative_error or 0.0
        budget = _budget(run, epsilon)
        run.progress.phase("finding the step size")
        found = find_step_size(run, epsilon, budget.trial_steps)
        rate, losses = found.learning_rate, found.losses
    else:
        epsilon, error, rate = NO_EPSILON, 0.0, learning_rate(run.package)
        if not 0 < rate < math.inf:
            raise SearchFailed(
                f"All trained weights of the package are 0, so there is no learning rate (got {rate})."
            )
        run.progress.phase("looking at the text")
        base_loss(run)  # before the time is measured: it may end the run
        budget = _budget(run, epsilon)
    little = bool(run.prepared.stages)
    evaluations = FEWEST_EVALUATIONS if little else budget.evaluations
    return Plan(
        epsilon=epsilon,
        relative_error=error,
        learning_rate=rate * options.rate_scale,
        losses=losses,
        base_loss=base_loss(run),
        total_steps=budget.steps,
        evaluate_every=max(1, math.ceil(budget.steps / evaluations)),
        limit_s=None if little else budget.limit_s,
    )


def _budget(run: Run, epsilon: float) -> Budget:
    if run.options.steps is not None:
        return budget_of_steps(run.options.steps)
    pace = run.folder.once("search-pace", Pace, lambda: _pace(run, epsilon))
    rows = run.prepared.select or run.prepared.test
    return budget_of_time(
        60.0 * float(run.options.minutes or 0.0),
        step_s=pace.step_s * _trainings(run),
        evaluation_s=pace.token_s * _tokens(rows),
        judgement_s=pace.token_s * _tokens(run.prepared.test),
        trials=TRIALS if run.options.has_log else 0,
        most_steps=_most_steps(run),
    )


def _most_steps(run: Run) -> float:
    """Return the most steps that do not learn the text by heart; zeroth order never does."""
    if run.options.has_log:
        return math.inf
    return max(LEAST_STEPS, math.ceil(PASSES * len(run.prepared.train) / run.options.batch_rows))


def _trainings(run: Run) -> float:
    """Return the work of all trainings, as a multiple of the one whose state is kept."""
    return 1.0 + sum(len(stage.train) for stage in run.prepared.stages) / len(run.prepared.train)


def _pace(run: Run, epsilon: float) -> Pace:
    descent = run.descent(seed=0, epsilon=epsilon, total_steps=3)
    s_K, start_K = np.zeros(run.package.k, dtype=np.int64), run.first_values()

    def step_s(step: int) -> float:
        start = run.clock.seconds()
        if run.options.has_log:
            run.take_step(descent, s_K, step)
        else:
            pulled_gradient(run, start_K, step)
        return run.clock.seconds() - start

    # The first reads the model from the disk.
    durations = sorted(map(step_s, range(3 if run.options.has_log else 2)))
    rows = (run.prepared.select or run.prepared.test)[:TIMED_ROWS]
    start = run.clock.seconds()
    mean_loss(run.engine, run.w_base_K, rows)
    token_s = (run.clock.seconds() - start) / _tokens(rows)
    return Pace(step_s=max(1e-6, durations[-2]), token_s=max(1e-9, token_s))


def _tokens(rows: Sequence[Row]) -> int:
    return sum(len(row.ids_T) for row in rows)
