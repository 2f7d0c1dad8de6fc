"""Tests of learning a basis from public text."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.engines.light.engine import LightEngine
from permille.errors import InputError, OperatorError
from permille.package.build import write_manifest
from permille.package.reader import Package
from permille.training.adam import Moments
from permille.training.basis import ROWS, STEPS, USERS, basis_of, learn_basis, pseudo_users, train_user
from permille.training.reference import Reference, make_reference
from permille.zo.estimators import Batch
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
    path = tmp_path / "pseudo-user-1.moments"
    data = path.read_bytes()
    path.write_bytes(data[:99] + bytes([data[99] ^ 1]) + data[100:])
    with pytest.raises(OperatorError, match="damaged"):
        learn_basis(engine, package, ROWS_NT, work=tmp_path)


class OpposedEngine:
    """An engine that keeps its calls. The gradient is 1, on pulls -1 for the first half of the weights."""

    def __init__(self, k: int, pulls: Sequence[Batch]) -> None:
        self.calls: list[tuple[NDArray[np.float32], Batch]] = []
        self._half_K = np.where(np.arange(k) < k // 2, np.float32(-1), np.float32(0))
        self._pulls = pulls

    def gradient(self, values_K: NDArray[np.float32], batch: Batch) -> tuple[float, NDArray[np.float32]]:
        """Return the gradient of this batch."""
        self.calls.append((values_K, batch))
        pulls = any(batch is pull for pull in self._pulls)
        return 1.0, self._half_K if pulls else np.ones_like(self._half_K)


def referring(package: Package) -> tuple[Package, Reference]:
    text_NT = np.random.default_rng(1).integers(3, TINY_LLAMA["vocab_size"], (40, 12))
    manifest = make_reference(package, text_NT=text_NT, chat=None, made={})
    made = Package.open(package.blobs, write_manifest(package.blobs, manifest))
    reference = Reference.of(made)
    assert reference is not None
    return made, reference


def test_each_step_of_a_pseudo_user_adds_the_gradient_of_its_pull(package: Package) -> None:
    made, reference = referring(package)
    pulls = [reference.pull(step) for step in range(STEPS)]
    engine = OpposedEngine(made.k, pulls)
    moved_K = train_user(engine, made, ROWS_NT[: STEPS * ROWS], pulls).s_K
    assert not moved_K[: made.k // 2].any(), "the gradients cancel"
    assert (moved_K[made.k // 2 :] < 0).all()
    own, pulled = engine.calls[::2], engine.calls[1::2]
    assert [batch for _, batch in pulled] == pulls
    for (values_K, _), (same_K, _) in zip(own, pulled, strict=True):
        np.testing.assert_array_equal(values_K, same_K)


def test_a_basis_is_learned_with_pulls_that_differ_from_user_to_user(
    package: Package, tmp_path: Path
) -> None:
    made, reference = referring(package)
    engine = LightEngine(made, threads=1)
    learn_basis(engine, made, ROWS_NT, work=tmp_path)
    for user, chosen_NT in enumerate(islice(pseudo_users(ROWS_NT, USERS, STEPS * ROWS), 2)):
        kept = Moments.load(tmp_path / f"pseudo-user-{user}.moments")
        assert kept is not None
        pulls = [reference.pull(user * STEPS + step) for step in range(STEPS)]
        np.testing.assert_array_equal(kept.s_K, train_user(engine, made, chosen_NT, pulls).s_K)
        assert (kept.s_K != train_user(engine, made, chosen_NT).s_K).any()


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
