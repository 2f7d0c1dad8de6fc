"""Flipped bits in the files of the agent and full disks are reported, and no data are lost."""

import errno
import io
import random
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from permille.errors import OperatorError, PackageError, PermilleError
from permille_agent.cli.main import main
from permille_agent.cli.status import Status
from permille_agent.daemon.state import DaemonState, read_daemon_state
from permille_agent.link.forget import forget
from permille_agent.link.report import Delivery, collect_reports, read_reports
from permille_agent.local.model import LocalModel, Variant
from permille_agent.local.serve import read_or_make_access
from permille_agent.state.choices import add_references, read_consent, set_sharing
from permille_agent.state.home import Home, open_home, read_record, write_record
from permille_agent.state.models import active_model
from permille_agent.training.decision import DecisionCount
from permille_agent.training.outcome import RunResult
from permille_agent.training.run import find_run, list_runs
from tests.bigram_engine import bigram_engine
from tests.unit.edge_agent.runs import home_with_package, train_quickly, user_text


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunResult]:
    """Make a home with a finished training and every kind of state file."""
    folder = tmp_path_factory.mktemp("used")
    home, _ = home_with_package(folder / "home")
    text = user_text(folder)
    add_references(home, [text])
    set_sharing(home, log=True)
    write_record(home.daemon, DaemonState(day="2026-11-23"))
    result = train_quickly(home, [text], share_log=True)
    collect_reports(home)
    return home.root, result


def _copy(used: tuple[Path, RunResult], to: Path) -> Home:
    shutil.copytree(used[0], to / "home")
    return open_home(to / "home")


def _records(home: Home) -> list[Path]:
    return sorted(
        path for path in home.root.rglob("*.json") if home.blobs not in path.parents and path.is_file()
    )


def _flip(data: bytes, place: int, bit: int) -> bytes:
    return data[:place] + bytes([data[place] ^ (1 << bit)]) + data[place + 1 :]


def _words(home: Home) -> str:
    console = Console(record=True, width=400, file=io.StringIO())
    status = Status(home)
    status.document()
    status.render(console)
    return console.export_text()


@pytest.mark.attack(11, "one flipped bit in any state file")
def test_status_works_with_any_file_damaged_and_names_it(
    used: tuple[Path, RunResult], tmp_path: Path
) -> None:
    home, rng = _copy(used, tmp_path), random.Random(11)
    shown = {"data.json", "consent.json", "releases.json", "current.json", "daemon.json", "outcome.json"}
    shown |= {"decision.json", "run.json"}
    named = set()
    for path in _records(home):
        whole = path.read_bytes()
        for _ in range(8):
            path.write_bytes(_flip(whole, rng.randrange(len(whole)), rng.randrange(8)))
            if str(path) in _words(home):
                named.add(path.name)
        path.write_bytes(whole)
        assert "damaged" not in _words(home)
    assert named >= shown


@pytest.mark.attack(11, "every bit of a small state file flipped, one after the other")
def test_no_flip_changes_what_a_record_says_unseen(tmp_path: Path) -> None:
    path, record = tmp_path / "daemon.json", DaemonState(day="2026-11-23", failures=3)
    write_record(path, record)
    whole = path.read_bytes()
    refused = 0
    for place in range(len(whole)):
        for bit in (0, 3, 6):
            path.write_bytes(_flip(whole, place, bit))
            try:
                assert read_record(path, DaemonState) == record
            except OperatorError as exc:
                assert str(path) in str(exc) and "move it away" in str(exc)
                refused += 1
    assert refused > len(whole)


def _use(home: Home) -> None:
    with LocalModel(home, bigram_engine) as model:
        model.values(Variant.PERSONAL)


