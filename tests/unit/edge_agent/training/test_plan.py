"""Tests of a run's budget: a function of the number of steps, or within a time limit."""

from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from permille.choices import EstimatorKind
from permille.package.reader import Package
from permille_agent.training.options import utc_now
from permille_agent.training.plan import (
    EVALUATIONS,
    JUDGED,
    Pace,
    Plan,
    budget_of_time,
    forecast,
    make_plan,
)
from permille_agent.training.run import BegunRun, Run, RunDefinition, RunFolder
from tests.bigram_engine import BigramEngine, bigram_engine
from tests.unit.edge_agent.runs import run_of, user_text

seconds = st.floats(1e-4, 100.0)


@given(st.floats(60.0, 100_000.0), seconds, seconds, seconds)
def test_a_run_that_has_time_for_its_parts_stays_within_its_time(
    available_s: float, step_s: float, evaluation_s: float, judgement_s: float
) -> None:
    budget = budget_of_time(available_s, step_s=step_s, evaluation_s=evaluation_s, judgement_s=judgement_s)
    assert budget.limit_s is not None
    assert 0.599 * available_s <= budget.limit_s <= 0.951 * available_s
    train_s = budget.steps * step_s + budget.evaluations * evaluation_s
    roomy = available_s > 100 * max(step_s, evaluation_s, judgement_s)
    if roomy:
        assert train_s <= budget.limit_s + 1e-6
        assert available_s - budget.limit_s >= JUDGED * judgement_s - 1e-6


def test_slow_evaluations_are_fewer() -> None:
    quick = budget_of_time(1800.0, step_s=1.0, evaluation_s=1.0, judgement_s=5.0)
    slow = budget_of_time(1800.0, step_s=1.0, evaluation_s=30.0, judgement_s=150.0)
    assert quick.evaluations == EVALUATIONS
    assert slow.evaluations < EVALUATIONS
    assert slow.evaluations * 30.0 < 0.3 * 1800.0
    assert slow.steps < quick.steps


def test_a_minute_on_a_slow_machine_makes_one_step_at_least() -> None:
    assert budget_of_time(60.0, step_s=50.0, evaluation_s=20.0, judgement_s=100.0).steps == 1


class Told:
    """A progress display that records the phases."""

    def __init__(self) -> None:
        self.phases: list[str] = []

    def phase(self, name: str) -> None:
        self.phases.append(name)

    def step(self, done: int, total: int, loss: float) -> None: ...

    def evaluated(self, step: int, loss: float, first_loss: float) -> None: ...


def _plan(total_steps: int) -> Plan:
    return Plan(
        epsilon=1.0,
        learning_rate=1.0,
        base_loss=1.0,
        total_steps=total_steps,
        evaluate_every=1,
        limit_s=None,
    )


def _begun(run: Run, step_s: float, **changes: Any) -> Run:
    """Store `step_s` as the measured time of a step, and return the run."""
    definition = RunDefinition(package=run.package.digest, data="b", options=run.options)
    run.folder.store("run", BegunRun(run_id="r", began_at=utc_now(), definition=definition))
    run.folder.store("pace", Pace(step_s=step_s, token_s=1.0))
    return run


def test_a_run_says_how_long_a_step_takes_and_how_many_fit(package: Package, tmp_path: Path) -> None:
    text, engine = user_text(tmp_path), bigram_engine(package)
    timed: dict[str, Any] = {"steps": None, "minutes": 30.0}
    run = _begun(run_of(package, engine, text, tmp_path / "runs/a", **timed), 0.318)
    assert forecast(run, _plan(85)) == "a step takes 0.32 s here: 85 steps in 30 minutes"
    along = _begun(
        run_of(
            package, engine, text, tmp_path / "runs/b", estimator=EstimatorKind.GRADIENT, queries=0, **timed
        ),
        2.0,
    )
    told = forecast(along, _plan(10_000))
    assert told == "a step takes 2 s here: 10000 steps in 30 minutes; more steps would overfit this text"


def test_a_run_with_time_for_too_few_steps_says_how_many_minutes_to_allow(
    package: Package, tmp_path: Path
) -> None:
    text, engine = user_text(tmp_path), bigram_engine(package)

    def begun(minutes: float) -> Run:
        timed: dict[str, Any] = {"steps": None, "minutes": minutes, "memory": 0}
        run = _begun(run_of(package, engine, text, tmp_path / f"{minutes}", **timed), 40.0)
        run.folder.store("pace", Pace(step_s=40.0, token_s=0.001))
        return run

    short = begun(1.5)
    assert forecast(short, make_plan(short)) == (
        "a step takes 40 s here: 1 step in 1.5 minutes, too few to learn from your text. "
        "Allow 20 steps with --minutes 15"
    )
    assert make_plan(begun(14.0)).total_steps < 20 <= make_plan(begun(15.0)).total_steps


def test_a_run_of_so_many_steps_has_no_forecast(package: Package, tmp_path: Path) -> None:
    run = run_of(package, bigram_engine(package), user_text(tmp_path), tmp_path / "runs/a", steps=100)
    assert forecast(run, _plan(100)) is None


def test_the_forecast_is_told_before_the_first_step(package: Package, tmp_path: Path) -> None:
    told = Told()
    run = run_of(
        package, BigramEngine(package), user_text(tmp_path), tmp_path / "runs/a", steps=None, minutes=0.05
    )
    make_plan(Run(**{name: getattr(run, name) for name in Run.__dataclass_fields__} | {"progress": told}))
    assert told.phases[:2] == ["measuring the first loss", "measuring how long a step takes here"]
    assert told.phases[-1].startswith("a step takes ")
    assert RunFolder(tmp_path / "runs/a").journal(0).exists() is False


def test_a_run_keeps_time_for_its_memories(package: Package, tmp_path: Path) -> None:
    text, engine = user_text(tmp_path), bigram_engine(package)
    limits = []
    for memory in (0, 16, 1024):
        timed: dict[str, Any] = {"steps": None, "minutes": 2000.0, "memory": memory}
        limit_s = make_plan(
            _begun(run_of(package, engine, text, tmp_path / f"{memory}", **timed), 1.0)
        ).limit_s
        assert limit_s is not None
        limits.append(limit_s)
    assert limits[0] > limits[1] > limits[2]
