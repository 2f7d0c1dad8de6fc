"""Errors of estimates against exact derivatives, on functions and engines whose errors are known."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.engines.precision import (
    differences,
    measure_differences,
    measure_forward_mode,
    perturbation_cosines,
    rademacher,
    relative_error,
)
from permille.engines.torch_engine import ComputeDtype, TorchEngine
from permille.errors import InputError
from permille.zo.estimators import Batch
from tests.unit.engines.tiny import tiny_batch, tiny_package

K = 50


class Cubic:
    """f(w) = sum a w + sum w^3 / 3, times a factor that stands for an engine's fault."""

    k = K

    def __init__(self, factor: float = 1.0) -> None:
        self.a_K = np.linspace(1, 2, K)
        self._factor = factor

    def losses(self, values_VK: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        wide_VK = values_VK.astype(np.float64)
        losses_V: NDArray[np.float64] = self._factor * (wide_VK @ self.a_K + (wide_VK**3).sum(axis=1) / 3)
        return losses_V.astype(np.float32)

    def directional_derivatives(
        self, values_K: NDArray[np.float32], directions_QK: NDArray[np.float32], batch: Batch
    ) -> tuple[float, NDArray[np.float64]]:
        g_K = self._factor * (self.a_K + values_K.astype(np.float64) ** 2)
        return 0.0, directions_QK @ g_K


def test_differences_of_a_cubic_have_its_third_derivative_as_error() -> None:
    values_K, z_QK = np.zeros(K, np.float32), rademacher(32, K, 0)
    engine, batch, epsilon = Cubic(), tiny_batch(), 0.5
    _, exact_Q = engine.directional_derivatives(values_K, z_QK, batch)
    expected_Q = exact_Q + epsilon**2 / 3 * z_QK.sum(axis=1)
    np.testing.assert_allclose(
        differences(engine, values_K, z_QK, batch, epsilon), expected_Q, rtol=1e-5, atol=1e-5
    )
    got = measure_differences(engine, exact_Q, values_K, z_QK, batch, epsilon)
    expected = np.linalg.norm(expected_Q - exact_Q) / np.linalg.norm(exact_Q)
    assert got.relative_error == pytest.approx(expected, rel=1e-3)
    assert (got.epsilon, got.directions) == (0.5, 32)
    assert got.cosine == pytest.approx(1)


def test_an_engine_that_is_a_tenth_off_has_an_error_of_a_tenth() -> None:
    values_K, z_QK, batch = np.ones(K, np.float32), rademacher(33, K, 1), tiny_batch()
    _, exact_Q = Cubic().directional_derivatives(values_K, z_QK, batch)
    got = measure_forward_mode(Cubic(1.1), exact_Q, values_K, z_QK, batch)
    assert got.relative_error == pytest.approx(0.1)
    assert got.epsilon is None


def test_an_estimate_that_is_not_finite_has_no_finite_error() -> None:
    assert not np.isfinite(relative_error(np.array([np.nan, 1]), np.ones(2)))


def test_bfloat16_swallows_what_is_below_half_its_step() -> None:
    z_K = rademacher(1, 1000, 0)[0]
    assert perturbation_cosines(np.ones(1000, np.float32), z_K, 2**-12) == pytest.approx((1, 0))
    # Between 0.5 and 1 bf16 steps by 2^-8: one value in eight is near enough to a middle to be moved.
    spread_K = np.random.default_rng(0).uniform(0.5, 1, 1000).astype(np.float32)
    kept, coarse = perturbation_cosines(spread_K, z_K, 2**-12)
    assert kept > 0.999999
    assert 0.05 < coarse < 0.7


@pytest.mark.parametrize(
    ("queries", "epsilon", "exact"),
    [(31, 0.1, 1.0), (32, 0.0, 1.0), (32, -1.0, 1.0), (32, np.nan, 1.0), (32, 0.1, 0.0), (32, 0.1, np.inf)],
)
def test_measurements_that_say_nothing_are_refused(queries: int, epsilon: float, exact: float) -> None:
    values_K, z_QK = np.zeros(K, np.float32), rademacher(queries, K, 0)
    with pytest.raises(InputError, match="expected"):
        measure_differences(Cubic(), np.full(queries, exact), values_K, z_QK, tiny_batch(), epsilon)


def test_engines_are_ranked_as_their_arithmetic_is(tmp_path: Path) -> None:
    """float32 before bfloat16 before int8 activations, and forward-mode before differences in each."""
    package = tiny_package(tmp_path, "llama", density=0.2).package
    values_K, batch = package.values(), tiny_batch(lengths=(20,) * 6)
    z_QK = rademacher(32, len(values_K), 0)
    _, exact_Q = TorchEngine(package).directional_derivatives(values_K, z_QK, batch)
    epsilon = 0.05 / np.sqrt(len(values_K))
    found = {}
    for dtype in (ComputeDtype.FLOAT32, ComputeDtype.BFLOAT16, ComputeDtype.INT8_ACTIVATIONS):
        engine = TorchEngine(package, compute_dtype=dtype)
        found[dtype] = measure_differences(engine, exact_Q, values_K, z_QK, batch, epsilon).relative_error
        forward = measure_forward_mode(engine, exact_Q, values_K, z_QK, batch).relative_error
        assert forward < 0.2
        if dtype is not ComputeDtype.FLOAT32:
            assert forward < found[dtype]
    assert found[ComputeDtype.FLOAT32] < 0.01
    assert found[ComputeDtype.BFLOAT16] > 0.1
    assert found[ComputeDtype.INT8_ACTIVATIONS] > 0.1
