"""Attempts: their steps, evaluations, ends, and that a resumed one has the same bits."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.engines.interface import Engine
from permille.package.reader import Package
from permille.zo.estimators import Batch
from permille.zo.journal import read_journal
from permille.zo.records import StepFlag
from permille_agent.state.home import open_home
from permille_agent.training import steps as trainer
from permille_agent.training.progress import SilentProgress
from permille_agent.training.run import Evaluation, Json, RunFolder, open_run
from permille_agent.training.run_clock import RunClock
from permille_agent.training.steps import (
    MAX_ATTEMPTS,
    Chosen,
    attempt_header,
    make_plan,
    state_of,
    train_attempts,
)
from permille_agent.training.stopping import End, end_of
from tests.bigram_engine import BigramEngine
from tests.packages import tiny_package
from tests.unit.edge_agent.runs import setup_of, user_text


class SpoiltEngine(BigramEngine):
    """A bigram engine whose losses go through `spoil(losses, call number)`."""

    def __init__(
        self, package: Package, spoil: Callable[[NDArray[np.float32], int], NDArray[np.float32]]
    ) -> None:
        super().__init__(package)
        self._spoil = spoil
        self.calls = 0

    def losses(self, values_VK: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        """As spoilt."""
        self.calls += 1
        return self._spoil(super().losses(values_VK, batch), self.calls)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return tiny_package(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return user_text(tmp_path_factory.mktemp("text"))


def _run(tmp_path: Path) -> RunFolder:
    return open_run(open_home(tmp_path / "home"), {"test": 1})


def _train(
    package: Package, text: Path, run: RunFolder, engine: Engine | None = None, **changes: Any
) -> tuple[Json, Chosen]:
    setup = setup_of(package, engine or BigramEngine(package), text, **changes)
    clock = RunClock(run)
    plan = make_plan(setup, run, SilentProgress(), clock)
    return plan, train_attempts(setup, run, plan, SilentProgress(), clock)


def test_steps_are_journalled_and_the_best_evaluation_is_chosen(
    package: Package, text: Path, tmp_path: Path
) -> None:
    run = _run(tmp_path)

    plan, chosen = _train(package, text, run, steps=20)

    contents = read_journal(run.journal(0))
    assert len(contents.records) == chosen.steps == 20
    losses = {evaluation.step: evaluation.loss for evaluation in run.evaluations(0)}
    assert list(losses) == list(range(21))
    assert losses[0] == plan["base_loss"]
    assert losses[chosen.step] == min(loss for loss in losses.values() if loss is not None)
    assert losses[chosen.step] < plan["base_loss"]
    assert (chosen.s_K == state_of(contents.header, contents.records[: chosen.step])).all()
    assert chosen.stopped == "steps"


def test_the_plan_is_written_before_the_first_step_and_holds_what_the_header_needs(
    package: Package, text: Path, tmp_path: Path
) -> None:
    run = _run(tmp_path)
    setup = setup_of(package, BigramEngine(package), text)
    plan = make_plan(setup, run, SilentProgress(), RunClock(run))

    assert run.load("plan") == plan
    assert not run.journal(0).exists()
    header = attempt_header(setup, plan, 0)
    assert (header.epsilon, header.learning_rate) == (plan["epsilon"], plan["learning_rate"])
    assert header.total_steps == plan["total_steps"] == setup.options.steps
    assert header.seed == setup.options.seed


def test_the_same_run_twice_has_the_same_bits(package: Package, text: Path, tmp_path: Path) -> None:
    first = _train(package, text, _run(tmp_path / "a"))
    second = _train(package, text, _run(tmp_path / "b"))

    assert first[0] == second[0]
    assert (first[1].s_K == second[1].s_K).all()
    assert (first[1].step, first[1].header) == (second[1].step, second[1].header)


def test_another_seed_goes_another_way(package: Package, text: Path, tmp_path: Path) -> None:
    first = _train(package, text, _run(tmp_path / "a"))
    second = _train(package, text, _run(tmp_path / "b"), seed=5)

    assert (first[1].s_K != second[1].s_K).any()


def test_patience_ends_a_run_that_learns_no_more(package: Package, text: Path, tmp_path: Path) -> None:
    run = _run(tmp_path)
    setup = setup_of(package, BigramEngine(package), text, steps=40, patience=2)
    clock = RunClock(run)
    plan = make_plan(setup, run, SilentProgress(), clock)
    plan = {**plan, "learning_rate": plan["learning_rate"] * 1e-9}

    chosen = train_attempts(setup, run, plan, SilentProgress(), clock)

    assert chosen.stopped == "patience"
    assert chosen.steps < 40


def test_a_growing_loss_halves_the_steps_and_starts_again(
    package: Package, text: Path, tmp_path: Path
) -> None:
    run = _run(tmp_path)
    setup = setup_of(package, BigramEngine(package), text, steps=30)
    clock = RunClock(run)
    plan = make_plan(setup, run, SilentProgress(), clock)
    run.store("plan", {**plan, "learning_rate": plan["learning_rate"] * 40})
    plan = run.require("plan")

    chosen = train_attempts(setup, run, plan, SilentProgress(), clock)

    assert chosen.attempt > 0
    rates = [read_journal(run.journal(n)).header.learning_rate for n in range(chosen.attempt + 1)]
    assert rates == [plan["learning_rate"] * 0.5**n for n in range(len(rates))]


def test_a_level_attempt_is_followed_by_one_with_half_and_the_best_of_all_is_chosen(
    package: Package, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _run(tmp_path)
    setup = setup_of(package, BigramEngine(package), text, steps=20)
    clock = RunClock(run)
    plan = make_plan(setup, run, SilentProgress(), clock)
    _level_at(18, monkeypatch)

    chosen = train_attempts(setup, run, plan, SilentProgress(), clock)
    # With a time limit, two steps are left.
    hurried_run = _run(tmp_path / "hurried")
    hurried = train_attempts(setup, hurried_run, {**plan, "limit_s": 1e9}, SilentProgress(), clock)

    every = range(MAX_ATTEMPTS)
    losses = [min(e.loss or math.inf for e in run.evaluations(attempt)) for attempt in every]
    assert (chosen.loss, chosen.stopped) == (min(losses), "steps")
    assert chosen.attempt == losses.index(min(losses))
    journals = [read_journal(run.journal(attempt)) for attempt in every]
    assert [journal.header.learning_rate for journal in journals] == [
        plan["learning_rate"] / 2**attempt for attempt in every
    ]
    assert [journal.header.total_steps for journal in journals] == [20] * MAX_ATTEMPTS
    assert [len(journal.records) for journal in journals] == [18] * (MAX_ATTEMPTS - 1) + [20]
    second = read_journal(hurried_run.journal(1))
    assert (second.header.total_steps, len(second.records)) == (2, 2)
    assert hurried_run.evaluations(1)[-1].step == 2
    assert (hurried.attempt, hurried.steps, hurried.stopped) == (0, 18, "steps")
    assert hurried.loss < min(e.loss or math.inf for e in hurried_run.evaluations(1))
    again = train_attempts(setup, hurried_run, {**plan, "limit_s": 1e9}, SilentProgress(), clock)
    assert (again.attempt, again.step) == (hurried.attempt, hurried.step)


def test_no_attempt_begins_where_a_time_limit_leaves_no_step(
    package: Package, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _run(tmp_path)
    setup = setup_of(package, BigramEngine(package), text, steps=20)
    clock = RunClock(run)
    plan = {**make_plan(setup, run, SilentProgress(), clock), "limit_s": 1e9}
    _level_at(20, monkeypatch, End.DIVERGED)

    chosen = train_attempts(setup, run, plan, SilentProgress(), clock)

    assert (chosen.attempt, chosen.step, chosen.stopped) == (0, 0, "diverged")
    assert not run.journal(1).exists()


def test_no_attempt_begins_after_the_time_limit(
    package: Package, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _run(tmp_path)
    setup = setup_of(package, BigramEngine(package), text, steps=20)
    clock = RunClock(run)
    plan = make_plan(setup, run, SilentProgress(), clock)
    _level_at(10, monkeypatch)
    monkeypatch.setattr(clock, "passed", lambda attempt, *_: attempt > 0)

    chosen = train_attempts(setup, run, {**plan, "limit_s": 1e9}, SilentProgress(), clock)

    assert (chosen.attempt, chosen.steps, chosen.stopped) == (0, 10, "level")
    assert not run.journal(1).exists()


def _level_at(level_step: int, monkeypatch: pytest.MonkeyPatch, found: End = End.LEVEL) -> None:
    """Let each attempt of 20 steps but the last be level, or `found`, at a step."""

    def end(
        evaluations: Sequence[Evaluation], *, step: int, total_steps: int, last: bool, **others: Any
    ) -> End | None:
        if step == level_step and total_steps == 20 and not last:
            return found
        return end_of(evaluations, step=step, total_steps=total_steps, last=True, **others)

    monkeypatch.setattr(trainer, "end_of", end)


def test_when_every_step_size_diverges_the_base_is_chosen(
    package: Package, text: Path, tmp_path: Path
) -> None:
    run = _run(tmp_path)
    setup = setup_of(package, BigramEngine(package), text, steps=30)
    clock = RunClock(run)
    plan = make_plan(setup, run, SilentProgress(), clock)
    plan = {**plan, "learning_rate": plan["learning_rate"] * 1e5}

    chosen = train_attempts(setup, run, plan, SilentProgress(), clock)

    assert (chosen.stopped, chosen.step, chosen.attempt) == ("diverged", 0, MAX_ATTEMPTS - 1)
    assert not chosen.s_K.any()


def test_some_losses_that_are_not_finite_are_rejected_steps(
    package: Package, text: Path, tmp_path: Path
) -> None:
    run = _run(tmp_path)
    setup = setup_of(package, BigramEngine(package), text, steps=60)
    plan = make_plan(setup, run, SilentProgress(), RunClock(run))
    spoilt = SpoiltEngine(package, lambda losses, call: losses * (np.nan if call % 20 == 0 else 1))

    _, chosen = _train(package, text, run, spoilt, steps=60)

    flags = [record.flags for record in read_journal(run.journal(0)).records]
    assert [step for step, flag in enumerate(flags) if StepFlag.REJECTED in flag] == [19, 39, 59]
    assert chosen.stopped == "steps"
    assert math.isfinite(plan["base_loss"])


def test_many_losses_that_are_not_finite_end_the_run_with_the_base(
    package: Package, text: Path, tmp_path: Path
) -> None:
    run = _run(tmp_path)
    make_plan(setup_of(package, BigramEngine(package), text), run, SilentProgress(), RunClock(run))
    spoilt = SpoiltEngine(package, lambda losses, call: losses * np.nan)

    _, chosen = _train(package, text, run, spoilt)

    assert (chosen.stopped, chosen.step) == ("rejected", 0)


class FakeClock:
    """Every look costs a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_a_time_limit_decides_how_many_steps_and_a_restart_ends_at_the_same(
    package: Package, text: Path, tmp_path: Path
) -> None:
    run = _run(tmp_path)
    setup = setup_of(package, BigramEngine(package), text, steps=None, minutes=2.0)
    clock = RunClock(run, monotonic=FakeClock())
    plan = make_plan(setup, run, SilentProgress(), clock)
    chosen = train_attempts(setup, run, plan, SilentProgress(), clock)

    late = RunClock(run, monotonic=FakeClock())
    again = train_attempts(setup, run, plan, SilentProgress(), late)

    assert 1 <= chosen.steps <= plan["total_steps"] < 120
    assert (again.step, again.steps) == (chosen.step, chosen.steps)
    assert (again.s_K == chosen.s_K).all()


def test_time_spent_counts_across_restarts(tmp_path: Path) -> None:
    run = _run(tmp_path)
    clock = RunClock(run, monotonic=FakeClock())
    for _ in range(30):
        clock.seconds()
    clock.store()

    later = RunClock(run, monotonic=FakeClock())

    assert not later.passed(0, 3, 54.0)
    for _ in range(30):
        later.seconds()
    assert not later.passed(0, 4, None)
    assert later.passed(0, 4, 54.0)
    assert run.load("stop") == {"attempt": 0, "step": 4}
    assert RunClock(run, monotonic=FakeClock()).passed(0, 5, 54.0)
    assert not RunClock(run, monotonic=FakeClock()).passed(0, 3, 54.0)
