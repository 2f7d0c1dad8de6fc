"""Threads whose results do not depend on their timing.

Each task writes to its own memory and computes in a single thread. So a result does not depend on the order
of the tasks. It depends only on the division of the work into tasks, which follows from the shapes and the
number of threads.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from permille.control_groups import processor_limit

T = TypeVar("T")


class Threads:
    """A pool of threads. Each thread has scratch memory of its own."""

    def __init__(self, count: int | None) -> None:
        """Start `count` threads. None starts one for each processor that the process may use."""
        self.count = count or available_processors()
        # The calling thread works, too.
        others = self.count - 1
        self._pool = ThreadPoolExecutor(others, thread_name_prefix="permille") if others else None
        self._own = threading.local()

    def each(self, work: Callable[[T], None], items: Sequence[T]) -> None:
        """Call `work` with every item. Return when all are done; raise the error of one that failed."""
        left = deque(items)

        def work_off() -> None:
            # Each thread has its own error state of numpy. NaN is valid here, and makes the loss NaN.
            with np.errstate(all="ignore"):
                while left:
                    try:
                        item = left.popleft()
                    except IndexError:  # another thread took it
                        return
                    work(item)

        # A thread takes the next task by itself, because a future for each of thousands costs too much.
        others = [] if self._pool is None else [self._pool.submit(work_off) for _ in items[1 : self.count]]
        try:
            work_off()
        finally:
            wait(others)  # they write to the caller's memory
        for other in others:
            other.result()

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
    # `taskset` or a container's cpuset may allow fewer processors than the machine has.
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, processor_limit() or allowed)


def blocks(count: int, size: int) -> list[slice]:
    """Cut a range from 0 to `count` into slices of `size`. The last one may be shorter.

    >>> blocks(5, 2)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]
