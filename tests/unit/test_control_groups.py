"""Tests of the processors that control groups allow."""

import os
from pathlib import Path
from typing import Any

import pytest

from permille import control_groups
from permille.control_groups import processor_limit
from permille.engines.light import threads
from permille_workers.runtime.settings import WorkerSettings
from permille_workers.runtime.supervisor import Shutdown, Supervisor


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of control groups, of which this process has the root."""
    monkeypatch.setattr(control_groups, "_CGROUP", tmp_path / "groups")
    monkeypatch.setattr(control_groups, "_OWN_GROUPS", tmp_path / "own")
    (tmp_path / "own").write_text("0::/\n")
    (tmp_path / "groups").mkdir()
    return tmp_path / "groups"


@pytest.mark.parametrize(
    ("text", "limit"),
    [("max 100000", None), ("200000 100000", 2), ("150000 100000", 2), ("1000 100000", 1), ("", None)],
)
def test_a_quota_is_rounded_up_to_whole_processors(groups: Path, text: str, limit: int | None) -> None:
    (groups / "cpu.max").write_text(f"{text}\n")
    assert processor_limit() == limit


def test_the_smallest_quota_of_the_groups_above_counts(groups: Path, tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/system.slice/worker.service\n")
    unit = groups / "system.slice/worker.service"
    unit.mkdir(parents=True)
    (unit / "cpu.max").write_text("400000 100000\n")
    assert processor_limit() == 4
    (unit.parent / "cpu.max").write_text("300000 100000\n")
    assert processor_limit() == 3


def test_a_group_may_have_any_name(groups: Path, tmp_path: Path) -> None:
    (tmp_path / "own").write_bytes("0::/müller\n".encode())
    (groups / "müller").mkdir()
    (groups / "müller/cpu.max").write_text("200000 100000\n")
    assert processor_limit() == 2
    (tmp_path / "own").write_bytes(b"0::/\xff\n")
    assert processor_limit() is None


@pytest.mark.parametrize("controllers", ["cpu,cpuacct", "cpu"])
@pytest.mark.parametrize("own", ["/docker/4f1c", "/"])
def test_quotas_of_version_1_are_read(groups: Path, tmp_path: Path, controllers: str, own: str) -> None:
    (tmp_path / "own").write_text(f"4:cpuset:{own}\n3:{controllers}:{own}\n0::{own}\n")
    group = groups / controllers
    group.mkdir()
    (group / "cpu.cfs_period_us").write_text("100000\n")
    (group / "cpu.cfs_quota_us").write_text("-1\n")
    assert processor_limit() is None
    (group / "cpu.cfs_quota_us").write_text("200000\n")
    assert processor_limit() == 2


def test_no_more_threads_start_than_the_groups_allow(
    groups: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def given(**settings: Any) -> str | None:
        chosen = WorkerSettings.model_validate({"data_dir": tmp_path, **settings})
        child = Supervisor(db=None, settings=chosen, shutdown=Shutdown())  # type: ignore[arg-type]
        return child._environment().get("OMP_NUM_THREADS")

    assert (threads.available_processors(), given(), given(threads=8)) == (64, None, "8")
    (groups / "cpu.max").write_text("400000 100000\n")
    assert (threads.available_processors(), given(), given(threads=8)) == (4, "4", "8")
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    assert given() == "6"
