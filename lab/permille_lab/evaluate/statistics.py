"""Statistical tests of the differences between methods.

All tests are paired: two methods are compared on the same items (examples or users). The distributions and
tests come from scipy.

# Legend: N items, G clusters, M methods, T tasks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError

EQUIVALENCE_MARGIN = 0.01
"""Margin of equivalence in accuracy: one percentage point."""

TINY_VARIANCE = 1e-24
"""A variance below this is rounding error and counts as 0."""


def clustered_variance(value_N: NDArray[np.floating], cluster_N: NDArray[np.generic]) -> tuple[float, int]:
    """Return the cluster-robust variance of a mean, and its degrees of freedom: clusters - 1.

        variance = G / (G - 1) * sum over clusters of (sum of the cluster's residuals)^2 / N^2

    This is the sandwich estimator. If each value is a cluster by itself, it is the usual variance of a mean.

    Args:
        cluster_N: the cluster of each value. Items of one passage are in one cluster.

    Raises:
        InputError: there are fewer than two clusters.
    """
    _, place_N = np.unique(cluster_N, return_inverse=True)
    number = int(place_N.max()) + 1 if len(place_N) else 0
    if number < 2:
        raise InputError(f"expected values of two or more clusters, got {number}")
    sum_G = np.bincount(place_N, weights=value_N - value_N.mean())
    return float((sum_G**2).sum()) * number / (number - 1) / len(value_N) ** 2, number - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class UserTest:
    """One comparison over users: Wilcoxon's signed-rank test on paired differences.

    Attributes:
        gain: mean over users of second loss minus first loss, positive if the first method is better.
        median: median of the gains. A single user with an unusual text can move the mean.
        interval: 95 % interval of the mean gain, by Student's t over users, not adjusted for other tests.
        worsened: share of users for whom the first method is worse.
        p_value: two-sided p-value. `holm` adjusts it for all comparisons together.
    """

    name: str
    users: int
    gain: float
    median: float
    interval: tuple[float, float]
    worsened: float
    p_value: float


def user_test(name: str, first_N: NDArray[np.floating], second_N: NDArray[np.floating]) -> UserTest:
    """Compare the losses of two methods. Each has one loss for each user.

    Raises:
        InputError: there are fewer than two users, the lengths differ, or a loss is not finite.
    """
    from scipy import stats

    gain_N = -_differences(first_N, second_N)
    p_value = 1.0 if not gain_N.any() else float(stats.wilcoxon(gain_N).pvalue)
    gain = float(gain_N.mean())
    reach = float(stats.t.ppf(0.975, len(gain_N) - 1) * stats.sem(gain_N))
    return UserTest(
        name=name,
        users=len(gain_N),
        gain=gain,
        median=float(np.median(gain_N)),
        interval=(gain - reach, gain + reach),
        worsened=float((gain_N < 0).mean()),
        p_value=p_value,
    )


def holm_adjusted(p_values: Sequence[float]) -> list[float]:
    """Return the p-values adjusted by Holm's step-down method, in the given order.

    For example, `holm_adjusted([0.01, 0.04])` is `[0.02, 0.04]`.
    """
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for place, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        highest = max(highest, min(1.0, (len(p_values) - place) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def holm(tests: Sequence[UserTest]) -> list[UserTest]:
    """Return the tests with p-values adjusted by Holm's step-down method, in the given order."""
    adjusted = holm_adjusted([test.p_value for test in tests])
    return [replace(test, p_value=adjusted[index]) for index, test in enumerate(tests)]


def beats_by(
    first_N: NDArray[np.floating],
    second_N: NDArray[np.floating],
    margin: float,
    cluster_N: NDArray[np.generic],
) -> tuple[float, float]:
    """Return the mean of first minus second, and the one-sided p-value that it is at most `margin`.

    Args:
        first_N, second_N: one outcome for each item: 1 for right and 0 for wrong, or the mean over seeds.
            An item must not occur twice, because it would count twice as evidence.
        cluster_N: the cluster of each item, such as its text.

    Raises:
        InputError: there are fewer than two items or clusters, the lengths differ, or an outcome is not
            finite.
    """
    from scipy import stats

    difference_N = _differences(first_N, second_N)
    mean = float(difference_N.mean())
    variance, freedom = clustered_variance(difference_N, cluster_N)
    if variance < TINY_VARIANCE:
        # All clusters agree, so the t-test has no variance. Instead, suppose that a cluster's difference is
        # 1 or -1, with mean `margin`: return the probability that it is 1 for all clusters.
        return mean, ((1 + margin) / 2) ** (freedom + 1) if mean > margin else 1.0
    return mean, float(stats.t.sf((mean - margin) / math.sqrt(variance), freedom))


def average_ranks(score_MT: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return each method's mean rank over the tasks, [M].

    Rank 1 is the highest score. Equal scores share their mean rank.

    Raises:
        InputError: a score is not finite, for example because it is missing.
    """
    from scipy import stats

    if score_MT.ndim != 2 or not np.isfinite(score_MT).all():
        raise InputError(f"expected finite scores [methods, tasks], got shape {list(score_MT.shape)}")
    ranks_MT = stats.rankdata(-score_MT, axis=0)
    means_M: NDArray[np.float64] = ranks_MT.mean(axis=1)
    return means_M


def _differences(first_N: NDArray[np.floating], second_N: NDArray[np.floating]) -> NDArray[np.float64]:
    if first_N.shape != second_N.shape or first_N.ndim != 1 or len(first_N) < 2:
        raise InputError(
            f"expected two or more paired items, got shapes {list(first_N.shape)} and {list(second_N.shape)}"
        )
    difference_N: NDArray[np.float64] = first_N.astype(np.float64) - second_N.astype(np.float64)
    if not np.isfinite(difference_N).all():
        raise InputError("expected finite outcomes, got some that are not")
    return difference_N
