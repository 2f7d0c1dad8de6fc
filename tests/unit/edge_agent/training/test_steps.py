"""Tests of descents: steps, evaluations, stops, and bitwise resumption."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.package.reader import Package
from permille.zo.estimators import Batch
from permille.zo.journal import read_journal
from permille.zo.records import StepFlag, coefficients_of
from permille.zo.replay import replay
from permille_agent.training import steps
from permille_agent.training.plan import Plan, make_plan
from permille_agent.training.run import Evaluation, RunClock, RunFolder, StopPoint
from permille_agent.training.steps import MAX_DESCENTS, Stop, planned_descent, stop_of, train
from tests.bigram_engine import BigramEngine
from tests.unit.edge_agent.runs import Begin, plan_and_train


class SpoiltEngine(BigramEngine):
    """A bigram engine that passes its losses through `spoil(losses, call number)`."""

    def __init__(
        self, package: Package, spoil: Callable[[NDArray[np.float32], int], NDArray[np.float32]]
    ) -> None:
        super().__init__(package)
        self._spoil = spoil
        self.calls = 0

    def losses(self, values_VK: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        """Return the spoilt losses."""
        self.calls += 1
        return self._spoil(super().losses(values_VK, batch), self.calls)


def test_steps_are_journalled_and_the_best_evaluation_is_selected(begin: Begin) -> None:
    run = begin(steps=20)
    plan, selected = plan_and_train(run)
    contents = read_journal(run.folder.journal(0))
    assert len(contents.records) == selected.steps == 20
    losses = {evaluation.step: evaluation.loss for evaluation in run.folder.evaluations(0)}
    assert list(losses) == list(range(0, 21, 2))
    assert losses[0] == plan.base_loss
    assert losses[selected.step] == min(loss for loss in losses.values() if loss is not None)
    assert (losses[selected.step] or math.inf) < plan.base_loss
    coefficients_TQ = coefficients_of(contents.records[: selected.step], contents.header)
    assert (selected.s_K == replay(contents.header, coefficients_TQ)).all()
    assert selected.stopped is Stop.STEPS


def test_the_plan_is_written_before_the_first_step_and_holds_what_the_header_needs(begin: Begin) -> None:
    run = begin()
    plan = make_plan(run)
    assert run.folder.load("plan", Plan) == plan
    assert not run.folder.journal(0).exists()
    header = planned_descent(run, plan, 0, plan.total_steps).header
    assert (header.epsilon, header.learning_rate) == (plan.epsilon, plan.learning_rate)
    assert header.total_steps == plan.total_steps == run.options.steps
    assert header.seed == run.options.seed


def test_the_same_run_twice_has_the_same_bits_and_another_seed_others(begin: Begin) -> None:
    first, second, other = (
        plan_and_train(begin(folder=name, seed=seed)) for name, seed in (("a", 0), ("b", 0), ("c", 5))
    )
    assert first[0] == second[0]
    assert (first[1].s_K == second[1].s_K).all()
    assert (first[1].step, first[1].header) == (second[1].step, second[1].header)
    assert (first[1].s_K != other[1].s_K).any()


def test_a_growing_loss_halves_the_steps_and_starts_again(begin: Begin) -> None:
    run = begin(steps=30)
    plan = make_plan(run)
    plan = replace(plan, learning_rate=plan.learning_rate * 40)
    selected = train(run, plan)
    assert selected.descent > 0
    rates = [read_journal(run.folder.journal(n)).header.learning_rate for n in range(selected.descent + 1)]
    assert rates == [plan.learning_rate * 0.5**n for n in range(len(rates))]


def test_a_level_descent_is_followed_by_one_with_half_and_the_best_of_all_is_selected(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begin(folder="run", steps=20)
    plan = make_plan(run)
    _stop_at(18, monkeypatch)

    selected = train(run, plan)
    # With a time limit, the second descent gets the two steps that are left.
    hurried_run = begin(folder="hurried", steps=20)
    hurried = train(hurried_run, replace(plan, limit_s=1e9))

    every = range(MAX_DESCENTS)
    losses = [min(e.loss or math.inf for e in run.folder.evaluations(descent)) for descent in every]
    assert (selected.loss, selected.stopped) == (min(losses), Stop.STEPS)
    assert selected.descent == losses.index(min(losses))
    journals = [read_journal(run.folder.journal(descent)) for descent in every]
    assert [journal.header.learning_rate for journal in journals] == [
        plan.learning_rate / 2**descent for descent in every
    ]
    assert [journal.header.total_steps for journal in journals] == [20] * MAX_DESCENTS
    assert [len(journal.records) for journal in journals] == [18] * (MAX_DESCENTS - 1) + [20]
    second = read_journal(hurried_run.folder.journal(1))
    assert (second.header.total_steps, len(second.records)) == (2, 2)
    assert hurried_run.folder.evaluations(1)[-1].step == 2
    assert (hurried.descent, hurried.steps, hurried.stopped) == (0, 18, Stop.STEPS)
    assert hurried.loss < min(e.loss or math.inf for e in hurried_run.folder.evaluations(1))
    again = train(hurried_run, replace(plan, limit_s=1e9))
    assert (again.descent, again.step) == (hurried.descent, hurried.step)


def test_no_descent_begins_where_a_time_limit_leaves_no_step(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begin(steps=20)
    plan = replace(make_plan(run), limit_s=1e9)
    _stop_at(20, monkeypatch, Stop.DIVERGED)
    selected = train(run, plan)
    assert (selected.descent, selected.step, selected.stopped) == (0, 0, Stop.DIVERGED)
    assert not run.folder.journal(1).exists()


def test_no_descent_begins_after_the_time_limit(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begin(steps=20)
    plan = make_plan(run)
    _stop_at(10, monkeypatch)
    monkeypatch.setattr(run.clock, "passed", lambda descent, *_: descent > 0)
    selected = train(run, replace(plan, limit_s=1e9))
    assert (selected.descent, selected.steps, selected.stopped) == (0, 10, Stop.LEVEL)
    assert not run.folder.journal(1).exists()


def _stop_at(wanted_step: int, monkeypatch: pytest.MonkeyPatch, found: Stop = Stop.LEVEL) -> None:
    """Stop each descent of 20 steps, except the last, at `wanted_step` with the reason `found`."""

    def stop(
        evaluations: Sequence[Evaluation], *, step: int, total_steps: int, last: bool, **others: Any
    ) -> Stop | None:
        if step == wanted_step and total_steps == 20 and not last:
            return found
        return stop_of(evaluations, step=step, total_steps=total_steps, last=True, **others)

    monkeypatch.setattr(steps, "stop_of", stop)


def test_when_every_step_size_diverges_the_base_is_selected(begin: Begin) -> None:
    run = begin(steps=30)
    plan = make_plan(run)
    selected = train(run, replace(plan, learning_rate=plan.learning_rate * 1e5))
    assert (selected.stopped, selected.step, selected.descent) == (Stop.DIVERGED, 0, MAX_DESCENTS - 1)
    assert not selected.s_K.any()


def test_some_losses_that_are_not_finite_are_rejected_steps(begin: Begin, package: Package) -> None:
    run = begin(steps=60)
    plan = make_plan(run)
    spoilt = SpoiltEngine(package, lambda losses, call: losses * (np.nan if call % 20 == 0 else 1))
    _, selected = plan_and_train(replace(run, engine=spoilt))
    flags = [record.flags for record in read_journal(run.folder.journal(0)).records]
    assert [step for step, flag in enumerate(flags) if StepFlag.REJECTED in flag] == [19, 39, 59]
    assert selected.stopped is Stop.STEPS
    assert math.isfinite(plan.base_loss)


def test_many_losses_that_are_not_finite_end_the_run_with_the_base(begin: Begin, package: Package) -> None:
    run = begin()
    make_plan(run)
    spoilt = SpoiltEngine(package, lambda losses, call: losses * np.nan)
    _, selected = plan_and_train(replace(run, engine=spoilt))
    assert (selected.stopped, selected.step) == (Stop.REJECTED, 0)


class FakeClock:
    """A clock that advances by one second at each call."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_a_time_limit_decides_how_many_steps_and_a_restart_ends_at_the_same(begin: Begin) -> None:
    run = begin(steps=None, minutes=2.0)
    run = replace(run, clock=RunClock(run.folder, monotonic=FakeClock()))
    plan, selected = plan_and_train(run)
    late = replace(run, clock=RunClock(run.folder, monotonic=FakeClock()))
    again = train(late, plan)
    assert 1 <= selected.steps <= plan.total_steps < 120
    assert (again.step, again.steps) == (selected.step, selected.steps)
    assert (again.s_K == selected.s_K).all()


def test_time_spent_counts_across_restarts(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    clock = RunClock(folder, monotonic=FakeClock())
    for _ in range(30):
        clock.seconds()
    clock.store()
    later = RunClock(folder, monotonic=FakeClock())
    assert not later.passed(0, 3, 54.0)
    for _ in range(30):
        later.seconds()
    assert not later.passed(0, 4, None)
    assert later.passed(0, 4, 54.0)
    assert folder.load("stop", StopPoint) == StopPoint(descent=0, step=4)
    assert RunClock(folder, monotonic=FakeClock()).passed(0, 5, 54.0)
    assert not RunClock(folder, monotonic=FakeClock()).passed(0, 3, 54.0)
