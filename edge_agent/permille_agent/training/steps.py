"""The steps of a run: descents from the base, evaluated on the way, until one's steps are short enough.

A descent is what one log holds: steps with one learning rate that falls over them. Where its steps prove too
long (`stopping.py` says when), the next descent starts from the base with half the learning rate; there are
at most `MAX_DESCENTS`. With a time limit a later descent has the steps that are left.

Every step is a function of the journal before it, so a run that is killed goes on with the same bits. The
state is selected on the select split, among those of all descents.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from permille.zo.estimators import Descent
from permille.zo.header import LogHeader, Schedule
from permille.zo.journal import Journal
from permille.zo.lattice import values
from permille.zo.records import StepFlag, coefficients_of
from permille.zo.replay import replay
from permille.zo.steps import apply_record
from permille_agent.training.evaluation import mean_loss
from permille_agent.training.plan import Plan
from permille_agent.training.run import Evaluation, Run, finite_or_none
from permille_agent.training.step_size import with_step_unit
from permille_agent.training.stopping import FAILED, TOO_LONG, Stop, best_of, stop_of

MAX_DESCENTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedState:
    """The state that a run ends with, before it is judged.

    Attributes:
        descent: which descent it is from.
        step: how many of its steps it is made of; 0 is the base.
        loss: of the state on the select split, nats a token.
        steps: how many steps the descent made.
        s_K: the state.
        header: of its log.
        stopped: why the descent stopped; of a run: the last one.
    """

    descent: int
    step: int
    loss: float
    steps: int
    s_K: NDArray[np.int64]
    header: LogHeader
    stopped: Stop


def train(run: Run, plan: Plan) -> SelectedState:
    """Make descents until one's steps prove short enough; resumes where the journals end.

    Returns:
        The best state of all descents, the later one of equals.
    """
    descents = [_LoggedDescent(run, plan, 0, plan.total_steps).train()]
    while descents[-1].stopped in TOO_LONG and len(descents) < MAX_DESCENTS:
        number, steps = len(descents), _steps_left(plan, descents)
        begun = run.folder.journal(number).exists()
        if steps < 1 or (not begun and run.clock.passed(number, 0, plan.limit_s)):
            break
        run.progress.phase(f"steps too long ({descents[-1].stopped}): starting again with half of them")
        descents.append(_LoggedDescent(run, plan, number, steps).train())
    best = min(descents, key=lambda selected: (selected.loss, -selected.descent))
    return replace(best, stopped=descents[-1].stopped)


def planned_descent(run: Run, plan: Plan, number: int, total_steps: int) -> Descent:
    """Describe descent `number`: with half the learning rate of the descent before."""
    descent = run.descent(
        seed=run.options.seed,
        epsilon=plan.epsilon,
        learning_rate=plan.learning_rate * 0.5**number,
        total_steps=total_steps,
        schedule=Schedule.LINEAR,
    )
    return with_step_unit(descent, plan.g_rms)


def _steps_left(plan: Plan, descents: Sequence[SelectedState]) -> int:
    """Steps of the next descent: as many as the first, but not beyond a time limit."""
    spent = sum(selected.steps for selected in descents)
    return plan.total_steps if plan.limit_s is None else plan.total_steps - spent


class _LoggedDescent:
    """One descent, from where its journal ends."""

    def __init__(self, run: Run, plan: Plan, number: int, total_steps: int) -> None:
        self._run = run
        self._plan = plan
        self._number = number
        self._descent = planned_descent(run, plan, number, total_steps)
        self._evaluations = run.folder.evaluations(number)

    def train(self) -> SelectedState:
        """Step and evaluate until there is a reason to stop."""
        run, header, path = self._run, self._descent.header, self._run.folder.journal(self._number)
        with Journal.open(path) if path.exists() else Journal.create(path, header) as journal:
            records = list(journal.records())
            s_K = replay(header, coefficients_of(records, header), run.exponents)
            rejected = sum(StepFlag.REJECTED in record.flags for record in records)
            while True:
                step = journal.next_step
                out_of_time = run.clock.passed(self._number, step, self._plan.limit_s)
                if self._is_due(step, out_of_time):
                    self._evaluate(step, s_K)
                stopped = stop_of(
                    self._evaluations,
                    step=step,
                    total_steps=header.total_steps,
                    rejected=rejected,
                    out_of_time=out_of_time,
                    last=self._number + 1 == MAX_DESCENTS,
                )
                if stopped:
                    return self._select(journal, stopped)
                record = run.take_step(self._descent, s_K, step, clip=self._plan.clip)
                journal.append(record)
                apply_record(s_K, record, header, run.exponents)
                rejected += StepFlag.REJECTED in record.flags
                run.progress.step(step + 1, header.total_steps, record.loss)

    def _is_due(self, step: int, out_of_time: bool) -> bool:
        if self._evaluations and self._evaluations[-1].step >= step:
            return False
        return (
            out_of_time or step % self._plan.evaluate_every == 0 or step == self._descent.header.total_steps
        )

    def _evaluate(self, step: int, s_K: NDArray[np.int64]) -> None:
        """Evaluate a state on the select split; durable on return."""
        run = self._run
        loss: float | None = self._plan.base_loss
        if step:
            values_K = values(run.w_base_K, s_K, self._descent.header.step_unit_exponent)
            loss = finite_or_none(mean_loss(run.engine, values_K, run.prepared.select))
        evaluation = Evaluation(step, loss, run.clock.seconds())
        run.folder.append_evaluation(self._number, evaluation)
        self._evaluations.append(evaluation)
        run.clock.store()
        if loss is not None:
            run.progress.evaluated(step, loss, self._plan.base_loss)

    def _select(self, journal: Journal, stopped: Stop) -> SelectedState:
        best = self._evaluations[0] if stopped in FAILED else best_of(self._evaluations)
        coefficients_TQ = coefficients_of(list(journal.records())[: best.step], journal.header)
        return SelectedState(
            descent=self._number,
            step=best.step,
            loss=math.inf if best.loss is None else best.loss,
            steps=journal.next_step,
            s_K=replay(journal.header, coefficients_TQ, self._run.exponents),
            header=journal.header,
            stopped=stopped,
        )
