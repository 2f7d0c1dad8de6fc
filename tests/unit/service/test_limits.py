"""Tests of the token bucket, with a simulated clock."""

import pytest

from permille_service.limits import MAX_KEYS, RateLimit, Slots
from permille_service.problems import ApiError


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


def test_memory_of_keys_is_bounded() -> None:
    limit = RateLimit(1, clock=lambda: 0.0)
    for number in range(MAX_KEYS + 10):
        limit.check(str(number))
    assert len(limit._buckets) == MAX_KEYS


def test_places_are_counted_by_key_and_together_and_given_back() -> None:
    slots = Slots(3, of_one=2, calls="streams")
    with slots.hold("a"), slots.hold("a"):
        with pytest.raises(ApiError) as caught, slots.hold("a"):
            pass
        assert caught.value.status_code == 429
        with slots.hold("b"), pytest.raises(ApiError) as caught, slots.hold("c"):
            pass
        assert caught.value.status_code == 503
    with slots.hold("a"), slots.hold("c"), slots.hold("c"):
        assert slots._held.total() == 3
