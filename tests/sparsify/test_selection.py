"""Tests of the selection of pruned weights against plain numpy. SparseGPT is compared with exact inverses."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from permille.errors import InputError
from permille_sparsify.plan import Pattern, PruningMethod, PruningPlan
from permille_sparsify.selection import prune_linear, prune_mask
from tests.packages import TINY_LLAMA

_HALF = Pattern(kept=2, of=4)
_ROWS, _COLUMNS = 6, 136  # more columns than a block of SparseGPT


@pytest.fixture(name="weight_NK")
def _weight() -> NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal((_ROWS, _COLUMNS)).astype(np.float32)


@pytest.fixture(name="gram_KK")
def _gram() -> NDArray[np.float32]:
    rng = np.random.default_rng(1)
    alike_DK = rng.standard_normal((400, 40)) @ rng.standard_normal((40, _COLUMNS))
    x_DK = (alike_DK + rng.standard_normal((400, _COLUMNS))) * np.linspace(0.2, 3, _COLUMNS)
    return (x_DK.T @ x_DK).astype(np.float32)


def test_wanda_takes_the_smallest_products_of_each_row(
    weight_NK: NDArray[np.float32], gram_KK: NDArray[np.float32]
) -> None:
    found = _pruned(weight_NK, gram_KK, PruningMethod.WANDA, 0.5)
    score = np.abs(weight_NK) * np.sqrt(np.diag(gram_KK))
    for row in range(_ROWS):
        expected = np.zeros(_COLUMNS, bool)
        expected[np.argsort(score[row], kind="stable")[: _COLUMNS // 2]] = True
        assert ((found[row] == 0) == expected).all()
    assert (found[found != 0] == weight_NK[found != 0]).all()


def test_magnitude_takes_the_smallest_of_the_whole_matrix(
    weight_NK: NDArray[np.float32], gram_KK: NDArray[np.float32]
) -> None:
    found = _pruned(weight_NK, gram_KK, PruningMethod.MAGNITUDE, 0.3)
    count = int(weight_NK.size * 0.3)
    assert (found == 0).sum() == count
    assert np.abs(weight_NK[found == 0]).max() < np.abs(weight_NK[found != 0]).min()


@pytest.mark.parametrize("method", PruningMethod)
@pytest.mark.parametrize("pattern", [Pattern(kept=2, of=4), Pattern(kept=4, of=8)])
def test_each_group_keeps_as_many_as_the_pattern_says(
    weight_NK: NDArray[np.float32], gram_KK: NDArray[np.float32], method: PruningMethod, pattern: Pattern
) -> None:
    found = _pruned(weight_NK, gram_KK, method, 0.5, pattern)
    assert ((found.reshape(_ROWS, -1, pattern.of) != 0).sum(axis=2) == pattern.kept).all()


@pytest.mark.parametrize(("rate", "pattern"), [(0.5, None), (0.5, _HALF), (0.3, _HALF)])
def test_sparsegpt_makes_up_for_each_weight_by_the_inverse_of_the_columns_that_are_left(
    weight_NK: NDArray[np.float32], gram_KK: NDArray[np.float32], rate: float, pattern: Pattern | None
) -> None:
    found = _pruned(weight_NK, gram_KK, PruningMethod.SPARSEGPT, rate, pattern)
    hessian = gram_KK.astype(np.float64)
    hessian += 0.01 * np.diag(hessian).mean() * np.eye(_COLUMNS)
    expected = weight_NK.astype(np.float64)
    for j in range(_COLUMNS):
        inverse = np.linalg.inv(hessian[j:, j:])
        error = np.where(found[:, j] == 0, expected[:, j], 0) / inverse[0, 0]
        expected[:, j:] -= np.outer(error, inverse[0])
    np.testing.assert_allclose(found, np.where(found == 0, 0, expected), rtol=2e-3, atol=2e-4)
    assert abs((found == 0).mean() - rate) < 0.01
    assert _loss(weight_NK - found, gram_KK) < 0.7 * _loss(
        weight_NK - _pruned(weight_NK, gram_KK, PruningMethod.WANDA, rate, pattern), gram_KK
    )


@pytest.mark.parametrize("method", PruningMethod)
@pytest.mark.parametrize("pattern", [None, _HALF])
def test_zeros_stay_and_count_first(
    weight_NK: NDArray[np.float32],
    gram_KK: NDArray[np.float32],
    method: PruningMethod,
    pattern: Pattern | None,
) -> None:
    first = _pruned(weight_NK, gram_KK, method, 0.3, pattern)
    again = _pruned(first, gram_KK, method, 0.5, pattern)
    assert (again[first == 0] == 0).all()
    assert abs((again == 0).mean() - 0.5) < 0.01
    if pattern is not None:
        assert ((first.reshape(_ROWS, -1, 4) == 0).sum(axis=2) <= 2).all()
    assert (_pruned(again, gram_KK, method, 0.5, pattern) == again).all()


def test_ties_go_to_the_lower_index() -> None:
    score = torch.ones(2, 8)
    zeros = torch.zeros(2, 8, dtype=torch.bool)
    assert prune_mask(score, zeros, 2, None, per_row=True).nonzero()[:, 1].tolist() == [0, 1, 0, 1]
    assert prune_mask(score, zeros, 4, None, per_row=False).nonzero()[:, 0].tolist() == [0, 0, 0, 0]


def test_an_input_that_never_came_is_pruned_first(weight_NK: NDArray[np.float32]) -> None:
    gram = np.diag(np.where(np.arange(_COLUMNS) % 4 == 0, 0, 1)).astype(np.float32)
    for method in (PruningMethod.WANDA, PruningMethod.SPARSEGPT):
        assert (_pruned(weight_NK, gram, method, 0.25)[:, ::4] == 0).all()


@pytest.mark.parametrize(
    ("rates", "pattern", "message"),
    [
        (1.0, None, "The rate must be at least 0 and below 1, not 1.0"),
        ({0: 0.5, 1: 1.0}, None, "in layer 1 must be at least 0 and below 1, not 1.0"),
        (-0.1, None, "at least 0 and below 1, not -0.1"),
        (float("nan"), None, "below 1, not nan"),
        (0.0, None, "nothing would be removed"),
        ({0: 0.5}, None, "2 decoder layers, and the plan has rates for 1"),
        (0.6, "2:4", "at most 0.5 with 2:4"),
        (0.5, "12:24", "groups of 24 do not divide its rows of 32"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(
    rates: float | dict[int, float], pattern: str | None, message: str
) -> None:
    plan = PruningPlan(
        method=PruningMethod.WANDA, rates=rates, pattern=None if pattern is None else Pattern.parse(pattern)
    )
    with pytest.raises(InputError, match=message):
        plan.check(TINY_LLAMA)


@pytest.mark.parametrize("text", ["4:2", "4:4", "0:4", "2/4", "", "2:64", "-1:4"])
def test_a_pattern_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="numbers such as 2:4"):
        Pattern.parse(text)


def _pruned(
    weight_NK: NDArray[np.float32],
    gram_KK: NDArray[np.float32],
    method: PruningMethod,
    rate: float,
    pattern: Pattern | None = None,
) -> NDArray[np.float32]:
    given = torch.from_numpy(weight_NK.copy()), torch.from_numpy(gram_KK.copy())
    found: NDArray[np.float32] = prune_linear(*given, method, rate, pattern).numpy()
    return found


def _loss(change_NK: NDArray[np.float32], gram_KK: NDArray[np.float32]) -> float:
    return float(np.einsum("nk,kl,nl->", change_NK, gram_KK, change_NK))
