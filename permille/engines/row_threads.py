"""A few threads for kernels that work on ranges of rows and hold no lock while they do."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

# Below this many weights a second thread costs more than it saves.
_WORTH_A_THREAD = 1 << 16


class RowThreads:
    """Splits ranges of rows; with one thread it is a plain call."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool = ThreadPoolExecutor(count - 1, thread_name_prefix="rows") if count > 1 else None

    def each(self, work: Callable[[int, int], None], first: int, last: int, columns: int) -> None:
        """Call `work(first, last)` on parts of a range of rows of `columns` weights, in any order; returns
        when all are done, or raises what one of them raised."""
        parts = min(self._count, (last - first) * columns // _WORTH_A_THREAD)
        if self._pool is None or parts < 2:
            work(first, last)
            return
        bounds = [first + (last - first) * part // parts for part in range(parts + 1)]
        waiting = [self._pool.submit(work, *part) for part in pairwise(bounds[1:])]
        try:
            work(bounds[0], bounds[1])
        finally:
            for done in waiting:
                done.result()
