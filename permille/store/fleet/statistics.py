"""Robust statistics over many devices, from counts and ranks.

A false value from one device cannot change the results much.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

# The quantile of the normal distribution for a two-sided confidence of 95 %.
SURE: Final = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with its 95 % confidence interval. The bounds are None if there are too few values."""

    value: float
    low: float | None
    high: float | None


def median_ranks(n: int) -> tuple[int, int, int]:
    """Return the ranks, from 0, of the median of `n` sorted values and of its 95 % interval.

    The bounds of the interval are two of the sorted values. The number of values below the true median is
    binomial with probability 1/2, which we approximate by a normal distribution. With too few values,
    the ranks of the bounds are -1 and `n`.

    Example:
        >>> median_ranks(100)
        (50, 39, 60)
        >>> median_ranks(3)
        (1, -1, 3)
    """
    reach = math.floor((n - SURE * math.sqrt(n)) / 2) - 1
    return n // 2, max(reach, -1), min(n - 1 - reach, n)


def median_of(values: Sequence[float]) -> Interval:
    """Return the median of at least one value, with its interval.

    Example:
        >>> median_of([3.0, 1.0, 2.0])
        Interval(value=2.0, low=None, high=None)
    """
    ordered, (middle, low, high) = sorted(values), median_ranks(len(values))
    if low < 0:
        return Interval(ordered[middle], None, None)
    return Interval(ordered[middle], ordered[low], ordered[high])


def share(count: int, n: int) -> Interval:
    """Return the share `count / n` with Wilson's score interval."""
    centre = (count + SURE**2 / 2) / (n + SURE**2)
    half = SURE / (n + SURE**2) * math.sqrt(count * (n - count) / n + SURE**2 / 4)
    return Interval(count / n, max(0.0, centre - half), min(1.0, centre + half))


def share_difference(after: Interval, before: Interval) -> Interval:
    """Return the difference of the shares of two independent groups, by Newcombe's method 10 (1998)."""
    if after.low is None or after.high is None or before.low is None or before.high is None:
        return Interval(after.value - before.value, None, None)
    difference = after.value - before.value
    down = math.hypot(after.value - after.low, before.high - before.value)
    up = math.hypot(after.high - after.value, before.value - before.low)
    return Interval(difference, difference - down, difference + up)


def median_difference(after: Interval, before: Interval) -> Interval:
    """Return the difference of the medians of two independent groups."""
    if after.low is None or after.high is None or before.low is None or before.high is None:
        return Interval(after.value - before.value, None, None)
    # This interval is conservative: it excludes zero only if the intervals of the two medians are disjoint.
    return Interval(after.value - before.value, after.low - before.high, after.high - before.low)
