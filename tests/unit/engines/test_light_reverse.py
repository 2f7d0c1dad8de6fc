"""Tests of the light engine's reverse pass beyond the conformance suite.

Each backward rule must be the transpose of its forward part: `u . (J v) = v . (J^T u)`. J is the Jacobian
matrix, u and v are random vectors, and `J v` is a central difference. Parts, threads and layers without a
mask must not change the result.
"""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.engines.light import layers, reverse
from permille.engines.light.engine import LightEngine
from permille.engines.light.layers import AttentionScores
from permille.engines.light.model import Norm
from permille.engines.light.reverse import Heads, attention_back, feed_forward_back, norm_back
from permille.engines.torch_engine import TorchEngine
from permille.models.architecture import Activation
from permille.models.descriptions import NormKind
from permille.native.library import VARIABLE
from permille.package.reader import Package
from permille.zo.estimators import Batch
from permille_lab.measuring.random_packages import Shape, random_package
from tests.unit.engines.tiny import difference, peak_bytes, tiny_batch, tiny_package, variants

Array = NDArray[np.float32]
RNG = np.random.default_rng(0)


def _random(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def _dot(a: Array, b: NDArray[np.floating]) -> float:
    return float((a.astype(np.float64) * b).sum())


def _assert_transposed(
    pairs: list[tuple[Array, Array]], u: Array, change: NDArray[np.floating], tolerance: float = 1e-6
) -> None:
    """Check that `u . change` is the sum over the inputs of gradient times change of the input.

    `pairs` contains the gradient and the change of each input.
    """
    scale = float(np.linalg.norm(u) * np.linalg.norm(change))
    assert abs(_dot(u, change) - sum(_dot(*pair) for pair in pairs)) <= tolerance * scale


@pytest.mark.parametrize("kind", NormKind)
@pytest.mark.parametrize(("rows", "width", "weights"), [(1, 7, 7), (5, 16, 16), (3, 33, 1)])
def test_norms_backwards_are_transposed(kind: NormKind, rows: int, width: int, weights: int) -> None:
    norm = Norm(kind=kind, weight_H=_random(weights), bias_H=None, epsilon=1e-3)
    x, v, u = _random(rows, width), _random(rows, width), _random(rows, width)
    d_x = np.empty_like(x)

    def value(step: float) -> NDArray[np.float64]:
        out = np.empty_like(x)
        layers.norm(kind, (x + step * v).astype(np.float32), norm.weight_H, None, norm.epsilon, out)
        return out.astype(np.float64)

    norm_back(norm, x, u, d_x)
    _assert_transposed([(d_x, v)], u, difference(value), 5e-4)
    in_place = u.copy()
    norm_back(norm, x, in_place, in_place)
    np.testing.assert_array_equal(in_place, d_x)


@pytest.mark.parametrize("kind", Activation)
@pytest.mark.parametrize("gated", [True, False])
def test_the_feed_forward_part_backwards_is_transposed(kind: Activation, gated: bool) -> None:
    gate, up, d_gate, d_up, u = (_random(4, 13) for _ in range(5))
    if gated:
        slope, value = layers.slope(kind, gate), layers.activate(kind, gate.copy())
        change = slope * d_gate * up + value * d_up
        feed_forward_back(kind, gate, up, (d_out := u.copy()))
        _assert_transposed([(gate, d_gate), (up, d_up)], u, change)
    else:
        change = layers.slope(kind, up) * d_up
        feed_forward_back(kind, None, up, (d_out := u.copy()))
        _assert_transposed([(up, d_up)], u, change)
    assert d_out.shape == u.shape


@pytest.mark.parametrize("tokens", [1, 2, 19])
@pytest.mark.parametrize(("window", "cap"), [(None, None), (3, None), (4, 0.7)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("scores", [1, 1 << 20])
def test_attention_backwards_is_transposed(
    tokens: int,
    window: int | None,
    cap: float | None,
    kv_heads: int,
    scores: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Process all heads at once, and one at a time."""
    monkeypatch.setattr(reverse, "_SCORES", scores)
    q, k, v = _random(2, tokens, 4, 8), _random(2, tokens, kv_heads, 8), _random(2, tokens, kv_heads, 8)
    u, rule = _random(tokens, 4, 8), AttentionScores(0.6, window, cap)

    def value(step: float) -> NDArray[np.float64]:
        out: Array = np.empty_like(q[0])
        moved_q, moved_k, moved_v = ((x[0] + step * x[1]).astype(np.float32) for x in (q, k, v))
        layers.attention(moved_q, moved_k, moved_v, rule, out)
        return out.astype(np.float64)

    d = Heads(q=np.empty_like(q[0]), k=np.empty_like(k[0]), v=np.empty_like(v[0]), out=u)
    attention_back(rule, Heads(q=q[0], k=k[0], v=v[0], out=value(0.0).astype(np.float32)), d)
    _assert_transposed([(d.q, q[1]), (d.k, k[1]), (d.v, v[1])], u, difference(value), 5e-4)


def _assert_near(got: tuple[float, Array], expected: tuple[float, Array]) -> None:
    """Allow for float32's rounding, because sums run in another order."""
    assert abs(got[0] - expected[0]) <= 1e-6
    np.testing.assert_allclose(got[1], expected[1], rtol=0, atol=3e-6 * np.abs(expected[1]).max())


@pytest.mark.parametrize("family", ["llama", "gemma2", "opt", "gpt_neox"])
def test_parts_threads_and_kernels_change_roundings_alone(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, batch = tiny_package(tmp_path, family).package, tiny_batch()
    values_K = variants(package, 2)[1]
    expected = LightEngine(package, threads=1).gradient(values_K, batch)
    _assert_near(LightEngine(package, threads=1, max_tokens=8).gradient(values_K, batch), expected)
    _assert_near(LightEngine(package, threads=3).gradient(values_K, batch), expected)
    monkeypatch.setattr(reverse, "_PRODUCTS", 1)
    monkeypatch.setattr(reverse, "_PART_BYTES", 0)
    monkeypatch.setattr(reverse, "_FEWEST_TOKENS", 11)
    _assert_near(LightEngine(package, threads=1).gradient(values_K, batch), expected)
    monkeypatch.setenv(VARIABLE, "off")
    _assert_near(LightEngine(package, threads=1).gradient(values_K, batch), expected)


def test_repeated_calls_have_the_same_bits_and_change_no_loss(tmp_path: Path) -> None:
    package, batch = tiny_package(tmp_path, "qwen3").package, tiny_batch()
    engine, values_K = LightEngine(package), package.values()
    losses = engine.losses(values_K[None], batch)
    first = engine.gradient(values_K, batch)
    second = engine.gradient(np.stack([values_K, values_K], axis=1)[:, 0], batch)
    assert first[0] == second[0]
    np.testing.assert_array_equal(first[1], second[1])
    np.testing.assert_array_equal(engine.losses(values_K[None], batch), losses)


def test_layers_below_the_mask_are_not_gone_through(tmp_path: Path) -> None:
    """The reference goes through all layers, and gives the same numbers."""
    shape = Shape(hidden=64, inner=96, layers=4, heads=4, kv_heads=2, vocabulary=96)
    package = random_package(tmp_path, shape, density=0.01, first_layer=2)
    engine, values_K = LightEngine(package), variants(package, 2, scale=0.1)[1]
    batch = tiny_batch(lengths=(2, 12, 5))  # one row has only two tokens
    _, gradient_K = engine.gradient(values_K, batch)
    _, expected_K = TorchEngine(package).gradient(values_K, batch)
    np.testing.assert_allclose(gradient_K, expected_K, rtol=0, atol=1e-5 * np.abs(expected_K).max())


def _peak_bytes(package: Package, batch: Batch) -> int:
    engine, values_K = LightEngine(package, threads=1), package.values()
    return peak_bytes(lambda: engine.gradient(values_K, batch))


def test_nothing_of_a_matrix_is_kept(tmp_path: Path) -> None:
    """A weight of 4 M numbers is 16 MB in float32. A tile of it is 6 MB."""
    shape = Shape(hidden=2048, inner=2048, layers=1, heads=4, kv_heads=4, vocabulary=96)
    assert _peak_bytes(random_package(tmp_path, shape, density=1e-4), tiny_batch()) < 12e6


def test_the_memory_of_many_tokens_is_bounded(tmp_path: Path) -> None:
    """Many tokens are processed in several parts."""
    shape = Shape(hidden=64, inner=96, layers=3, heads=4, kv_heads=2, vocabulary=96)
    package = random_package(tmp_path, shape, density=0.01)
    few, many = (_peak_bytes(package, tiny_batch(lengths=(33,) * rows)) for rows in (32, 128))
    assert many < 1.5 * few
