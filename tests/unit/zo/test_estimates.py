"""Each estimator: its variants, its arithmetic, and that its mean is the gradient of a quadratic."""

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.errors import InputError
from permille.zo.estimators import Batch, estimate, one_sided, split
from permille.zo.steps import take_step
from permille.zo.header import EstimatorKind, LogHeader
from permille.zo.lattice import perturbed
from permille.zo.records import StepFlag
from permille.zo.estimators import directions_of
from tests.unit.zo.logs import BATCH, QuadraticEngine, kind_fields, layered_fields, make_header, make_layers

COUNTS = (12, 0, 8)
K = sum(COUNTS)
RNG = np.random.default_rng(8)
W_BASE = RNG.normal(0, 1, K).astype(np.float32)
TARGET = RNG.normal(0, 1, K).astype(np.float32)
CURVATURE = RNG.uniform(0.5, 2, K).astype(np.float32)
GRADIENT = CURVATURE.astype(np.float64) * (W_BASE.astype(np.float64) - TARGET)
ZERO = np.zeros(K, dtype=np.int64)
LAYERS = make_layers(K, rank=5)


class Recorder(QuadraticEngine):
    """Keeps the values that it was asked about."""

    def losses(self, values_VK: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        self.asked_VK = values_VK.copy()
        return super().losses(values_VK, batch)


def kind_header(kind: EstimatorKind, **changes: Any) -> LogHeader:
    fields = {"queries": 4, "epsilon": 1e-2, "counts": COUNTS} | kind_fields(kind, lower=2, upper=8)
    return make_header(**(fields | changes))


def mean_step(header: LogHeader, steps: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and standard error of the estimated gradient at the base, over steps, [k] each."""
    engine = QuadraticEngine(TARGET, CURVATURE)
    found_TK = np.zeros((steps, K))
    for step in range(steps):
        _, g_Q = estimate(engine, BATCH, header, W_BASE, ZERO, step, LAYERS)
        z_QK = directions_of(header, step, LAYERS) / header.sigma_at(step)
        for queries, _ in header.blocks():
            found_TK[step] += g_Q[queries] @ z_QK[queries] / (queries.stop - queries.start)
    return found_TK.mean(axis=0), found_TK.std(axis=0) / math.sqrt(steps)


@pytest.mark.parametrize("kind", EstimatorKind)
def test_the_mean_of_plain_estimates_is_the_gradient(kind: EstimatorKind) -> None:
    mean_K, error_K = mean_step(kind_header(kind, total_steps=1200), 1200)
    assert np.abs((mean_K - GRADIENT) / error_K).max() < 4.5
    assert np.abs(mean_K - GRADIENT).max() < 0.5 * np.abs(GRADIENT).max()


def test_one_sided_differences_are_unbiased_with_as_few_as_two_queries() -> None:
    mean_K, _ = mean_step(kind_header(EstimatorKind.ONE_SIDED, queries=2, total_steps=2500), 2500)
    # Without the factor q / (q - 1) this slope would be a half
    assert mean_K @ GRADIENT / (GRADIENT @ GRADIENT) == pytest.approx(1.0, abs=0.08)


@pytest.mark.parametrize("kind", EstimatorKind)
def test_the_mean_of_scaled_estimates_is_the_scaled_gradient(kind: EstimatorKind) -> None:
    exponents = layered_fields(LAYERS)["exponents"]
    header = kind_header(kind, exponents=exponents, total_steps=1000, epsilon=1e-3)
    assert LAYERS.exponents is not None
    scale_K = 4.0**LAYERS.exponents.e_K
    mean_K, error_K = mean_step(header, 1000)
    assert np.abs((mean_K - GRADIENT * scale_K / scale_K.mean()) / error_K).max() < 4.5


@pytest.mark.parametrize("kind", EstimatorKind)
def test_the_mean_of_learned_estimates_is_the_gradient_in_the_basis(kind: EstimatorKind) -> None:
    fields = layered_fields(LAYERS, basis_steps=1000, epsilon=1e-3)
    header = kind_header(kind, basis=fields["basis"], total_steps=1000)
    assert LAYERS.basis is not None
    u_KR = LAYERS.basis.u_KR.astype(np.float64) / header.sigma_at(0)
    mean_K, error_K = mean_step(header, 1000)
    expected_K = np.zeros(K)
    for _, tensors in header.blocks():
        rows = header.weights_of(tensors)
        expected_K[rows] = u_KR[rows] @ (u_KR[rows].T @ GRADIENT[rows])
    assert np.abs((mean_K - expected_K) / error_K).max() < 4.5


def test_one_sided_asks_for_one_variant_of_each_query() -> None:
    engine = Recorder(TARGET, CURVATURE)
    header = kind_header(EstimatorKind.ONE_SIDED, queries=5)
    take_step(engine, BATCH, header, W_BASE, ZERO, 3, clip=None)
    z_QK = directions_of(header, 3)
    assert engine.calls == [5]
    for variant_K, z_K in zip(engine.asked_VK, z_QK, strict=True):
        assert np.array_equal(variant_K, perturbed(W_BASE, ZERO, -20, z_K, 1e-2))


def test_a_loss_that_all_directions_share_does_not_move_a_one_sided_step() -> None:
    class Lifted(QuadraticEngine):
        def losses(self, values_VK: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
            return super().losses(values_VK, batch) + np.float32(64)

    header = kind_header(EstimatorKind.ONE_SIDED)
    mean, plain_Q = one_sided(QuadraticEngine(TARGET, CURVATURE), BATCH, header, W_BASE, ZERO, 0)
    lifted, same_Q = one_sided(Lifted(TARGET, CURVATURE), BATCH, header, W_BASE, ZERO, 0)
    assert same_Q == pytest.approx(plain_Q, abs=1e-2)
    assert lifted == pytest.approx(mean + 64)


def test_even_curvature_cancels_in_one_sided_differences() -> None:
    engine = QuadraticEngine(TARGET, np.full(K, 1.5, dtype=np.float32))
    header = kind_header(EstimatorKind.ONE_SIDED, epsilon=0.5)
    _, g_Q = one_sided(engine, BATCH, header, W_BASE, ZERO, 0)
    slopes_Q = directions_of(header, 0) @ (1.5 * (W_BASE.astype(np.float64) - TARGET))
    assert g_Q == pytest.approx((slopes_Q - slopes_Q.mean()) * 4 / 3, rel=1e-4, abs=1e-4)


def test_split_asks_for_groups_that_agree_in_the_lower_block() -> None:
    engine = Recorder(TARGET, CURVATURE)
    header = kind_header(EstimatorKind.SPLIT)
    take_step(engine, BATCH, header, W_BASE, ZERO, 1, clip=None)
    assert engine.calls == [16]
    z_QK = directions_of(header, 1)
    lower, upper = slice(0, 12), slice(12, 20)
    for variant, values_K in enumerate(engine.asked_VK):
        sign = 1 if variant // 4 % 2 == 0 else -1
        assert np.array_equal(
            values_K[lower], perturbed(W_BASE, ZERO, -20, sign * z_QK[variant // 8], 1e-2)[lower]
        )
        sign = 1 if variant % 2 == 0 else -1
        assert np.array_equal(
            values_K[upper], perturbed(W_BASE, ZERO, -20, sign * z_QK[2 + variant // 2], 1e-2)[upper]
        )
    assert len({values_K[lower].tobytes() for values_K in engine.asked_VK}) == 4


def test_split_takes_equations_6_and_8_with_a_scalar_for_each_direction() -> None:
    class Numbered(QuadraticEngine):
        def losses(self, values_VK: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
            return np.array([1, 2, 4, 8, 16, 32, 64, 128], dtype=np.float32)

    header = kind_header(
        EstimatorKind.SPLIT, **kind_fields(EstimatorKind.SPLIT, lower=1, upper=4), epsilon=0.5
    )
    loss, g_Q = split(Numbered(TARGET, CURVATURE), BATCH, header, W_BASE, ZERO, 0)
    # Lower: (mean of the first four - mean of the last four) / (2 * 0.5); upper: differences of pairs
    assert g_Q.tolist() == [3.75 - 60.0, 1 - 2, 4 - 8, 16 - 32, 64 - 128]
    assert loss == 255 / 8


def test_the_step_of_a_block_is_the_mean_over_its_own_directions() -> None:
    class Numbered(QuadraticEngine):
        def losses(self, values_VK: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
            return np.array([1, 2, 4, 8, 16, 32, 64, 128], dtype=np.float32)

    header = kind_header(
        EstimatorKind.SPLIT,
        **kind_fields(EstimatorKind.SPLIT, lower=1, upper=4),
        epsilon=0.5,
        learning_rate=1.0,
        step_unit_exponent=-4,
    )
    record = take_step(Numbered(TARGET, CURVATURE), BATCH, header, W_BASE, ZERO, 0, clip=None)
    assert record.coefficients == (900, 4, 16, 64, 256)
    assert record.flags is StepFlag.NONE


def test_a_learned_step_has_its_own_epsilon_and_learning_rate() -> None:
    fields = layered_fields(LAYERS, basis_steps=1, epsilon=1e-4, learning_rate=0.2)
    header = kind_header(EstimatorKind.SPSA, basis=fields["basis"], learning_rate=0.1, queries=1)
    engine = Recorder(TARGET, CURVATURE)
    take_step(engine, BATCH, header, W_BASE, ZERO, 0, clip=None, layers=LAYERS)
    moved_K = (engine.asked_VK[0].astype(np.float64) - W_BASE) / directions_of(header, 0, LAYERS)[0]
    assert np.median(moved_K) == pytest.approx(1e-4 / header.sigma_at(0), rel=1e-2)
    take_step(engine, BATCH, header, W_BASE, ZERO, 1, clip=None, layers=LAYERS)
    assert np.abs(engine.asked_VK[0] - W_BASE) == pytest.approx(np.full(K, 1e-2), rel=1e-3)


@pytest.mark.parametrize("kind", [EstimatorKind.ONE_SIDED, EstimatorKind.SPLIT])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_loss_that_is_not_finite_rejects_the_whole_step(kind: EstimatorKind, bad: float) -> None:
    class Broken(QuadraticEngine):
        def losses(self, values_VK: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
            found_V = super().losses(values_VK, batch)
            found_V[-1] = bad
            return found_V

    header = kind_header(kind)
    record = take_step(Broken(TARGET, CURVATURE), BATCH, header, W_BASE, ZERO, 0, clip=100.0)
    assert record.flags is StepFlag.REJECTED
    assert record.coefficients == (0,) * header.queries


def test_a_split_estimate_without_blocks_is_an_error() -> None:
    with pytest.raises(InputError, match="two blocks"):
        split(QuadraticEngine(TARGET, CURVATURE), BATCH, kind_header(EstimatorKind.SPSA), W_BASE, ZERO, 0)
