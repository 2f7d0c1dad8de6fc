"""Tests of rates by CKA against a slow formula, and of the linear programme against all rates on a grid."""

import itertools
import math

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.errors import InputError
from permille_lab.sparse.rates import cubic_rate, importance, layer_rates, linear_cka, similarities


def slow_cka(x_TD: NDArray[np.float32], y_TE: NDArray[np.float32]) -> float:
    """Return CKA from the tokens' Gram matrices, centred by H = 1 - 11'/T and summed element by element."""
    tokens = len(x_TD)
    h_TT = np.eye(tokens) - np.full((tokens, tokens), 1 / tokens)
    k_TT = h_TT @ (x_TD.astype(np.float64) @ x_TD.astype(np.float64).T) @ h_TT
    l_TT = h_TT @ (y_TE.astype(np.float64) @ y_TE.astype(np.float64).T) @ h_TT
    pairs = list(itertools.product(range(tokens), repeat=2))
    hsic = math.fsum(k_TT[i, j] * l_TT[i, j] for i, j in pairs)
    own = [math.fsum(m_TT[i, j] ** 2 for i, j in pairs) for m_TT in (k_TT, l_TT)]
    return hsic / math.sqrt(own[0] * own[1])


def test_cka_is_the_normalised_hsic_of_centred_grams() -> None:
    rng = np.random.default_rng(0)
    x_TD = rng.standard_normal((17, 5)).astype(np.float32) + 3  # nonzero means, which centring must remove
    y_TE = (x_TD[:, :3] + 0.5 * rng.standard_normal((17, 3))).astype(np.float32)
    assert linear_cka(x_TD, y_TE) == pytest.approx(slow_cka(x_TD, y_TE), rel=1e-6)
    rotation_DD = np.linalg.qr(rng.standard_normal((5, 5)))[0].astype(np.float32)
    assert linear_cka(x_TD, 7 * x_TD @ rotation_DD) == pytest.approx(1, abs=1e-6)
    assert linear_cka(x_TD, np.ones((17, 2), np.float32)) == 0


def test_importance_falls_with_likeness() -> None:
    rng = np.random.default_rng(1)
    base_TD = rng.standard_normal((40, 6)).astype(np.float32)
    alone_TD = rng.standard_normal((40, 6)).astype(np.float32)
    similar_LL = similarities([base_TD, base_TD * 2, alone_TD])
    found_L = importance(similar_LL, beta=2.0)
    expected = [math.exp(-2 * sum(similar_LL[i, j] for j in range(3) if j != i)) for i in range(3)]
    assert found_L == pytest.approx(expected)
    assert found_L.argmax() == 2


@pytest.mark.parametrize("seed", range(4))
def test_rates_are_the_best_of_all_on_a_grid(seed: int) -> None:
    rng = np.random.default_rng(seed)
    worth_L, weights_L = rng.uniform(0.1, 1, 3), np.array([100, 200, 300])
    pruned_L = np.array([0.0, 0.45, 0.5 if seed == 3 else 0.0])
    rates_L = layer_rates(worth_L, weights_L, 0.5, pruned_L, spread=0.2)
    kept = float(worth_L @ (weights_L * (1 - rates_L)))
    assert float(weights_L @ rates_L) == pytest.approx(0.5 * 600)
    assert (rates_L >= np.maximum(pruned_L, 0.3) - 1e-12).all()
    assert (rates_L <= 0.7 + 1e-12).all()
    grid = np.arange(30, 71) / 100
    best = 0.0
    for first, second in itertools.product(grid, grid):
        third = (0.5 * 600 - 100 * first - 200 * second) / 300
        trial_L = np.array([first, second, third])
        if 0.3 - 1e-9 <= third <= 0.7 + 1e-9 and (trial_L >= pruned_L - 1e-9).all():
            best = max(best, float(worth_L @ (weights_L * (1 - trial_L))))
    assert kept >= best - 1e-9
    assert kept <= best + 600 * 0.01  # the optimum is near the best point of the grid


def test_no_spread_makes_rates_equal_and_unlike_layers_keep_more() -> None:
    worth_L, weights_L, none_L = np.array([1e-12, 3e-12, 2e-12]), np.array([10, 10, 10]), np.zeros(3)
    assert layer_rates(worth_L, weights_L, 0.6, none_L, spread=0) == pytest.approx([0.6] * 3)
    assert layer_rates(worth_L, weights_L, 0.6, none_L) == pytest.approx([0.7, 0.5, 0.6])


def test_more_pruned_than_asked_is_refused() -> None:
    with pytest.raises(InputError, match=r"mean 0\.3000.*0\.5000 is pruned already"):
        layer_rates(np.ones(2), np.array([5, 5]), 0.3, np.array([0.5, 0.5]))


def test_the_schedule_is_cubic_and_ends_exactly() -> None:
    found = [cubic_rate(0.7, round_, 4) for round_ in range(1, 5)]
    assert found == pytest.approx([0.7 * (1 - (3 / 4) ** 3), 0.7 * (1 - 1 / 8), 0.7 * (1 - 1 / 64), 0.7])
    assert found[-1] == 0.7