@pytest.mark.attack(11, "flips and cuts in the files of a run")
def test_damaged_files_of_a_run_raise_no_traceback(used: tuple[Path, RunResult], tmp_path: Path) -> None:
    home, rng = _copy(used, tmp_path), random.Random(12)
    run = used[1].run
    for path in sorted(find_run(home, run).path.iterdir()):
        whole = path.read_bytes()
        for cut in (False, True):
            place = rng.randrange(len(whole))
            path.write_bytes(whole[:place] if cut else _flip(whole, place, 3))
            for work in (lambda: _use(home), lambda: train_quickly(home, [used[0].parent / "user.txt"])):
                try:
                    work()
                except PermilleError as exc:
                    assert isinstance(exc, OperatorError | PackageError), exc
        path.write_bytes(whole)
    _use(home)


@pytest.mark.attack(11, "a damaged run that no command deletes")
def test_a_damaged_run_is_deleted_by_a_command(
    used: tuple[Path, RunResult], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = _copy(used, tmp_path)
    # After so many decisions, no result is certain enough to be adopted.
    write_record(home.decisions, DecisionCount(decisions=10**9))
    again = train_quickly(home, [used[0].parent / "user.txt"], seed=5)
    path = find_run(home, again.run).path
    used_run = active_model(home)
    assert used_run is not None and used_run.run != again.run
    (path / "run.json").write_bytes(b"\x00\xff")
    assert main(["--home", str(home.root), "forget", "--run", again.run]) == 0
    assert not path.exists()
    assert main(["--home", str(home.root), "forget", "--run", str(used_run.run)]) == 3
    assert "is in use, or `rollback` returns to it" in capsys.readouterr().err
    assert len(list_runs(home)) == 1


def _no_room(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.attack(11, "`forget` on a disk without a free byte")
@pytest.mark.parametrize("delivery", [Delivery.SENT, Delivery.QUEUED])
def test_forget_needs_no_free_disk(
    used: tuple[Path, RunResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delivery: Delivery
) -> None:
    home = _copy(used, tmp_path)
    (report,) = read_reports(home)
    _store_report(home, report, delivery)
    before = read_consent(home).withdrawals
    monkeypatch.setattr(tempfile, "mkstemp", _no_room)
    with pytest.raises(OperatorError, match="No space left"):
        write_record(home.daemon, DaemonState())
    # As the command does: lock, erase, then handle what waits for the service.
    assert main(["--home", str(home.root), "forget", "--yes"]) == 0
    assert not list_runs(home)
    assert not read_consent(home).share_log
    assert read_consent(home).withdrawals == before + 1
    (left,) = read_reports(home)
    assert (left.log_delivery, left.metrics) == (Delivery.DELETION_WANTED, None)
    assert forget(home).files == 0


def _store_report(home: Home, report: Any, delivery: Delivery) -> None:
    changed = replace(report, metrics_delivery=Delivery.SENT, log_delivery=delivery)
    write_record(home.reports / f"{report.run_id}.json", changed)


@pytest.mark.attack(11, "a flip in the token of the local server")
@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"\0" * 43, "é".encode()])
def test_a_damaged_token_is_told_with_its_file(tmp_path: Path, data: bytes) -> None:
    home = open_home(tmp_path)
    access = read_or_make_access(home)
    assert read_or_make_access(home) == access
    access.token_file.write_bytes(data)
    with pytest.raises(OperatorError, match=r"serve\.token.*Delete the file"):
        read_or_make_access(home)


@pytest.mark.attack(11, "a damaged file of consent")
def test_damaged_consent_withdraws_all_that_was_agreed_to(
    used: tuple[Path, RunResult], tmp_path: Path
) -> None:
    home = _copy(used, tmp_path)
    home.consent.write_bytes(_flip(home.consent.read_bytes(), 20, 2))
    with pytest.raises(OperatorError, match=r"consent\.json.*share-log off. to write it again"):
        read_consent(home)
    set_sharing(home, log=False)
    assert not read_consent(home).share_log
    assert read_consent(home).withdrawals > 1
    assert read_daemon_state(home).day == "2026-11-23"
