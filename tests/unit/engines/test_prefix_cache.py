"""What a cache of hidden states keeps, what it drops first, and that a bad file is never a wrong number."""

import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.engines.prefix_cache import PrefixCache, row_key
from permille.errors import InputError

# Bytes of a row, and of its file: 32 of digest and 128 of numpy's header more.
ROW, FILE = 40, 200


def row(number: int) -> NDArray[np.float32]:
    return np.arange(10, dtype=np.float32).reshape(2, 5) + number


def key(number: int) -> bytes:
    return row_key(np.array([number]), "scope")


def held(cache: PrefixCache, numbers: range) -> list[int]:
    return [number for number in numbers if cache.get(key(number)) is not None]


def filled(tmp_path: Path, *, rows: int = 3) -> PrefixCache:
    """All but the last row are in files."""
    cache = PrefixCache(ROW, folder=tmp_path, disk_bytes=10 * FILE)
    for number in range(rows):
        cache.put(key(number), row(number))
    return cache


def test_a_row_comes_back_as_it_was_put() -> None:
    cache = PrefixCache(1000)
    given = row(1)
    cache.put(key(1), given, fill_s=0.5)
    given[:] = 0
    got = cache.get(key(1))
    assert got is not None
    np.testing.assert_array_equal(got, row(1))
    assert not got.flags.writeable
    assert cache.get(key(2)) is None
    counters = cache.counters()
    assert (counters.hits, counters.misses, counters.memory_bytes, counters.fill_s) == (1, 1, ROW, 0.5)


def test_the_least_recently_used_row_leaves_first() -> None:
    cache = PrefixCache(3 * ROW)
    for number in range(3):
        cache.put(key(number), row(number))
    assert cache.get(key(0)) is not None
    cache.put(key(3), row(3))
    assert held(cache, range(4)) == [0, 2, 3]
    assert cache.counters().memory_bytes == 3 * ROW


def test_a_row_that_is_put_again_counts_once() -> None:
    cache = PrefixCache(3 * ROW)
    cache.put(key(0), row(0))
    cache.put(key(0), row(5))
    assert cache.counters().memory_bytes == ROW


def test_no_memory_keeps_nothing() -> None:
    cache = PrefixCache(0)
    cache.put(key(0), row(0))
    assert cache.get(key(0)) is None
    assert cache.counters().memory_bytes == 0


def test_rows_beyond_the_memory_come_back_from_files(tmp_path: Path) -> None:
    cache = filled(tmp_path)
    assert cache.counters().spilled == 2
    for number in (0, 1, 2, 0):
        got = cache.get(key(number))
        assert got is not None
        np.testing.assert_array_equal(got, row(number))
        assert got.dtype == np.float32
    counters = cache.counters()
    assert (counters.hits, counters.misses, counters.rejected) == (4, 0, 0)
    assert counters.memory_bytes <= ROW


@pytest.mark.parametrize("dtype", [np.uint16, np.float16, np.float64])
def test_files_keep_dtype_and_shape(tmp_path: Path, dtype: type[np.generic]) -> None:
    cache = PrefixCache(0, folder=tmp_path, disk_bytes=10_000)
    cache.put(key(0), np.ones((3, 2, 1), dtype))
    got = cache.get(key(0))
    assert got is not None
    assert (got.dtype, got.shape) == (np.dtype(dtype), (3, 2, 1))


def test_files_are_bounded_and_the_oldest_goes(tmp_path: Path) -> None:
    cache = PrefixCache(0, folder=tmp_path, disk_bytes=2 * FILE)
    for number in range(2):
        cache.put(key(number), row(number))
    assert cache.get(key(0)) is not None
    cache.put(key(2), row(2))
    assert held(cache, range(3)) == [0, 2]
    assert cache.counters().disk_bytes == 2 * FILE == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_a_row_larger_than_the_bound_on_files_is_dropped(tmp_path: Path) -> None:
    cache = PrefixCache(0, folder=tmp_path, disk_bytes=FILE - 1)
    cache.put(key(0), row(0))
    assert cache.get(key(0)) is None
    assert list(tmp_path.iterdir()) == []


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _swap(path: Path) -> None:
    other = next(found for found in path.parent.iterdir() if found != path)
    path.write_bytes(other.read_bytes())


