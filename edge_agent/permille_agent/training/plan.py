"""Plan of a run: epsilon, learning rate and number of steps.

The package determines epsilon and the rate of zeroth order (FORMAT 3.6), and the rate of a gradient run.

With a time limit, a few steps and a short evaluation are timed. Then the time is divided:

- about a fifth of the training time for evaluations,
- the expected time of the judgement, within bounds,
- the rest for steps.

A short text has no select split. Then all planned steps are made, even past the time limit. A few evaluations
only detect divergence.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from permille.errors import PermilleError
from permille.training.adam import learning_rate
from permille_agent.text.rows import Row
from permille_agent.training.durable_steps import pulled_gradient
from permille_agent.training.evaluation import mean_loss
from permille_agent.training.options import MOST_MINUTES
from permille_agent.training.progress import duration
from permille_agent.training.run import Run, finite_or_none

EVALUATIONS = 20  # number of evaluations of the select split during a run
FEWEST_EVALUATIONS = 4  # with fewer, a descent that diverges would be found too late
EVALUATION_SHARE = 0.2  # part of the training time for evaluations; the fewest are made in any case
JUDGEMENT_SHARE = (0.05, 0.4)  # smallest and largest part of the time for the judgement
JUDGED = 3  # number of models that the judgement evaluates: the base, the new one, and often the active one
# The judgement of a run with a memory takes this many times as long. The state is also judged alone, and four
# models are evaluated on the select split.
WITH_MEMORY = 1.5
TIMED_ROWS = 8  # number of rows that are evaluated to measure the time per token
# Gradient runs with a time limit make at most this many passes over the text, or `LEAST_STEPS` steps if that
# is more (docs/adr/0031).
PASSES = 8
LEAST_STEPS = 10
# Number of steps that a user is told to allow. Most published results are of as many gradient steps.
USUAL_STEPS = 20
# Placeholder for epsilon in the header of a gradient run, which perturbs no weights.
NO_EPSILON = 1.0


class RunFailed(PermilleError):  # noqa: N818 - a way for a run to end
    """This package cannot be trained on this text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFound:
    """A loss on the select split, or on the test split of a short text. None if it is not finite."""

    loss: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Contents of `plan.json`: all numbers that the steps depend on.

    Attributes:
        epsilon: scale of the perturbations.
        learning_rate: learning rate of the first descent.
        base_loss: loss of the start on the select split, or on the test split of a short text.
        total_steps: planned number of steps of the first descent. For a short text, this is the first descent
            on the whole text. The learning rate falls over these steps.
        evaluate_every: number of steps between evaluations.
        limit_s: seconds of working time after which no step is made, or None for no limit.
    """

    epsilon: float
    learning_rate: float
    base_loss: float
    total_steps: int
    evaluate_every: int
    limit_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Division of a run into its phases.

    Attributes:
        steps: number of steps of the run.
        evaluations: approximate number of evaluations.
        limit_s: seconds of working time after which no step is made, or None for no limit.
    """

    steps: int
    evaluations: int
    limit_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds per step and per evaluated token on this machine."""

    step_s: float
    token_s: float


def make_plan(run: Run) -> Plan:
    """Return the durable plan of a run. The first call makes the plan, and later calls read it.

    Raises:
        RunFailed: the first loss is not finite, or all trained weights are 0.
    """
    plan = run.folder.once("plan", Plan, lambda: _plan(run))
    if (words := forecast(run, plan)) is not None:
        run.progress.phase(words)
    return plan


def forecast(run: Run, plan: Plan) -> str | None:
    """Describe the duration of a step and the number of steps. Return None for a run without a time limit.

    If too few steps fit to learn from the text, say how many minutes enough steps would take.
    """
    pace, minutes = run.folder.load("pace", Pace), run.options.minutes
    if pace is None or minutes is None:
        return None
    step, steps = duration(pace.step_s * _trainings(run)), plan.total_steps
    limit = f"{minutes:g} minute{'s' * (minutes != 1)}"
    told = f"a step takes {step} here: {steps} step{'s' * (steps != 1)} in {limit}"
    if steps >= _most_steps(run):
        return f"{told}; more steps would overfit this text"
    if steps >= LEAST_STEPS:
        return told
    enough = int(min(USUAL_STEPS, _most_steps(run)))
    needed = next((n for n in range(1, MOST_MINUTES) if _timed(run, pace, n).steps >= enough), MOST_MINUTES)
    return f"{told}, too few to learn from your text. Allow {enough} steps with --minutes {needed}"


def budget_of_time(
    available_s: float,
    *,
    step_s: float,
    evaluation_s: float,
    judgement_s: float,
    most_steps: float = math.inf,
) -> Budget:
    """Divide a run with a time limit.

    Example:
        >>> budget = budget_of_time(600.0, step_s=1.0, evaluation_s=2.0, judgement_s=10.0)
        >>> budget.steps, budget.limit_s
        (530, 570.0)

    Args:
        available_s: seconds of the whole run.
        step_s: seconds of one step.
        evaluation_s: seconds of one evaluation on the select split.
        judgement_s: seconds of one model's evaluation on the test split.
        most_steps: largest number of steps. More steps would overfit the text.
    """
    least, most = JUDGEMENT_SHARE
    kept_s = min(most * available_s, max(least * available_s, JUDGED * judgement_s))
    train_s = available_s - kept_s
    evaluations = int(EVALUATION_SHARE * train_s / evaluation_s)
    evaluations = min(EVALUATIONS, max(FEWEST_EVALUATIONS, evaluations))
    steps = max(1, int((train_s - evaluations * evaluation_s) / step_s))
    return Budget(
        steps=int(min(steps, most_steps)),
        evaluations=evaluations,
        limit_s=available_s - kept_s,
    )


def _plan(run: Run) -> Plan:
    epsilon, rate = NO_EPSILON, learning_rate(run.package)
    if run.options.has_log:
        lengths = run.package.manifest.lengths
        header = run.descent(seed=0).header.with_lengths(lengths.perturbation, lengths.step)
        epsilon, rate = header.epsilon, header.learning_rate
    elif not 0 < rate < math.inf:
        raise RunFailed(
            f"All trained weights of the package are 0, so there is no learning rate (got {rate})."
        )
    run.progress.phase("measuring the first loss")
    first_loss = _first_loss(run)  # ends the run if the loss is not finite, before the pace is measured
    budget = _budget(run, epsilon)
    little = bool(run.prepared.stages)
    evaluations = FEWEST_EVALUATIONS if little else budget.evaluations
    return Plan(
        epsilon=epsilon,
        learning_rate=rate * run.options.rate_scale,
        base_loss=first_loss,
        total_steps=budget.steps,
        evaluate_every=max(1, math.ceil(budget.steps / evaluations)),
        limit_s=None if little else budget.limit_s,
    )


def _first_loss(run: Run) -> float:
    """Return the loss of the start. Only the first call measures it."""

    def measured() -> LossFound:
        rows = run.prepared.select or run.prepared.test
        return LossFound(loss=finite_or_none(mean_loss(run.engine, run.first_values(), rows)))

    found = run.folder.once("first-loss", LossFound, measured)
    if found.loss is None:
        raise RunFailed("The loss of the base model on this text is not finite.")
    return found.loss


def _budget(run: Run, epsilon: float) -> Budget:
    if run.options.steps is not None:
        # Each second step of a short run is enough: an evaluation may take as long as a step.
        evaluations = min(EVALUATIONS, max(FEWEST_EVALUATIONS, run.options.steps // 2))
        return Budget(steps=run.options.steps, evaluations=evaluations, limit_s=None)
    pace = run.folder.once("pace", Pace, lambda: _pace(run, epsilon))
    return _timed(run, pace, float(run.options.minutes or 0.0))


def _timed(run: Run, pace: Pace, minutes: float) -> Budget:
    rows = run.prepared.select or run.prepared.test
    return budget_of_time(
        60.0 * minutes,
        step_s=pace.step_s * _trainings(run),
        evaluation_s=pace.token_s * _tokens(rows),
        judgement_s=pace.token_s * _judged_tokens(run),
        most_steps=_most_steps(run),
    )


def _judged_tokens(run: Run) -> float:
    """Return the tokens that the judgement reads for each of `JUDGED` models."""
    tokens, most = _tokens(run.prepared.test), run.options.memory
    if not most:
        return tokens
    texts = [*(stage.read for stage in run.prepared.stages), run.prepared.read]
    read = sum(min(most, sum(len(document.ids_T) for document in text)) for text in texts)
    # The base and the state read their own memories.
    return WITH_MEMORY * tokens + 2 * read / JUDGED


def _most_steps(run: Run) -> float:
    """Return the largest number of steps that does not overfit. Zeroth order learns too slowly to overfit."""
    if run.options.has_log:
        return math.inf
    return max(LEAST_STEPS, math.ceil(PASSES * len(run.prepared.train) / run.options.batch_rows))


def _trainings(run: Run) -> float:
    """Return the number of steps of all trainings of a run, divided by the steps of the final training.

    Only a short text has more than one training: one for each judged part, and the final one.
    """
    return 1.0 + sum(len(stage.train) for stage in run.prepared.stages) / len(run.prepared.train)


def _pace(run: Run, epsilon: float) -> Pace:
    descent = run.descent(seed=0, epsilon=epsilon, total_steps=3)
    s_K, start_K = np.zeros(run.package.k, dtype=np.int64), run.first_values()

    run.progress.phase("measuring how long a step takes here")

    def step_s(step: int) -> float:
        start = run.clock.seconds()
        if run.options.has_log:
            run.take_step(descent, s_K, step)
        else:
            pulled_gradient(run, start_K, step)
        return run.clock.seconds() - start

    # The first step also reads the model from the disk, so the slowest duration is ignored.
    durations = sorted(map(step_s, range(3 if run.options.has_log else 2)))
    rows = (run.prepared.select or run.prepared.test)[:TIMED_ROWS]
    start = run.clock.seconds()
    mean_loss(run.engine, run.w_base_K, rows)
    token_s = (run.clock.seconds() - start) / _tokens(rows)
    return Pace(step_s=max(1e-6, durations[-2]), token_s=max(1e-9, token_s))


def _tokens(rows: Sequence[Row]) -> int:
    return sum(len(row.ids_T) for row in rows)
