"""Robust statistics of many devices, by counts and ranks.

A made-up value of one device cannot move them far.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

SURE: Final = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, slots=True)
class Interval:
    """A value, and between which two it lies with 95 % confidence; None: too few to say."""

    value: float
    low: float | None
    high: float | None


def median_ranks(n: int) -> tuple[int, int, int]:
    """The places, from 0, of the median of `n` sorted values, and of its 95 % interval by order statistics.

    The interval's places are -1 and `n` where there are too few values: no value stands there. Half of the
    values lie below the median, so the number of those is binomial, here as a normal one.
    """
    reach = math.floor((n - SURE * math.sqrt(n)) / 2) - 1
    return n // 2, max(reach, -1), min(n - 1 - reach, n)


def median_of(values: Sequence[float]) -> Interval:
    """The median of some values, one at least, and its interval."""
    ordered, (middle, low, high) = sorted(values), median_ranks(len(values))
    if low < 0:
        return Interval(ordered[middle], None, None)
    return Interval(ordered[middle], ordered[low], ordered[high])


def share(count: int, n: int) -> Interval:
    """A share and its interval by Wilson's score."""
    centre = (count + SURE**2 / 2) / (n + SURE**2)
    half = SURE / (n + SURE**2) * math.sqrt(count * (n - count) / n + SURE**2 / 4)
    return Interval(count / n, max(0.0, centre - half), min(1.0, centre + half))


def share_difference(after: Interval, before: Interval) -> Interval:
    """The difference of two shares of different devices, by Newcombe's method 10 (1998)."""
    if after.low is None or after.high is None or before.low is None or before.high is None:
        return Interval(after.value - before.value, None, None)
    difference = after.value - before.value
    down = math.hypot(after.value - after.low, before.high - before.value)
    up = math.hypot(after.high - after.value, before.value - before.low)
    return Interval(difference, difference - down, difference + up)


def median_difference(after: Interval, before: Interval) -> Interval:
    """The difference of two medians of different devices: sure where their own intervals are apart."""
    if after.low is None or after.high is None or before.low is None or before.high is None:
        return Interval(after.value - before.value, None, None)
    return Interval(after.value - before.value, after.low - before.high, after.high - before.low)
