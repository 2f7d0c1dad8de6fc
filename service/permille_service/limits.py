"""Limits of a principal: calls a minute for a key, and places that are held for a while.

Both are in memory: a process forgets at restart, and several processes count each for themselves. They slow
guessing and keep one caller from taking all; they are no quota.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from permille.schemas.problems import ProblemType
from permille_service.problems import ApiError

MAX_KEYS = 10_000


class RateLimit:
    """Limit of `per_minute` calls a minute for a key, in bursts of the same size."""

    def __init__(self, per_minute: int, *, clock: Callable[[], float]) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, key: str) -> None:
        """Count one call. Raises ApiError (`too-many-requests`) with the seconds to wait."""
        wait_s = self._take(key)
        if wait_s > 0:
            seconds = int(wait_s) + 1
            raise ApiError(
                ProblemType.TOO_MANY_REQUESTS,
                f"More than {self._per_minute} calls a minute. Try again in {seconds} s.",
                headers={"Retry-After": str(seconds)},
            )

    def _take(self, key: str) -> float:
        """Take one token; return how long to wait for it (0: taken)."""
        rate = self._per_minute / 60
        with self._lock:
            at = self._clock()
            tokens, since = self._buckets.pop(key, (float(self._per_minute), at))
            tokens = min(float(self._per_minute), tokens + (at - since) * rate)
            allowed = tokens >= 1
            self._buckets[key] = (tokens - 1 if allowed else tokens, at)
            if len(self._buckets) > MAX_KEYS:
                self._buckets.popitem(last=False)
            return 0.0 if allowed else (1 - tokens) / rate


class Slots:
    """Places that callers hold: at most so many together, and so many of one key."""

    def __init__(self, most: int, *, of_one: int) -> None:
        self._most = most
        self._of_one = of_one
        self._held: Counter[str] = Counter()

    @contextmanager
    def hold(self, key: str) -> Iterator[None]:
        """Hold a place. Raises ApiError: `too-many-requests` for this key, `unavailable` for everybody.

        For the event loop's thread alone.
        """
        if self._held[key] >= self._of_one:
            raise ApiError(
                ProblemType.TOO_MANY_REQUESTS, f"More than {self._of_one} at a time. Close one first."
            )
        if self._held.total() >= self._most:
            raise ApiError(
                ProblemType.UNAVAILABLE,
                f"All callers together hold {self._most}, as many as the service allows. Try again later.",
            )
        self._held[key] += 1
        try:
            yield
        finally:
            self._held[key] -= 1
            if self._held[key] == 0:
                del self._held[key]
