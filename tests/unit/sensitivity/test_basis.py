"""A basis holds the directions that gradients share; exponents are powers of two of scores."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.errors import InputError
from permille.sensitivity import basis as module
from permille.sensitivity.basis import captured, learn_basis, whitening


def shared_gradients(
    number: int, k: int = 500, directions: int = 4, noise: float = 0.0, seed: int = 0
) -> NDArray[np.float32]:
    """Gradients in a space of few directions, the same for every `seed`, and noise of their own."""
    space_DK = np.random.default_rng(99).standard_normal((directions, k))
    rng = np.random.default_rng(seed)
    found = rng.standard_normal((number, directions)) @ space_DK + noise * rng.standard_normal((number, k))
    return found.astype(np.float32)


ONES = np.ones(500)


def share_of(basis: NDArray[np.int8], gradients: NDArray[np.float32]) -> float:
    """The share of the first gradient, unscaled."""
    return float(captured(basis, gradients, np.ones(len(basis)))[0])


def test_a_basis_of_some_gradients_holds_others_of_the_same_space() -> None:
    gradients = shared_gradients(12)
    basis = learn_basis(gradients, 4)
    assert (basis.dtype, basis.shape) == (np.dtype(np.int8), (500, 4))
    assert captured(basis, shared_gradients(6, seed=1), whitening(gradients)).min() > 0.999


def test_a_basis_holds_no_more_than_its_share_of_foreign_gradients() -> None:
    foreign = np.random.default_rng(5).standard_normal((200, 500)).astype(np.float32)
    share = captured(learn_basis(shared_gradients(12), 4), foreign, ONES)
    assert abs(share.mean() - 4 / 500) < 3 * share.std() / np.sqrt(200)


def test_columns_are_the_singular_vectors_of_the_gradients_uncentred() -> None:
    gradients = shared_gradients(40, noise=0.3) + np.float32(0.2)
    basis = learn_basis(gradients, 3, power=0).astype(np.float64)
    expected = np.linalg.svd(gradients.astype(np.float64), full_matrices=False)[2][:3].T
    unit = basis / np.linalg.norm(basis, axis=0)
    assert np.abs((unit * expected).sum(axis=0)).min() > 0.999


def test_whitened_columns_are_scaled_before_and_after() -> None:
    spread = 10.0 ** np.random.default_rng(3).uniform(-1, 1, 500)
    gradients = (shared_gradients(40, noise=0.3) * spread).astype(np.float32)
    squares = (gradients.astype(np.float64) ** 2).mean(axis=0)
    scaling = (squares / np.median(squares)).clip(0.1, 1000) ** -0.5
    np.testing.assert_allclose(whitening(gradients), scaling)
    vectors = np.linalg.svd(gradients.astype(np.float64) * scaling, full_matrices=False)[2][:3].T
    expected = vectors * scaling[:, None]
    basis = learn_basis(gradients, 3).astype(np.float64)
    cosines = (
        (basis * expected).sum(axis=0) / np.linalg.norm(basis, axis=0) / np.linalg.norm(expected, axis=0)
    )
    assert np.abs(cosines).min() > 0.99


def test_columns_have_one_length_and_the_largest_number_fills_the_byte() -> None:
    basis = learn_basis(shared_gradients(20, noise=0.5), 8, power=0)
    lengths = np.linalg.norm(basis.astype(np.float64), axis=0)
    assert np.abs(basis.astype(np.int16)).max() == 127
    assert lengths.max() / lengths.min() < 1.02


def test_the_mean_gradient_never_points_against_a_column() -> None:
    gradients = shared_gradients(20, noise=0.5) - np.float32(0.3)
    along = gradients.mean(axis=0, dtype=np.float64) @ learn_basis(gradients, 8).astype(np.float64)
    assert along.min() > -1e-3 * np.abs(along).max()


def test_a_heavy_tail_does_not_round_the_rest_to_nothing() -> None:
    """One weight with three hundred times the others' gradient: without a cut all others would be 0."""
    gradients = np.full((1, 100_000), 3e-3, np.float32)
    gradients[0, 7] = 1.0
    basis = learn_basis(gradients, 1, power=0)
    assert basis[7, 0] == 127 and basis[:7].min() >= 0
    assert share_of(basis, gradients) > share_of(np.eye(1, 100_000, 7, dtype=np.int8).T, gradients)


def test_what_was_learned_does_not_depend_on_blocks_or_on_a_mapped_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradients = shared_gradients(20, noise=0.5)
    whole = learn_basis(gradients, 4)
    share = captured(whole, gradients, whitening(gradients))
    mapped = np.memmap(tmp_path / "gradients", np.float32, "w+", shape=gradients.shape)
    mapped[:] = gradients
    monkeypatch.setattr(module, "_FLOATS", 20 * 37)
    monkeypatch.setattr(module, "_FEWEST_COLUMNS", 1)
    assert np.abs(learn_basis(mapped, 4).astype(np.int16) - whole).max() <= 1
    np.testing.assert_allclose(captured(whole, mapped, whitening(mapped)), share, rtol=1e-9)


def test_memory_does_not_grow_with_the_number_of_gradients(tmp_path: Path) -> None:
    """Of 512 mapped gradients, two blocks of the width that one had would be 512 MiB."""
    number, k = 512, 1 << 16
    gradients = np.memmap(tmp_path / "gradients", np.float32, "w+", shape=(number, k))
    gradients[:, : number + 1] = np.eye(number, number + 1, dtype=np.float32) + 0.01
    tracemalloc.start()
    basis = learn_basis(gradients, 2)
    captured(basis, gradients[:64], np.ones(k))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * number * module.block_columns(number) + 24 * number**2 + 32 * k


def test_a_gradient_of_zero_has_no_share() -> None:
    assert captured(learn_basis(shared_gradients(5), 2), np.zeros((1, 500), np.float32), ONES).tolist() == [
        0.0
    ]


def test_columns_that_repeat_each_other_are_counted_once() -> None:
    gradients = shared_gradients(3)
    basis = learn_basis(gradients, 1)
    twice = captured(np.hstack([basis, basis]), gradients, ONES)
    np.testing.assert_allclose(twice, captured(basis, gradients, ONES))


@pytest.mark.parametrize(("number", "rank"), [(4, 0), (4, 5), (300, 257), (8, 5)])
def test_a_rank_that_the_gradients_do_not_have_is_refused(number: int, rank: int) -> None:
    with pytest.raises(InputError, match="expected"):
        learn_basis(shared_gradients(number, k=300), rank)


def test_gradients_that_are_not_finite_are_refused() -> None:
    gradients = shared_gradients(5)
    gradients[2, 3] = np.nan
    with pytest.raises(InputError, match="finite"):
        learn_basis(gradients, 2)
