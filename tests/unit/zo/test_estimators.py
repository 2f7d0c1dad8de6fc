"""Tests of each estimator: its variants, its arithmetic, and a mean equal to a quadratic's gradient."""

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.choices import EstimatorKind
from permille.zo.estimators import Batch, Descent, directions_of, estimate
from permille.zo.lattice import perturbed
from tests.unit.zo.logs import (
    BATCH,
    ESTIMATES,
    FixedEngine,
    QuadraticEngine,
    kind_fields,
    make_header,
)

COUNTS = (12, 0, 8)
K = sum(COUNTS)
RNG = np.random.default_rng(8)
W_BASE = RNG.normal(0, 1, K).astype(np.float32)
TARGET = RNG.normal(0, 1, K).astype(np.float32)
CURVATURE = RNG.uniform(0.5, 2, K).astype(np.float32)
GRADIENT = CURVATURE.astype(np.float64) * (W_BASE.astype(np.float64) - TARGET)
ZERO = np.zeros(K, dtype=np.int64)
POWERS = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0]


def kind_descent(kind: EstimatorKind, **changes: Any) -> Descent:
    fields = {"queries": 4, "epsilon": 1e-2, "counts": COUNTS} | kind_fields(kind, lower=2, upper=8)
    return Descent(header=make_header(**(fields | changes)), w_base_K=W_BASE)


def quadratic() -> QuadraticEngine:
    return QuadraticEngine(TARGET, CURVATURE)


def mean_step(descent: Descent, steps: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return mean and standard error of the estimated gradient at the base over steps, [k] each."""
    header = descent.header
    found_TK = np.zeros((steps, K))
    for step in range(steps):
        _, g_Q = estimate(quadratic(), BATCH, descent, ZERO, step)
        z_QK = directions_of(header, step) / header.sigma
        for queries, _ in header.blocks():
            found_TK[step] += g_Q[queries] @ z_QK[queries] / (queries.stop - queries.start)
    return found_TK.mean(axis=0), found_TK.std(axis=0) / math.sqrt(steps)


@pytest.mark.parametrize("kind", ESTIMATES)
def test_the_mean_of_estimates_is_the_gradient(kind: EstimatorKind) -> None:
    mean_K, error_K = mean_step(kind_descent(kind, total_steps=1200), 1200)
    assert np.abs((mean_K - GRADIENT) / error_K).max() < 4.5
    assert np.abs(mean_K - GRADIENT).max() < 0.5 * np.abs(GRADIENT).max()


def test_one_sided_differences_are_unbiased_with_as_few_as_two_queries() -> None:
    mean_K, _ = mean_step(kind_descent(EstimatorKind.ONE_SIDED, queries=2, total_steps=2500), 2500)
    # Without the factor q / (q - 1), this slope would be one half.
    assert mean_K @ GRADIENT / (GRADIENT @ GRADIENT) == pytest.approx(1.0, abs=0.08)


def test_spsa_and_forward_mode_give_the_gradient_along_z_over_sigma() -> None:
    spsa = kind_descent(EstimatorKind.SPSA)
    _, by_spsa = estimate(quadratic(), BATCH, spsa, ZERO, 7)
    loss, by_forward = estimate(quadratic(), BATCH, kind_descent(EstimatorKind.FORWARD), ZERO, 7)
    expected = directions_of(spsa.header, 7) @ GRADIENT / spsa.header.sigma
    assert by_forward == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert by_spsa == pytest.approx(expected, rel=2e-2, abs=2e-2)
    assert loss == pytest.approx(float(quadratic().losses(W_BASE[None], BATCH)[0]))


@pytest.mark.parametrize(("kind", "signs"), [(EstimatorKind.SPSA, (1, -1)), (EstimatorKind.ONE_SIDED, (1,))])
def test_all_queries_are_asked_for_in_one_call(kind: EstimatorKind, signs: tuple[int, ...]) -> None:
    engine, descent = quadratic(), kind_descent(kind, queries=5)
    estimate(engine, BATCH, descent, ZERO, 3)
    z_QK = directions_of(descent.header, 3)
    expected = [perturbed(W_BASE, ZERO, -20, z_K, sign * 1e-2) for z_K in z_QK for sign in signs]
    assert np.array_equal(engine.asked_VK, expected)


def test_a_loss_that_all_directions_share_does_not_move_a_one_sided_step() -> None:
    class Lifted(QuadraticEngine):
        def losses(self, values_VK: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
            return super().losses(values_VK, batch) + np.float32(64)

    descent = kind_descent(EstimatorKind.ONE_SIDED)
    mean, plain_Q = estimate(quadratic(), BATCH, descent, ZERO, 0)
    lifted, same_Q = estimate(Lifted(TARGET, CURVATURE), BATCH, descent, ZERO, 0)
    assert same_Q == pytest.approx(plain_Q, abs=1e-2)
    assert lifted == pytest.approx(mean + 64)


def test_even_curvature_cancels_in_one_sided_differences() -> None:
    engine = QuadraticEngine(TARGET, np.full(K, 1.5, dtype=np.float32))
    descent = kind_descent(EstimatorKind.ONE_SIDED, epsilon=0.5)
    _, g_Q = estimate(engine, BATCH, descent, ZERO, 0)
    slopes_Q = directions_of(descent.header, 0) @ (1.5 * (W_BASE.astype(np.float64) - TARGET))
    # With q = 4 queries, the factor q / (q - 1) is 4 / 3.
    assert g_Q == pytest.approx((slopes_Q - slopes_Q.mean()) * 4 / 3, rel=1e-4, abs=1e-4)


def test_split_asks_for_groups_that_agree_in_the_lower_block() -> None:
    engine, descent = quadratic(), kind_descent(EstimatorKind.SPLIT)
    estimate(engine, BATCH, descent, ZERO, 1)
    assert len(engine.asked_VK) == 16
    z_QK = directions_of(descent.header, 1)
    lower, upper = slice(0, 12), slice(12, 20)
    for variant, values_K in enumerate(engine.asked_VK):
        for part, size, query in ((lower, 4, variant // 8), (upper, 1, 2 + variant // 2)):
            sign = 1 if variant // size % 2 == 0 else -1
            expected_K = perturbed(W_BASE, ZERO, -20, sign * z_QK[query], 1e-2)
            assert np.array_equal(values_K[part], expected_K[part])
    assert len({values_K[lower].tobytes() for values_K in engine.asked_VK}) == 4


def test_split_takes_equations_6_and_8_with_a_scalar_for_each_direction() -> None:
    fields = kind_fields(EstimatorKind.SPLIT, lower=1, upper=4)
    loss, g_Q = estimate(
        FixedEngine(POWERS, k=K), BATCH, kind_descent(EstimatorKind.SPLIT, **fields, epsilon=0.5), ZERO, 0
    )
    # Lower: (mean of the first four - mean of the last four) / (2 * 0.5). Upper: differences of pairs.
    assert g_Q.tolist() == [3.75 - 60.0, 1 - 2, 4 - 8, 16 - 32, 64 - 128]
    assert loss == 255 / 8


def test_a_one_sided_step_holds_its_variants_once() -> None:
    queries, k = 16, 100_000
    header = make_header(**kind_fields(EstimatorKind.ONE_SIDED), queries=queries, counts=(k,))
    descent = Descent(header=header, w_base_K=np.zeros(k, np.float32))
    tracemalloc.start()
    try:
        estimate(FixedEngine([1.0] * queries), BATCH, descent, np.zeros(k, np.int64), 0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    variants = queries * k * np.dtype(np.float32).itemsize
    assert variants < peak < 1.6 * variants
