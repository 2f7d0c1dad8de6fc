"""Ranges of rows over threads: each row once, and errors reach the caller."""

import threading

import pytest

from permille.engines.row_threads import RowThreads

WIDE = 1 << 16


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize(("first", "last"), [(0, 10), (3, 4), (5, 5), (2, 100)])
def test_each_row_is_worked_on_once(count: int, first: int, last: int) -> None:
    seen: list[int] = []
    RowThreads(count).each(lambda begin, end: seen.extend(range(begin, end)), first, last, WIDE)
    assert sorted(seen) == list(range(first, last))


def test_small_work_stays_in_the_calling_thread() -> None:
    names: set[str] = set()
    RowThreads(4).each(lambda *_: names.add(threading.current_thread().name), 0, 10, 10)
    assert names == {threading.current_thread().name}


@pytest.mark.parametrize("failing", [0, 3])
def test_what_a_part_raises_is_raised(failing: int) -> None:
    def work(begin: int, end: int) -> None:
        if begin <= failing < end:
            raise ValueError(f"row {failing}")

    with pytest.raises(ValueError, match=f"row {failing}"):
        RowThreads(4).each(work, 0, 4, WIDE)
