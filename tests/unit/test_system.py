"""Tests of calls that only some systems have."""

import os
from pathlib import Path

import pytest

from permille.system import lock_file, read_at


def test_an_exclusive_lock_excludes_others_and_a_shared_one_admits_shared_ones(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with path.open() as first, path.open() as second, path.open() as third:
        lock_file(first.fileno(), shared=True)
        lock_file(second.fileno(), shared=True, wait=False)
        with pytest.raises(BlockingIOError):
            lock_file(third.fileno(), wait=False)


@pytest.mark.parametrize("has_pread", [True, False])
def test_bytes_are_read_from_an_offset(
    has_pread: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_pread:
        monkeypatch.delattr(os, "pread")
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    with path.open("rb") as file:
        assert read_at(file.fileno(), 3, 4) == b"456"
        assert read_at(file.fileno(), 9, 8) == b"89"
