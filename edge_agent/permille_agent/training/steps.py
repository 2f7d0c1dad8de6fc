"""One personalisation, from the user's text to a decision, as phases whose results are durable.

    prepare -> epsilon -> step size -> plan -> steps (with evaluations) -> choose the best step -> judge ->
    decide

Every phase is a function of the run's definition and of results before it (`run_folder.py`), every step a
function of the journal before it. So a run that is killed at any moment and started again ends with the same
bits.

A step size that is too long (`attempt_end.py` says when) is halved: the next attempt starts from the base,
and there are at most `MAX_ATTEMPTS` of them. With a time limit a later attempt has the steps that are left,
and its learning rate falls over these.

The state is chosen on the select split among those of all attempts, and judged on the test split, which
nothing has looked at. It is adopted only if it is better than the base AND better than what is active now,
each by the lower end of a 95% interval.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from permille.zo.exponents import Exponents
from permille.zo.header import LogHeader
from permille.zo.journal import Journal
from permille.zo.lattice import step_unit_exponent_for, values
from permille.zo.records import StepFlag, StepRecord, coefficients_of
from permille.zo.replay import replay
from permille.zo.steps import apply_record, take_step
from permille_agent.training.evaluation import mean_loss
from permille_agent.training.plan import find_lengths
from permille_agent.training.progress import RunProgress
from permille_agent.training.run import Evaluation, Json, RunFolder
from permille_agent.training.run_clock import RunClock
from permille_agent.training.setup import Setup, widest_block
from permille_agent.training.step_size import find_epsilon, find_learning_rate
from permille_agent.training.stopping import FAILED, TOO_LONG, End, best_of, end_of

MAX_ATTEMPTS = 4
# A projected gradient so far beyond the usual is an outlier of the batch: its step is bounded, and flagged.
CLIP_RMS = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The state that a run ends with, before it is judged.

    Attributes:
        attempt: which attempt it is from.
        step: how many of its steps it is made of; 0 is the base.
        loss: of the state on the select split, nats a token.
        steps: how many steps the attempt made.
        s_K: the state.
        header: of its log.
        stopped: why the attempt ended, see `attempt_end.End`; of a run: the last one.
    """

    attempt: int
    step: int
    loss: float
    steps: int
    s_K: NDArray[np.int64]
    header: LogHeader
    stopped: End


def make_plan(setup: Setup, run: RunFolder, progress: RunProgress, clock: RunClock) -> Json:
    """Everything that the steps depend on, written before the first of them.

    Raises:
        InputError: no usable epsilon or step size.
    """

    def plan() -> Json:
        progress.phase("finding epsilon")
        epsilon = find_epsilon(setup, run)
        lengths = find_lengths(setup, run, epsilon["epsilon"], clock)
        progress.phase("finding the step size")
        rate = find_learning_rate(setup, run, epsilon["epsilon"], epsilon["g_rms"], lengths.race_steps)
        return {
            "epsilon": epsilon["epsilon"],
            "epsilon_search": epsilon,
            "g_rms": epsilon["g_rms"],
            "learning_rate": rate["learning_rate"],
            "learning_rate_search": rate,
            "clip": CLIP_RMS * epsilon["g_rms"],
            "base_loss": rate["base_loss"],
            "total_steps": lengths.steps,
            "evaluate_every": max(1, math.ceil(lengths.steps / lengths.evaluations)),
            "limit_s": lengths.limit_s,
            "options": setup.options.definition(),
        }

    return run.once("plan", plan)


def train_attempts(
    setup: Setup, run: RunFolder, plan: Json, progress: RunProgress, clock: RunClock
) -> Chosen:
    """Steps until one attempt's step size proves short enough; resumes where the journals end.

    Returns:
        The best state of all attempts, the later one of equals.
    """
    attempts = [_attempt(setup, run, plan, 0, plan["total_steps"], progress, clock)]
    while attempts[-1].stopped in TOO_LONG and len(attempts) < MAX_ATTEMPTS:
        steps = _steps_left(plan, attempts)
        begun = run.journal(len(attempts)).exists()
        if steps < 1 or (not begun and clock.passed(len(attempts), 0, plan["limit_s"])):
            break
        progress.phase(f"steps too long ({attempts[-1].stopped}): starting again with half of them")
        attempts.append(_attempt(setup, run, plan, len(attempts), steps, progress, clock))
    best = min(attempts, key=lambda chosen: (chosen.loss, -chosen.attempt))
    return replace(best, stopped=attempts[-1].stopped)


