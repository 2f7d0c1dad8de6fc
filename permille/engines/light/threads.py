"""Work split over threads, with results that do not depend on their timing.

A task writes to places of its own and its arithmetic is single threaded, so a result depends on how the work
was cut, which is a function of shapes and the number of threads, and never on who did it when.
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
    """Threads, each with a scratch buffer of its own."""

    def __init__(self, count: int | None) -> None:
        """`count` None: as many as there are processors for this process."""
        self.count = count or available_processors()
        self._pool = ThreadPoolExecutor(self.count, thread_name_prefix="permille") if self.count > 1 else None
        self._own = threading.local()

    def each(self, work: Callable[[T], None], items: Sequence[T]) -> None:
        """Call `work` with every item; returns when all are done, and raises what the first failed with."""
        if self._pool is None or len(items) == 1:
            with np.errstate(all="ignore"):  # A NaN is a result here: the loss says so.
                for item in items:
                    work(item)
            return

        def quietly(item: T) -> None:
            with np.errstate(all="ignore"):
                work(item)

        for _ in self._pool.map(quietly, items):
            pass

    def scratch(self, name: str, size: int) -> NDArray[np.float32]:
        """`size` float32 of the calling thread, valid until it asks for this name again."""
        buffer: NDArray[np.float32] | None = getattr(self._own, name, None)
        if buffer is None or len(buffer) < size:
            buffer = np.empty(size, np.float32)
            setattr(self._own, name, buffer)
        return buffer[:size]


def available_processors() -> int:
    """Processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def blocks(count: int, size: int) -> list[slice]:
    """0..count in slices of `size`, the last one shorter."""
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]
