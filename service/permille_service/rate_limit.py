"""How often one address may try to enrol or to get a token: a token bucket an address, in memory.

A process forgets at restart, and several processes count each for themselves: it slows guessing, it is no
quota.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable

from permille.schemas.problems import ProblemType
from permille_service.problems import ApiError

MAX_ADDRESSES = 10_000


class RateLimit:
    """At most `per_minute` calls a minute from one address, in bursts of as many."""

    def __init__(self, per_minute: int, *, clock: Callable[[], float]) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, address: str) -> None:
        """Count one call. Raises ApiError (`too-many-requests`) with the seconds to wait."""
        wait_s = self._take(address)
        if wait_s > 0:
            seconds = int(wait_s) + 1
            raise ApiError(
                ProblemType.TOO_MANY_REQUESTS,
                f"expected at most {self._per_minute} calls a minute; try again in {seconds} s",
                headers={"Retry-After": str(seconds)},
            )

    def _take(self, address: str) -> float:
        """Take one token; return how long to wait for it (0: taken)."""
        rate = self._per_minute / 60
        with self._lock:
            at = self._clock()
            tokens, since = self._buckets.pop(address, (float(self._per_minute), at))
            tokens = min(float(self._per_minute), tokens + (at - since) * rate)
            allowed = tokens >= 1
            self._buckets[address] = (tokens - 1 if allowed else tokens, at)
            if len(self._buckets) > MAX_ADDRESSES:
                self._buckets.popitem(last=False)
            return 0.0 if allowed else (1 - tokens) / rate
