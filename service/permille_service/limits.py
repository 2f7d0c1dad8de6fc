"""Limits that are counted in memory: the calls of each key in a minute, and the slots for long calls.

Each process counts for itself, and forgets its counts at a restart. The limits slow down the guessing of
secrets, and prevent one caller from using all resources. They are not quotas, which the database counts.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from permille.schemas.problems import ProblemType
from permille_service.problems import ApiError

MAX_KEYS = 10_000


class RateLimit:
    """A token bucket for each key. It allows `per_minute` calls in a minute, which may all come at once.

    Example:
        >>> limit = RateLimit(1, clock=lambda: 0.0)
        >>> limit.check("device 1")
        >>> limit.check("device 1")
        Traceback (most recent call last):
        permille_service.problems.ApiError: 429: More than 1 calls a minute. Try again in 61 s.
    """

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
        """Take one token if there is one. Return the seconds until the next token, or 0 if one was taken."""
        rate = self._per_minute / 60
        with self._lock:
            at = self._clock()
            # Remove the bucket here and insert it again below, so that the least recently used one stands
            # first.
            tokens, since = self._buckets.pop(key, (float(self._per_minute), at))
            tokens = min(float(self._per_minute), tokens + (at - since) * rate)
            allowed = tokens >= 1
            self._buckets[key] = (tokens - 1 if allowed else tokens, at)
            if len(self._buckets) > MAX_KEYS:
                # Some keys come from callers, who could fill the memory with them. So drop the least recently
                # used bucket. If its key comes again, it starts with a full bucket.
                self._buckets.popitem(last=False)
            return 0.0 if allowed else (1 - tokens) / rate


class Slots:
    """Slots for long calls, with a limit for all callers together and a limit for each key.

    Args:
        most: the number of slots.
        of_one: the number of slots that one key may hold.
        calls: a noun for the calls, in the plural.

    Example:
        >>> slots = Slots(8, of_one=1, calls="registrations")
        >>> with slots.hold("tenant_1"), slots.hold("tenant_1"):
        ...     pass
        Traceback (most recent call last):
        permille_service.problems.ApiError: 429: More than 1 registrations at a time. Wait for one to end.
    """

    def __init__(self, most: int, *, of_one: int, calls: str) -> None:
        self._most = most
        self._of_one = of_one
        self._calls = calls
        self._held: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def hold(self, key: str) -> Iterator[None]:
        """Hold a slot during a `with` block.

        Raises:
            ApiError: `too-many-requests` at the limit of the key, `unavailable` at the limit of all callers.
        """
        with self._lock:
            if self._held[key] >= self._of_one:
                raise ApiError(
                    ProblemType.TOO_MANY_REQUESTS,
                    f"More than {self._of_one} {self._calls} at a time. Wait for one to end.",
                )
            if self._held.total() >= self._most:
                raise ApiError(
                    ProblemType.UNAVAILABLE,
                    f"All callers together have {self._most} {self._calls}, the maximum. Try again later.",
                )
            self._held[key] += 1
        try:
            yield
        finally:
            with self._lock:
                self._held[key] -= 1
                if self._held[key] == 0:
                    # A Counter keeps keys whose count is zero, so the key would stay in memory.
                    del self._held[key]
