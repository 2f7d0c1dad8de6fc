"""How long the parts of a run are: by the number of steps, or by the time that there is and the pace of this
machine.

With a time limit, a step and an evaluation are timed once; from then on the lengths are a function of those
two numbers and the limit. A quarter of the time at most goes into the search, about a fifth of training into
evaluations, and as much as judging the result takes is kept for that, within bounds.
"""

from dataclasses import dataclass

import numpy as np

from permille.zo.steps import take_step
from permille_agent.text.rows import Row
from permille_agent.training.evaluation import mean_loss
from permille_agent.training.run import Json, RunFolder
from permille_agent.training.run_clock import RunClock
from permille_agent.training.setup import Setup

EVALUATIONS = 20
FEWEST_EVALUATIONS = 4
RACE_SHARE = 10
RACE_STEPS = (5, 40)
SEARCH_SHARE = 0.25
EVALUATION_SHARE = 0.2
JUDGEMENT_SHARE = (0.05, 0.4)
# Racers of a usual search, and models that are judged: the base, the chosen one, and often an active one.
RACERS = 4
JUDGED = 3
PROBED_ROWS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """The lengths of a run's parts.

    Attributes:
        steps: of the run; the learning rate falls over so many.
        race_steps: of each racer of the search.
        evaluations: about so many on the way.
        limit_s: seconds of work after which no further step is made, or None.
    """

    steps: int
    race_steps: int
    evaluations: int
    limit_s: float | None


def lengths_by_steps(steps: int) -> Lengths:
    """Lengths of a run of so many steps: they depend on nothing else."""
    low, high = RACE_STEPS
    race_steps = min(high, max(low, steps // RACE_SHARE))
    return Lengths(steps=steps, race_steps=race_steps, evaluations=EVALUATIONS, limit_s=None)


def lengths_by_time(available_s: float, *, step_s: float, evaluation_s: float, judgement_s: float) -> Lengths:
    """Lengths of a run that may take `available_s` in all.

    Args:
        available_s: of the whole run.
        step_s: of one step.
        evaluation_s: of one evaluation on the select split.
        judgement_s: of evaluating one model on the test split.
    """
    least, most = JUDGEMENT_SHARE
    kept_s = min(most * available_s, max(least * available_s, JUDGED * judgement_s))
    racer_s = SEARCH_SHARE * available_s / RACERS
    race_steps = min(RACE_STEPS[1], max(2, int((racer_s - evaluation_s) / step_s)))
    train_s = available_s - kept_s - RACERS * (race_steps * step_s + evaluation_s)
    evaluations = int(EVALUATION_SHARE * train_s / evaluation_s)
    evaluations = min(EVALUATIONS, max(FEWEST_EVALUATIONS, evaluations))
    steps = max(1, int((train_s - evaluations * evaluation_s) / step_s))
    return Lengths(steps=steps, race_steps=race_steps, evaluations=evaluations, limit_s=available_s - kept_s)


def find_lengths(setup: Setup, run: RunFolder, epsilon: float, clock: RunClock) -> Lengths:
    """The lengths of this run; with a time limit, the pace is measured once and durable."""
    if setup.options.steps is not None:
        return lengths_by_steps(setup.options.steps)
    pace = run.once("search-pace", lambda: _pace(setup, epsilon, clock))
    return lengths_by_time(
        60.0 * float(setup.options.minutes or 0.0),
        step_s=pace["step_s"],
        evaluation_s=pace["token_s"] * _tokens(setup.prepared.select),
        judgement_s=pace["token_s"] * _tokens(setup.prepared.test),
    )


def _pace(setup: Setup, epsilon: float, clock: RunClock) -> Json:
    header = setup.header(seed=0, epsilon=epsilon, total_steps=3)
    s_K = np.zeros(header.k, dtype=np.int64)
    durations = []
    for step in range(3):
        start = clock.seconds()
        batch = setup.batches(step)
        take_step(setup.engine, batch, setup.descent(header), s_K, step, clip=None)
        durations.append(clock.seconds() - start)
    rows = setup.prepared.select[:PROBED_ROWS]
    start = clock.seconds()
    mean_loss(setup.engine, setup.w_base_K, rows)
    token_s = (clock.seconds() - start) / _tokens(rows)
    return {"step_s": max(1e-6, sorted(durations)[1]), "token_s": max(1e-9, token_s)}


def _tokens(rows: list[Row]) -> int:
    return sum(len(row.ids_T) for row in rows)
