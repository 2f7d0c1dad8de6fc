"""Tests of exact bounds against scipy."""

import math

import pytest
from scipy import stats

from permille.confidence import above, at_least, lower_mean, lower_share


@pytest.mark.parametrize(
    ("count", "n", "share"), [(3, 20, 0.02), (12, 40, 0.1), (200, 1000, 0.15), (1, 1, 0.5)]
)
def test_binomial_tails_are_exact(count: int, n: int, share: float) -> None:
    assert at_least(count, n, share) == pytest.approx(stats.binom.sf(count - 1, n, share), rel=1e-9)
    assert at_least(0, n, share) == 1.0


@pytest.mark.parametrize(("t", "free"), [(2.2, 9), (-1.0, 5), (0.0, 3), (5.0, 1000)])
def test_tails_of_t_are_exact(t: float, free: int) -> None:
    assert above(t, free) == pytest.approx(stats.t.sf(t, free), rel=1e-9)


def test_lower_bounds_are_those_of_scipy() -> None:
    assert lower_share(8, 80, 0.001) == pytest.approx(stats.beta.ppf(0.001, 8, 73), rel=1e-9)
    assert lower_share(80, 80, 0.001) == pytest.approx(0.001 ** (1 / 80), rel=1e-9)
    assert lower_share(0, 80, 0.001) == 0.0
    expected = 0.02 - stats.t.ppf(0.999, 49) * 0.03 / math.sqrt(50)
    assert lower_mean(0.02, 0.03, 50, 0.001) == pytest.approx(expected, rel=1e-9)
    assert lower_mean(0.02, 0.0, 1, 0.001) == -math.inf
