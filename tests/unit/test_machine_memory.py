"""Tests of the memory that a process can still use, with the files of control groups."""

from pathlib import Path

import pytest

from permille import control_groups
from permille import machine_memory as memory

GIB = 2**30


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of control groups, on a machine with 64 GiB left."""
    monkeypatch.setattr(control_groups, "_CGROUP", tmp_path / "groups")
    monkeypatch.setattr(control_groups, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(memory, "_system_memory", lambda: 64 * GIB)
    (tmp_path / "own").write_text("0::/\n")
    return tmp_path / "groups"


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{content}\n")


def test_the_group_limits_the_memory_of_the_machine(groups: Path) -> None:
    assert memory.available_memory() == 64 * GIB
    write(groups, memory_max="max", memory_current=GIB)
    assert memory.available_memory() == 64 * GIB
    write(groups, memory_max=16 * GIB, memory_current=4 * GIB)
    assert memory.available_memory() == 12 * GIB
    write(groups, memory_high=8 * GIB)
    assert memory.available_memory() == 4 * GIB
    write(groups, memory_current=9 * GIB)
    assert memory.available_memory() == 0


def test_page_cache_that_can_be_freed_counts_as_available(groups: Path) -> None:
    write(groups, memory_max=16 * GIB, memory_current=15 * GIB)
    write(groups, memory_stat=f"anon {GIB}\nfile {14 * GIB}\ninactive_file {13 * GIB}\nactive_file {GIB}")
    assert memory.available_memory() == 14 * GIB


def test_the_group_of_a_unit_and_the_groups_above_it_count(groups: Path, tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/system.slice/permille-worker@1.service\n")
    unit = groups / "system.slice/permille-worker@1.service"
    write(unit, memory_max=8 * GIB, memory_current=GIB)
    assert memory.available_memory() == 7 * GIB
    write(unit.parent, memory_max=10 * GIB, memory_current=9 * GIB)
    assert memory.available_memory() == GIB


@pytest.mark.parametrize("own", ["/docker/4f1c", "/"])
def test_groups_of_version_1_are_read(groups: Path, tmp_path: Path, own: str) -> None:
    """In a container, the group's path on the host does not exist, and the root is the group itself."""
    (tmp_path / "own").write_text(f"3:cpu,cpuacct:{own}\n2:memory:{own}\n0::{own}\n")
    group = groups / "memory"
    write(group, memory_limit_in_bytes=9223372036854771712, memory_usage_in_bytes=GIB)
    assert memory.available_memory() == 64 * GIB
    write(group, memory_limit_in_bytes=4 * GIB, memory_usage_in_bytes=3 * GIB)
    write(group, memory_stat=f"inactive_file 0\ntotal_inactive_file {2 * GIB}")
    assert memory.available_memory() == 3 * GIB


def test_a_system_that_reports_nothing_is_unknown(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_system_memory", lambda: None)
    assert memory.available_memory() is None
    write(groups, memory_max=2 * GIB, memory_current=GIB)
    assert memory.available_memory() == GIB
