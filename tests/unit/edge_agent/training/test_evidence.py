"""Tests of the e-value that decides adoption: definition, error rate on skewed data, and groups."""

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.errors import InputError
from permille_agent.training.evidence import (
    ALPHA,
    MARGIN,
    Comparison,
    alpha_of,
    compare_losses,
    log_e_value,
    merged,
)

Gains = NDArray[np.float64]


def _compared(gain_G: Gains) -> Comparison:
    return compare_losses(gain_G, np.full(len(gain_G), 100))


def _is_taken(gain_G: Gains) -> bool:
    """Return `_compared(gain_G).better` without computing the interval."""
    return log_e_value(gain_G, MARGIN) >= -math.log(alpha_of(1))


def test_the_e_value_is_the_mean_over_bets_of_products_over_groups() -> None:
    gains, bets = [0.5, -0.1, -0.9], [0.1, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5]
    wealth = [math.prod(max(0.0, 1 + bet * (gain - 0.01)) for gain in gains) for bet in bets]
    assert wealth[-1] == 0
    assert log_e_value(np.array(gains), 0.01) == pytest.approx(math.log(sum(wealth) / 7), rel=1e-12)


def test_the_interval_holds_the_margins_that_the_e_value_refuses() -> None:
    rng = np.random.default_rng(1)
    gain_G, tokens_G = rng.normal(0.4, 0.2, 60), rng.integers(30, 300, 60)
    found, wanted = compare_losses(gain_G, tokens_G), -math.log(alpha_of(1))
    assert found.low < found.improvement < found.high
    assert log_e_value(gain_G, found.low) >= wanted
    assert log_e_value(gain_G, found.low + 2e-3) < wanted
    assert log_e_value(-gain_G, -found.high) >= wanted
    assert found.improvement == pytest.approx(float((gain_G * tokens_G).sum() / tokens_G.sum()))


def _exponential(rng: np.random.Generator, groups: int) -> Gains:
    return 0.3 * (1 - rng.exponential(size=groups))


def _lognormal(rng: np.random.Generator, groups: int) -> Gains:
    return 0.3 * (math.exp(0.5) - rng.lognormal(size=groups)) / math.sqrt((math.e - 1) * math.e)


def _few_badly_hurt(rng: np.random.Generator, groups: int) -> Gains:
    return np.where(rng.random(groups) < 0.05, -1.0, 0.05 / 0.95)


@pytest.mark.parametrize("groups", [20, 40, 100])
@pytest.mark.parametrize("gains", [_exponential, _lognormal, _few_badly_hurt])
def test_a_model_that_gains_nothing_is_adopted_in_less_than_three_of_a_hundred_cases(
    gains: Callable[[np.random.Generator, int], Gains], groups: int
) -> None:
    rng = np.random.default_rng(7)
    adopted = [_is_taken(gains(rng, groups)) for _ in range(1000)]
    assert np.mean(adopted) <= 0.03


@pytest.mark.parametrize(("gain", "groups"), [(0.5, 20), (0.25, 40), (0.15, 100)])
def test_a_clear_gain_is_adopted(gain: float, groups: int) -> None:
    rng = np.random.default_rng(7)
    adopted = [_is_taken(rng.normal(gain, 0.15, groups)) for _ in range(200)]
    assert np.mean(adopted) >= 0.9


def test_a_gain_within_the_margin_is_none() -> None:
    assert not _compared(np.full(10_000, 0.0099)).better
    assert _compared(np.full(10_000, 0.0199)).better


def test_too_few_groups_prove_nothing() -> None:
    assert not _compared(np.full(19, 5.0)).better
    assert _compared(np.full(20, 5.0)).better


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_proves_nothing(loss: float) -> None:
    gain_G = np.full(30, 1.0)
    gain_G[3] = loss
    found = _compared(gain_G)
    assert (found.improvement, found.better) == (-math.inf, False)


def test_a_later_decision_needs_more() -> None:
    gain_G, tokens_G = np.full(20, 0.3), np.full(20, 100)
    assert compare_losses(gain_G, tokens_G, decision=1).better
    assert not compare_losses(gain_G, tokens_G, decision=100).better


def test_all_decisions_on_a_persons_data_together_spend_alpha() -> None:
    shares = [alpha_of(number) for number in range(1, 20_001)]
    assert sum(shares) == pytest.approx(ALPHA, rel=1e-3)
    assert all(later < earlier for earlier, later in pairwise(shares))
    with pytest.raises(InputError, match="from 1, got 0"):
        alpha_of(0)


def test_the_order_of_groups_does_not_matter() -> None:
    rng = np.random.default_rng(3)
    gain_G = rng.normal(0.1, 0.3, 50)
    turned = log_e_value(gain_G[::-1], 0.0)
    assert log_e_value(gain_G, 0.0) == pytest.approx(turned, rel=1e-12)


def test_small_documents_are_judged_with_their_neighbours() -> None:
    assert merged(np.array([10, 60, 0, 64, 30, 30, 30, 5]), 64).tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    assert merged(np.array([3, 4])).tolist() == [0, 0]


@pytest.mark.parametrize(("gains", "tokens"), [([1.0], [1, 2]), ([], []), ([1.0], [0])])
def test_groups_that_do_not_belong_together_are_refused(gains: list[float], tokens: list[int]) -> None:
    with pytest.raises(InputError, match="expected"):
        compare_losses(np.array(gains), np.array(tokens, dtype=np.int64))
