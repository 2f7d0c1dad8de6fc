"""Tests of learning a basis from public text."""

from pathlib import Path

import numpy as np
import pytest

from permille.engines.light.engine import LightEngine
from permille.errors import InputError, OperatorError
from permille.package.reader import Package
from permille.training.basis import ROWS, STEPS, USERS, basis_of, learn_basis, pseudo_users
from tests.packages import TINY_LLAMA, tiny_package


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return tiny_package(tmp_path_factory.mktemp("basis"))


ROWS_NT = np.random.default_rng(0).integers(3, TINY_LLAMA["vocab_size"], (40, 12))


def test_pseudo_users_have_rows_of_different_words() -> None:
    rng = np.random.default_rng(0)
    rows_NT = np.concatenate([rng.integers(first, first + 20, (30, 16)) for first in (0, 100, 200)])
    found = list(pseudo_users(rows_NT, 3, 8))
    assert [len(chosen_NT) for chosen_NT in found] == [8, 8, 8]
    assert all(len(np.unique(chosen_NT // 100)) == 1 for chosen_NT in found)


def test_columns_span_the_displacements_with_equal_norms() -> None:
    moved_UK = np.random.default_rng(0).normal(size=(4, 3000)) + 2
    found = basis_of(moved_UK)
    squares = found.squares()
    assert max(squares) < 1.01 * min(squares)
    units_RK = found.columns_RK / np.sqrt(squares)[:, None]
    assert np.linalg.norm(moved_UK - moved_UK @ units_RK.T @ units_RK) < 0.05 * np.linalg.norm(moved_UK)
    assert np.linalg.norm(moved_UK @ units_RK[0]) > 2 * np.linalg.norm(moved_UK @ units_RK[1])


def test_a_stopped_learning_continues_to_the_same_bits(package: Package, tmp_path: Path) -> None:
    engine = LightEngine(package, threads=1)
    whole = learn_basis(engine, package, ROWS_NT)

    def stop(done: int, total: int) -> None:
        assert total == USERS
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learn_basis(engine, package, ROWS_NT, work=tmp_path, progress=stop)
    assert len(list(tmp_path.iterdir())) == 3
    continued = learn_basis(engine, package, ROWS_NT, work=tmp_path)
    np.testing.assert_array_equal(whole.columns_RK, continued.columns_RK)
    assert (whole.reach, whole.length) == (continued.reach, continued.length)
    path = sorted(tmp_path.iterdir())[1]
    data = path.read_bytes()
    path.write_bytes(data[:99] + bytes([data[99] ^ 1]) + data[100:])
    with pytest.raises(OperatorError, match="damaged"):
        learn_basis(engine, package, ROWS_NT, work=tmp_path)


def test_a_folder_serves_several_texts(package: Package, tmp_path: Path) -> None:
    engine, other_NT = LightEngine(package, threads=1), ROWS_NT[::-1]
    learn_basis(engine, package, ROWS_NT, work=tmp_path)
    found = learn_basis(engine, package, other_NT, work=tmp_path)
    np.testing.assert_array_equal(found.columns_RK, learn_basis(engine, package, other_NT).columns_RK)


def test_too_little_text_is_refused(package: Package) -> None:
    engine = LightEngine(package, threads=1)
    with pytest.raises(InputError, match=f"needs {STEPS * ROWS} rows of public text or more, and has 11"):
        learn_basis(engine, package, ROWS_NT[:11])


def test_a_displacement_that_depends_on_others_adds_no_column() -> None:
    """Clusters of a text with many equal rows, or more of them than weights, do."""
    moved_UK = np.random.default_rng(0).normal(size=(4, 3000))
    moved_UK[3] = moved_UK[0] + moved_UK[1]
    assert basis_of(moved_UK).columns_RK.shape == (3, 3000)
    assert basis_of(np.random.default_rng(0).normal(size=(8, 5))).columns_RK.shape == (5, 5)


def test_text_that_moves_along_one_direction_is_refused() -> None:
    with pytest.raises(InputError, match="too few directions"):
        basis_of(np.ones((3, 10)))