def _replace_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "gone": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-5]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"0"),
    "changed": _flip,
    "another sequence's": _swap,
    "a folder": _replace_by_a_folder,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_a_miss(tmp_path: Path, damage: str) -> None:
    cache = filled(tmp_path)
    DAMAGES[damage](tmp_path / f"{key(0).hex()}.hidden")
    assert cache.get(key(0)) is None
    assert cache.counters().rejected >= 1
    np.testing.assert_array_equal(cache.get(key(1)), row(1))
    cache.put(key(0), row(0))
    cache.put(key(7), row(7))
    assert cache.counters().memory_bytes == ROW


def test_a_folder_that_vanishes_costs_entries_only(tmp_path: Path) -> None:
    cache = filled(tmp_path / "spill")
    for path in (tmp_path / "spill").iterdir():
        path.unlink()
    (tmp_path / "spill").rmdir()
    assert cache.get(key(0)) is None
    for number in range(5, 9):
        cache.put(key(number), row(number))
    assert held(cache, range(5, 9)) == [8]
    assert cache.counters().rejected > 0


def test_only_the_owner_reads_the_files(tmp_path: Path) -> None:
    filled(tmp_path / "spill")
    assert stat.S_IMODE((tmp_path / "spill").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "spill").iterdir()} == {0o600}


def test_closing_deletes_the_files_and_starting_deletes_what_was_left(tmp_path: Path) -> None:
    cache = filled(tmp_path)
    cache.close()
    assert list(tmp_path.iterdir()) == []
    assert held(cache, range(3)) == []
    assert (cache.counters().memory_bytes, cache.counters().disk_bytes) == (0, 0)
    filled(tmp_path)
    (tmp_path / f".x{'.hidden'}.tmp").write_bytes(b"torn")
    (tmp_path / "notes.txt").write_text("another's")
    assert held(PrefixCache(ROW, folder=tmp_path, disk_bytes=FILE), range(3)) == []
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_keys_depend_on_tokens_and_scope() -> None:
    ids = np.array([1, 2, 3])
    keys = {row_key(ids, "a"), row_key(ids[:2], "a"), row_key(ids, "b"), row_key(ids[::-1], "a")}
    assert len(keys) == 4
    assert row_key(ids.copy(), "a") in keys


def test_threads_share_a_cache(tmp_path: Path) -> None:
    cache = PrefixCache(4 * ROW, folder=tmp_path, disk_bytes=6 * FILE)
    wrong: list[int] = []

    def work(seed: int) -> None:
        for number in np.random.default_rng(seed).integers(0, 20, 200).tolist():
            got = cache.get(key(number))
            if got is None:
                cache.put(key(number), row(number))
            elif not np.array_equal(got, row(number)):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counters = cache.counters()
    assert wrong == []
    assert counters.hits + counters.misses == 800
    assert counters.memory_bytes <= 4 * ROW
    assert counters.disk_bytes <= 6 * FILE


@pytest.mark.parametrize(("memory", "disk"), [(-1, 0), (0, -1), (0, 1)])
def test_bounds_that_are_wrong_are_refused(memory: int, disk: int) -> None:
    with pytest.raises(InputError, match="expected bounds"):
        PrefixCache(memory, disk_bytes=disk)


@pytest.mark.parametrize(("spare", "expected"), [(FILE, 1), (FILE - 1, 0)])
def test_files_leave_room_for_what_must_be_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spare: int, expected: int
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=(512 << 20) + spare)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    cache = PrefixCache(0, folder=tmp_path, disk_bytes=10 * FILE)
    cache.put(key(0), row(0))
    assert len(list(tmp_path.iterdir())) == cache.counters().spilled == expected
    assert (cache.get(key(0)) is not None) is bool(expected)
