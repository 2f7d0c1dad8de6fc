"""Tests of a run's durable results: written once, found again, torn lines cut, and old runs pruned."""

import os
from pathlib import Path

import pytest

from permille.errors import InputError, OperatorError
from permille_agent.state.home import Home, open_home
from permille_agent.training.options import TrainOptions, utc_now
from permille_agent.training.plan import Pace
from permille_agent.training.run import (
    BegunRun,
    Evaluation,
    RunDefinition,
    RunFolder,
    find_run,
    finite_or_none,
    list_runs,
    named_run,
    open_run,
    prune_runs,
)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return open_home(tmp_path / "home")


def _begin(home: Home, seed: int = 0) -> RunFolder:
    definition = RunDefinition(package="a", data="b", options=TrainOptions(seed=seed, minutes=0.1))
    return open_run(home, definition, utc_now())


def test_the_same_definition_finds_the_same_run(home: Home) -> None:
    run = _begin(home)
    again = _begin(home)
    assert (again, again.run_id) == (run, run.run_id)
    assert run.require("run", BegunRun).definition.options == TrainOptions(seed=0, minutes=0.1)
    assert _begin(home, seed=1) != run
    assert find_run(home, run.name) == run


def test_a_result_is_computed_once_and_read_back_exactly(home: Home) -> None:
    run = _begin(home)
    found = Pace(step_s=1e-300, token_s=0.1 + 0.2)
    assert run.once("pace", Pace, lambda: found) == found
    assert run.once("pace", Pace, lambda: Pace(step_s=1.0, token_s=1.0)) == found
    assert RunFolder(run.path).require("pace", Pace) == found


def test_a_result_that_fails_is_not_written(home: Home) -> None:
    run = _begin(home)

    def fail() -> Pace:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run.once("pace", Pace, fail)
    assert run.load("pace", Pace) is None
    with pytest.raises(OperatorError, match=r"has no pace\.json"):
        run.require("pace", Pace)
    with pytest.raises(ValueError, match="not JSON compliant"):
        run.store("pace", Pace(step_s=float("nan"), token_s=1.0))


def test_evaluations_survive_a_torn_line(home: Home) -> None:
    run = _begin(home)
    whole = [Evaluation(0, 5.25), Evaluation(10, None), Evaluation(20, 0.1 + 0.2)]
    assert run.evaluations(0) == []
    for evaluation in whole:
        run.append_evaluation(0, evaluation)
    path = run.path / "descent-0.jsonl"
    data = path.read_bytes()
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        expected = whole[: data[:cut].count(b"\n")]
        assert run.evaluations(0) == expected
        run.append_evaluation(0, Evaluation(99, 1.0))
        assert run.evaluations(0) == [*expected, Evaluation(99, 1.0)]


def test_a_damaged_evaluation_is_refused_by_its_line(home: Home) -> None:
    run = _begin(home)
    run.append_evaluation(0, Evaluation(0, 5.25))
    with (run.path / "descent-0.jsonl").open("ab") as file:
        file.write(b"garbage\n")
    with pytest.raises(OperatorError, match=r"line 2 of .*descent-0\.jsonl is damaged"):
        run.evaluations(0)


def test_descents_do_not_mix(home: Home) -> None:
    run = _begin(home)
    run.append_evaluation(0, Evaluation(1, 1.0))
    run.append_evaluation(1, Evaluation(2, 2.0))
    assert run.evaluations(1) == [Evaluation(2, 2.0)]
    assert run.journal(0) != run.journal(1)


@pytest.mark.parametrize("name", ["missing", "../runs", ".hidden", ".."])
def test_a_run_that_is_not_there_is_refused(home: Home, name: str) -> None:
    _begin(home)
    with pytest.raises(OperatorError, match="There is no run"):
        find_run(home, name)


def test_old_runs_are_pruned_but_those_in_use(home: Home) -> None:
    runs = [_begin(home, number) for number in range(9)]
    for age, run in enumerate(runs):
        os.utime(run.path / "run.json", ns=(0, age * 10**9))
    leftover = home.runs / ".deleted-before"
    leftover.mkdir()
    (leftover / "run.json").write_bytes((runs[8].path / "run.json").read_bytes())
    assert list_runs(home) == runs
    deleted = prune_runs(home, keep={runs[1].name}, newest=5)
    assert set(deleted) == {runs[0].name, runs[2].name, runs[3].name}
    assert [run.name for run in list_runs(home)] == [runs[1].name, *(run.name for run in runs[4:])]
    assert not leftover.exists()


def test_numbers_that_json_lacks_are_null() -> None:
    assert [finite_or_none(x) for x in (1.5, float("nan"), float("inf"))] == [1.5, None, None]


def test_a_run_is_named_by_its_folder_or_its_id_or_how_they_begin(home: Home) -> None:
    first, second = _begin(home), _begin(home, seed=1)
    for name in (first.name, first.run_id, first.run_id[:13], first.name[:12]):
        assert named_run(home, name) == first
    for name in ("", "none", "../x"):
        with pytest.raises(InputError, match=r"names? that begins? with"):
            named_run(home, name)
    (second.path / "run.json").write_text("damaged")
    assert named_run(home, second.name) == second