def _steps_left(plan: Json, attempts: Sequence[Chosen]) -> int:
    """Steps of the next attempt: as many as the first, but not beyond a time limit."""
    total: int = plan["total_steps"]
    if plan["limit_s"] is None:
        return total
    return total - sum(chosen.steps for chosen in attempts)


def attempt_header(setup: Setup, plan: Json, attempt: int, total_steps: int | None = None) -> LogHeader:
    """The header of an attempt's log: half the step size of the attempt before.

    Args:
        total_steps: of the attempt; the plan's where None.
    """
    total_steps = plan["total_steps"] if total_steps is None else total_steps
    learning_rate = plan["learning_rate"] * 0.5**attempt
    header = setup.header(
        seed=setup.options.seed,
        epsilon=plan["epsilon"],
        learning_rate=learning_rate,
        total_steps=total_steps,
        schedule=setup.options.schedule,
    )
    exponent = step_unit_exponent_for(learning_rate, plan["g_rms"], widest_block(header), header.sigma)
    return replace(header, step_unit_exponent=exponent)


def state_of(
    header: LogHeader, records: Sequence[StepRecord], exponents: Exponents | None = None
) -> NDArray[np.int64]:
    """The state that the first records of a log add up to."""
    return replay(header, coefficients_of(records, header), exponents)


def _attempt(
    setup: Setup,
    run: RunFolder,
    plan: Json,
    attempt: int,
    total_steps: int,
    progress: RunProgress,
    clock: RunClock,
) -> Chosen:
    header = attempt_header(setup, plan, attempt, total_steps)
    path = run.journal(attempt)
    with Journal.open(path) if path.exists() else Journal.create(path, header) as journal:
        records = list(journal.records())
        s_K = state_of(header, records, setup.exponents)
        rejected = sum(StepFlag.REJECTED in record.flags for record in records)
        evaluations = run.evaluations(attempt)
        while True:
            step = journal.next_step
            out_of_time = clock.passed(attempt, step, plan["limit_s"])
            if _due(step, total_steps, plan["evaluate_every"], evaluations, out_of_time):
                evaluation = replace(_evaluate(setup, plan, header, s_K, step), seconds=clock.seconds())
                run.append_evaluation(attempt, evaluation)
                evaluations.append(evaluation)
                clock.store()
                _tell(progress, evaluation, plan)
            stopped = end_of(
                evaluations,
                step=step,
                total_steps=total_steps,
                rejected=rejected,
                out_of_time=out_of_time,
                patience=setup.options.patience,
                last=attempt + 1 == MAX_ATTEMPTS,
            )
            if stopped:
                return _choose(setup, journal, attempt, evaluations, stopped)
            record = _step(setup, plan, header, s_K, step)
            journal.append(record)
            apply_record(s_K, record, header, setup.exponents)
            rejected += StepFlag.REJECTED in record.flags
            progress.step(step + 1, header.total_steps, record.loss)


def _step(setup: Setup, plan: Json, header: LogHeader, s_K: NDArray[np.int64], step: int) -> StepRecord:
    return take_step(
        setup.engine,
        setup.batches(step),
        setup.descent(header),
        s_K,
        step,
        clip=plan["clip"],
    )


def _due(
    step: int, total_steps: int, every: int, evaluations: Sequence[Evaluation], out_of_time: bool
) -> bool:
    if evaluations and evaluations[-1].step >= step:
        return False
    return out_of_time or step % every == 0 or step == total_steps


def _evaluate(setup: Setup, plan: Json, header: LogHeader, s_K: NDArray[np.int64], step: int) -> Evaluation:
    if step == 0:
        return Evaluation(0, plan["base_loss"])
    values_K = values(setup.w_base_K, s_K, header.step_unit_exponent)
    loss = mean_loss(setup.engine, values_K, setup.prepared.select)
    return Evaluation(step, loss if math.isfinite(loss) else None)


def _tell(progress: RunProgress, evaluation: Evaluation, plan: Json) -> None:
    if evaluation.loss is not None:
        progress.evaluated(evaluation.step, evaluation.loss, plan["base_loss"])


def _choose(
    setup: Setup, journal: Journal, attempt: int, evaluations: Sequence[Evaluation], stopped: End
) -> Chosen:
    best = evaluations[0] if stopped in FAILED else best_of(evaluations)
    s_K = state_of(journal.header, list(journal.records())[: best.step], setup.exponents)
    return Chosen(
        attempt=attempt,
        step=best.step,
        loss=math.inf if best.loss is None else best.loss,
        steps=journal.next_step,
        s_K=s_K,
        header=journal.header,
        stopped=stopped,
    )
