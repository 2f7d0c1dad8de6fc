"""Weighted k-means of rows: against the exact solution, and what a code book promises."""

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.errors import InputError
from permille_lab.evaluate.codebooks import CELLS, CENTROIDS, row_codebooks


def rows(seed: int = 0, shape: tuple[int, int] = (6, 60)) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=shape).astype(np.float32), rng.chisquare(1, shape).astype(np.float32)


def smallest_error(w_K: NDArray[np.float32], fisher_K: NDArray[np.float32]) -> float:
    """Of any 16 clusters: on a line they are ranges, and the best ends follow by dynamic programming."""
    order = np.argsort(w_K)
    w, share = w_K[order].astype(np.float64), fisher_K[order].astype(np.float64)
    count = len(w)
    cost = np.full((count + 1, count + 1), np.inf)
    for first in range(count):
        shares, sums, squares = (np.cumsum(share[first:] * w[first:] ** power) for power in range(3))
        cost[first, first + 1 :] = squares - sums**2 / shares
    best = np.full(count + 1, np.inf)
    best[0] = 0
    for _ in range(CENTROIDS):
        best = (best[:, None] + cost).min(axis=0)
    return float(best[-1])


@pytest.mark.parametrize("columns", [60, CELLS, 500])
def test_the_error_is_the_smallest_there_is(columns: int) -> None:
    w_NK, fisher_NK = rows(0, (6, columns))
    decoded_NK = row_codebooks(w_NK, fisher_NK, name="w").decoded()
    error_N = (fisher_NK * (w_NK - decoded_NK) ** 2).sum(axis=1)
    smallest_N = np.array([smallest_error(*row) for row in zip(w_NK, fisher_NK, strict=True)])
    # Centroids are rounded to float16; rows with more weights than cells may miss the optimum a little.
    np.testing.assert_allclose(error_N, smallest_N, rtol=1e-4 if columns <= CELLS else 5e-3)


def test_more_rows_than_are_solved_at_once_do_not_mix() -> None:
    w_NK, fisher_NK = rows(8, (70, 40))
    whole = row_codebooks(w_NK, fisher_NK, name="w").decoded()
    np.testing.assert_array_equal(whole[66:], row_codebooks(w_NK[66:], fisher_NK[66:], name="w").decoded())


def test_every_weight_has_its_nearest_centroid() -> None:
    w_NK, fisher_NK = rows(1, (4, 200))
    found = row_codebooks(w_NK, fisher_NK, name="w")
    distance_NKC = np.abs(w_NK[..., None] - found.centroids_NC.astype(np.float32)[:, None, :])
    chosen_NK = np.take_along_axis(distance_NKC, found.codes_NK[..., None].astype(int), axis=2)[..., 0]
    np.testing.assert_allclose(chosen_NK, distance_NKC.min(axis=2), atol=1e-7)
    assert (np.diff(found.centroids_NC.astype(np.float32), axis=1) >= 0).all()
    assert found.codes_NK.max() < CENTROIDS


def test_a_row_of_few_values_is_kept_as_it_is() -> None:
    rng = np.random.default_rng(2)
    values = np.array([-2.0, -0.5, 0.0, 0.25, 1.0, 3.0], np.float32)
    w_NK = rng.choice(values, (3, 90))
    decoded_NK = row_codebooks(w_NK, rows(2, (3, 90))[1], name="w").decoded()
    np.testing.assert_array_equal(decoded_NK, w_NK)


def test_weights_that_matter_are_kept_best() -> None:
    w_NK, fisher_NK = rows(3, (5, 300))
    matters = np.random.default_rng(4).choice(300, 12, replace=False)
    fisher_NK[:, matters] *= 1e4
    error_NK = np.abs(row_codebooks(w_NK, fisher_NK, name="w").decoded() - w_NK)
    even_NK = np.abs(row_codebooks(w_NK, np.ones_like(w_NK), name="w").decoded() - w_NK)
    assert error_NK[:, matters].mean() < 0.3 * even_NK[:, matters].mean()


def test_a_row_without_gradients_is_weighed_evenly() -> None:
    w_NK, fisher_NK = rows(5)
    fisher_NK[2] = 0
    evenly = row_codebooks(w_NK, np.ones_like(w_NK), name="w").decoded()
    np.testing.assert_array_equal(row_codebooks(w_NK, fisher_NK, name="w").decoded()[2], evenly[2])


def test_the_order_of_columns_does_not_matter() -> None:
    w_NK, fisher_NK = rows(6)
    order = np.random.default_rng(7).permutation(w_NK.shape[1])
    straight = row_codebooks(w_NK, fisher_NK, name="w").decoded()
    mixed = row_codebooks(w_NK[:, order], fisher_NK[:, order], name="w").decoded()
    np.testing.assert_array_equal(mixed, straight[:, order])


def test_rows_shorter_than_the_code_book_are_kept() -> None:
    w_NK = np.array([[1.0, -2.0, 0.5]], np.float32)
    np.testing.assert_array_equal(row_codebooks(w_NK, np.ones_like(w_NK), name="w").decoded(), w_NK)


@pytest.mark.parametrize(
    ("weight", "fisher", "message"),
    [
        (np.ones((2, 3)), np.ones((3, 2)), "its squared gradients"),
        (np.ones(3), np.ones(3), "a matrix"),
        (np.array([[np.nan, 1.0]]), np.ones((1, 2)), "at most 65504"),
        (np.array([[1e6, 1.0]]), np.ones((1, 2)), "at most 65504"),
        (np.ones((1, 2)), np.array([[np.inf, 1.0]]), "finite and not negative"),
        (np.ones((1, 2)), np.array([[-1.0, 1.0]]), "finite and not negative"),
    ],
)
def test_what_cannot_be_fitted_is_refused(
    weight: NDArray[np.float64], fisher: NDArray[np.float64], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        row_codebooks(weight.astype(np.float32), fisher.astype(np.float32), name="w")
