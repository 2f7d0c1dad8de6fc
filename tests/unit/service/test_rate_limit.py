"""The token bucket, with a clock of its own."""

import pytest

from permille_service.problems import ApiError
from permille_service.rate_limit import MAX_ADDRESSES, RateLimit


def test_burst_is_bounded_and_refills_with_time() -> None:
    at = [0.0]
    limit = RateLimit(2, clock=lambda: at[0])
    limit.check("a")
    limit.check("a")
    with pytest.raises(ApiError) as caught:
        limit.check("a")
    assert caught.value.status_code == 429
    assert caught.value.headers == {"Retry-After": "31"}
    limit.check("b")
    at[0] = 30.0
    limit.check("a")
    with pytest.raises(ApiError):
        limit.check("a")


def test_memory_of_addresses_is_bounded() -> None:
    limit = RateLimit(1, clock=lambda: 0.0)
    for number in range(MAX_ADDRESSES + 10):
        limit.check(str(number))
    assert len(limit._buckets) == MAX_ADDRESSES
