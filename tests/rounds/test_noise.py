"""Tests of the noise: exactly discrete Gaussian, with a privacy cost on which two accountants agree."""

import math
import random
from collections import Counter
from fractions import Fraction

import dp_accounting
import numpy as np
import opendp.prelude as opendp
import pytest
from dp_accounting.rdp import RdpAccountant
from scipy.stats import chi2

from permille_rounds.privacy.discrete_gaussian import draw_noise
from permille_rounds.privacy.zcdp import dp_epsilon_of, noise_for, rho_of, signal_to_noise

DRAWS = 40_000
VARIANCES = [Fraction(1, 9), Fraction(1), Fraction(22, 7), Fraction(2500, 9), Fraction(10**10)]


def bins(variance: Fraction, cells: int = 24) -> np.ndarray:
    """Return the edges of cells with similar probabilities.

    Integers below an edge belong to the cell on its left.
    """
    sigma = math.sqrt(variance)
    quantiles = [sigma * math.sqrt(2) * _erfinv(2 * i / cells - 1) for i in range(1, cells)]
    return np.unique(np.ceil(quantiles).astype(np.int64))


def _erfinv(y: float) -> float:
    low, high = -6.0, 6.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if math.erf(middle) < y else (low, middle)
    return low


def probabilities(variance: Fraction, edges: np.ndarray) -> np.ndarray:
    """Return the probabilities of the cells between the edges, from the definition, in floats."""
    reach = int(12 * math.sqrt(variance)) + 12
    x = np.arange(-reach, reach + 1)
    weight = np.exp(-(x.astype(float) ** 2) / (2 * float(variance)))
    cell = np.searchsorted(edges, x, side="right")
    return np.asarray(np.bincount(cell, weights=weight, minlength=len(edges) + 1) / weight.sum())


@pytest.mark.parametrize("variance", VARIANCES, ids=str)
def test_draws_have_the_probabilities_of_the_definition(variance: Fraction) -> None:
    x = draw_noise(DRAWS, variance, random.Random(7).randrange)
    edges = bins(variance)
    expected = DRAWS * probabilities(variance, edges)
    seen = np.bincount(np.searchsorted(edges, x, side="right"), minlength=len(expected))
    kept = expected > 5
    statistic = float((((seen - expected) ** 2)[kept] / expected[kept]).sum())
    assert kept.sum() >= 2
    assert statistic < chi2.ppf(1 - 1e-3, int(kept.sum()) - 1)


def test_the_operating_systems_randomness_is_the_default_and_opendp_draws_the_same() -> None:
    variance = Fraction(25, 4)
    opendp.enable_features("contrib")
    measure = opendp.m.make_gaussian(opendp.atom_domain(T=int), opendp.absolute_distance(T=int), scale=2.5)
    ours, theirs = Counter(draw_noise(8000, variance).tolist()), Counter(measure(0) for _ in range(8000))
    values = [x for x in range(-8, 9) if ours[x] + theirs[x] > 20]
    statistic = sum((ours[x] - theirs[x]) ** 2 / (ours[x] + theirs[x]) for x in values)
    assert statistic < chi2.ppf(1 - 1e-7, len(values))


def test_noise_of_wide_rounds_is_symmetric_and_as_wide_as_asked() -> None:
    x = draw_noise(20_000, Fraction(4_000_000), random.Random(1).randrange).astype(float)
    assert abs(x.mean()) < 4 * 2000 / math.sqrt(20_000)
    assert abs(x.std() / 2000 - 1) < 0.03


@pytest.mark.parametrize("participations", [1, 10, 50, 1000])
@pytest.mark.parametrize("noise", [0.5, 2.2, 9.0, 40.0])
@pytest.mark.parametrize("delta", [1e-5, 1e-6, 1e-9])
def test_two_accountants_agree(participations: int, noise: float, delta: float) -> None:
    rho = rho_of(noise, participations)
    orders = [1 + 10 ** (i / 50) for i in range(-150, 250)]
    theirs = RdpAccountant(orders)
    theirs.compose(dp_accounting.ZCDpEvent(rho=1 / (2 * noise**2)), participations)
    expected = theirs.get_epsilon(delta)
    ours = dp_epsilon_of(rho, delta)
    assert ours == pytest.approx(expected, rel=2e-3, abs=2e-4)
    grid = [1 + 10 ** (i / 400) for i in range(-3200, 3200)]
    assert ours <= min(rho * a + math.log(1 - 1 / a) - math.log(delta * a) / (a - 1) for a in grid) + 1e-9


@pytest.mark.parametrize(
    ("participations", "expected"),
    [(10, {2: 7.5, 4: 4.0, 8: 2.2}), (50, {2: 16.8, 4: 9.0, 8: 4.9})],
)
def test_the_noise_that_an_epsilon_asks_for(participations: int, expected: dict[int, float]) -> None:
    for dp_epsilon, noise_multiplier in expected.items():
        hundredths = noise_for(dp_epsilon, 1e-6, participations)
        assert hundredths / 100 == pytest.approx(noise_multiplier, abs=0.06)
        assert dp_epsilon_of(rho_of(hundredths / 100, participations), 1e-6) <= dp_epsilon
        assert dp_epsilon_of(rho_of((hundredths - 1) / 100, participations), 1e-6) > dp_epsilon


def test_signal_falls_with_noise_and_directions_and_rises_with_devices() -> None:
    assert signal_to_noise(1000, 64, 9.0) == pytest.approx(6.94, abs=0.01)
    assert signal_to_noise(1000, 1_100_000, 9.0) == pytest.approx(0.053, abs=0.001)
