"""A full or read-only disk, or a jumping clock, while a device trains: no effect on the results."""

import itertools
import os
import resource
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from permille.errors import OperatorError, PermilleError
from permille_agent.cli.main import main
from permille_agent.cli.status import Status
from permille_agent.state.home import open_home
from permille_agent.state.lock import lock_holder
from permille_agent.training.outcome import RunResult
from tests.attacks.test_full_disk import fill, small_disk
from tests.unit.edge_agent.runs import home_with_package, train_quickly, user_text


@contextmanager
def full_disk(disk: Path, left: int, *, is_disk: bool) -> Iterator[None]:
    """Leave `left` free bytes on the disk. If `disk` is only a folder, limit the size of files instead."""
    if is_disk:
        fill(disk)
        size = (disk / "filler").stat().st_size
        os.truncate(disk / "filler", max(0, size - left))
        try:
            yield
        finally:
            (disk / "filler").unlink()
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (left, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def read_only(disk: Path, *, is_disk: bool) -> Iterator[None]:
    """Make the disk read-only: by remounting it, or by the modes of its folders if it is only a folder."""
    folders = [path for path in (disk, *disk.rglob("*")) if path.is_dir()]

    def switch(flag: str, mode: int) -> None:
        if is_disk:
            subprocess.run(["mount", "-o", f"remount,{flag}", str(disk)], check=True)
        else:
            for folder in reversed(folders) if mode == 0o500 else folders:
                folder.chmod(mode)

    switch("ro", 0o500)
    try:
        yield
    finally:
        switch("rw", 0o700)


def same(one: RunResult, other: RunResult) -> bool:
    return (one.outcome, one.decision) == (other.outcome, other.decision)


def end(result: RunResult) -> tuple[object, ...]:
    """Return what a run came to, without its decision's number and the bounds that depend on it."""
    found = result.decision
    assert found is not None
    return result.outcome, found.state_digest, found.scaled_digest, found.loss_base, found.loss_personal


@pytest.mark.slow
@pytest.mark.attack(11, "the device's disk fills up at any point of a training")
def test_a_training_that_found_no_room_goes_on_to_the_same_end(tmp_path: Path) -> None:
    text = user_text(tmp_path)
    undisturbed = train_quickly(home_with_package(tmp_path / "other")[0], [text])
    with small_disk(tmp_path / "disk") as is_disk:
        home, _ = home_with_package(tmp_path / "disk" / "home")
        refused = 0
        for left in (0, 4096, 8192, 12_288, 16_384, 24_576, 32_768, 49_152, 65_536, 131_072):
            with full_disk(tmp_path / "disk", left, is_disk=is_disk):
                try:
                    train_quickly(home, [text])
                except PermilleError as exc:
                    refused += 1
                    assert "space" in str(exc) or "too large" in str(exc), exc
                Status(home).document()
        assert refused > 0
        assert lock_holder(home) is None
        # No number of a decision is used twice, so one that was counted before the disk was full stays spent.
        assert end(train_quickly(home, [text])) == end(undisturbed)


@pytest.mark.attack(11, "the device's disk is read-only while it trains, as after an error")
def test_a_read_only_disk_is_told_and_harms_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = user_text(tmp_path)
    undisturbed = train_quickly(home_with_package(tmp_path / "other")[0], [text])
    with small_disk(tmp_path / "disk") as is_disk:
        home, _ = home_with_package(tmp_path / "disk" / "home")
        with read_only(tmp_path / "disk", is_disk=is_disk):
            with pytest.raises(OperatorError, match=r"[Rr]ead-only|Permission"):
                train_quickly(home, [text])
            for command in (["status"], ["data", "add", str(text)], ["train", str(text)], ["report"]):
                code = main(["--home", str(home.root), *command])
                assert code in (0, 5, 6), (command, capsys.readouterr())
        assert same(train_quickly(open_home(home.root), [text]), undisturbed)


@pytest.mark.attack(9, "the device's clock jumps a year forth and back at each look while it trains")
def test_a_clock_that_jumps_a_year_changes_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, year_s = user_text(tmp_path), 365 * 86_400.0
    undisturbed = train_quickly(home_with_package(tmp_path / "other")[0], [text])
    home, _ = home_with_package(tmp_path / "home")
    clock, looks = time.time, itertools.count()
    monkeypatch.setattr(time, "time", lambda: clock() + year_s * (next(looks) % 3 - 1))
    jumped = train_quickly(home, [text])
    assert same(jumped, undisturbed)
    assert main(["--home", str(home.root), "status"]) == 0
