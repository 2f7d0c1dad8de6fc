"""Threads whose results do not depend on their timing.

Each task writes to its own memory and computes in a single thread. So a result does not depend on the order
of the tasks. It depends only on the division of the work into tasks, which follows from the shapes and the
number of threads.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")


class Threads:
    """A pool of threads. Each thread has scratch memory of its own."""

    def __init__(self, count: int | None) -> None:
        """Start `count` threads. None starts one for each processor that the process may use."""
        self.count = count or available_processors()
        self._pool = ThreadPoolExecutor(self.count, thread_name_prefix="permille") if self.count > 1 else None
        self._own = threading.local()

    def each(self, work: Callable[[T], None], items: Sequence[T]) -> None:
        """Call `work` with every item. Return when all are done; raise the error of the first that failed."""
        if self._pool is None or len(items) == 1:
            with np.errstate(all="ignore"):  # NaN is a valid result here, and makes the loss NaN
                for item in items:
                    work(item)
            return

        # Each thread has its own error state of numpy, so each task sets the state.
        def quietly(item: T) -> None:
            with np.errstate(all="ignore"):
                work(item)

        for _ in self._pool.map(quietly, items):
            pass

    def scratch(self, name: str, size: int) -> NDArray[np.float32]:
        """Return memory of the calling thread for `size` float32 numbers.

        It is valid until the thread asks for the same name again.
        """
        buffer: NDArray[np.float32] | None = getattr(self._own, name, None)
        if buffer is None or len(buffer) < size:
            buffer = np.empty(size, np.float32)
            setattr(self._own, name, buffer)
        return buffer[:size]


def available_processors() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        # `taskset` or a container's cpuset may allow fewer processors than the machine has.
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def blocks(count: int, size: int) -> list[slice]:
    """Cut a range from 0 to `count` into slices of `size`. The last one may be shorter.

    >>> blocks(5, 2)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]
