"""Tests of the parts between the products: kernels against numpy, and numpy against plain formulas."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.engines.light import layers
from permille.engines.light.layers import AttentionScores
from permille.models.architecture import Activation
from permille.models.descriptions import NormKind
from permille.native import layers as native
from permille.native.library import VARIABLE, paths
from tests.unit.engines.tiny import difference

Array = NDArray[np.float32]
RNG = np.random.default_rng(0)


def _random(*shape: int, scale: float = 1.0) -> Array:
    return (scale * RNG.standard_normal(shape)).astype(np.float32)


@pytest.fixture(params=["off", *paths()])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Select each path of the native library on this machine, and numpy without it."""
    monkeypatch.setenv(VARIABLE, request.param)
    return str(request.param)


def _plain_attention(
    q_TAD: Array, k_SBD: Array, v_SBD: Array, scale: float, window: int | None, cap: float | None
) -> NDArray[np.float64]:
    """Return the output of attention by definition, in float64."""
    queries, heads, _ = q_TAD.shape
    keys, kv_heads, _ = k_SBD.shape
    out = np.empty(q_TAD.shape)
    for a in range(heads):
        b = a // (heads // kv_heads)
        for t in range(queries):
            own = keys - queries + t
            seen = [s for s in range(own + 1) if window is None or own - s < window]
            score = np.array([scale * float(q_TAD[t, a].astype(np.float64) @ k_SBD[s, b]) for s in seen])
            if cap is not None:
                score = cap * np.tanh(score / cap)
            weight = np.exp(score - score.max())
            out[t, a] = (weight / weight.sum()) @ v_SBD[seen, b]
    return out


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 37), (2, 5), (7, 7), (19, 19), (5, 33), (64, 64)])
@pytest.mark.parametrize(("window", "cap"), [(None, None), (4, None), (17, 3.0)])
@pytest.mark.parametrize("head", [3, 16, 40])
def test_attention_is_its_definition(
    path: str, queries: int, keys: int, window: int | None, cap: float | None, head: int
) -> None:
    q, k, v = _random(queries, 4, head), _random(keys, 2, head), _random(keys, 2, head)
    out = np.full_like(q, np.nan)
    layers.attention(q, k, v, AttentionScores(0.7, window, cap), out)
    np.testing.assert_allclose(out, _plain_attention(q, k, v, 0.7, window, cap), rtol=2e-5, atol=1e-5)


def test_attention_takes_views_of_a_fused_projection(path: str) -> None:
    fused = _random(9, 4, 3, 8)
    q, k, v = fused[:, :, 0], fused[:, :, 1], fused[:, :, 2]
    out = np.empty((9, 4, 8), np.float32)
    layers.attention(q, k, v, AttentionScores(0.3, None, None), out)
    np.testing.assert_allclose(out, _plain_attention(q, k, v, 0.3, None, None), rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("count", [1, 7, 8, 33])
@pytest.mark.parametrize("kind", Activation)
def test_activations_are_their_formulas(path: str, kind: Activation, count: int) -> None:
    x = np.concatenate([_random(count, scale=4), np.array([0, -80, 80], np.float32)])
    wide = x.astype(np.float64)
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    expected = {
        Activation.RELU: np.maximum(wide, 0),
        Activation.SILU: wide / (1 + np.exp(-wide)),
        Activation.GELU: np.array([v / 2 * (1 + math.erf(v / math.sqrt(2))) for v in wide]),
        Activation.GELU_TANH: wide / 2 * (1 + np.tanh(inner)),
    }[kind]
    np.testing.assert_allclose(layers.activate(kind, x.copy()), expected, rtol=2e-6, atol=2e-6)


def test_what_is_not_a_number_stays_so(path: str) -> None:
    for kind in (Activation.SILU, Activation.GELU_TANH):
        assert np.isnan(layers.activate(kind, np.full(9, np.nan, np.float32))).all()
    q = _random(5, 2, 8)
    k = q.copy()
    k[1] = np.nan
    out = np.empty_like(q)
    with np.errstate(invalid="ignore"):
        layers.attention(q, k, q, AttentionScores(1.0, None, None), out)
    # Attention is causal, so the first query does not see the second key.
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1:]).all()


@pytest.mark.parametrize("width", [5, 8, 67])
@pytest.mark.parametrize("kind", NormKind)
def test_norms_are_their_formulas(path: str, kind: NormKind, width: int) -> None:
    x, weight, bias = _random(6, width), _random(width), _random(width)
    layer = kind is NormKind.LAYER
    out = np.empty_like(x)
    layers.norm(kind, x, weight, bias if layer else None, 1e-3, out)
    wide = x.astype(np.float64)
    wide = wide - wide.mean(axis=1, keepdims=True) if layer else wide
    expected = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-3) * weight + (bias if layer else 0)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=1e-5)
    layers.norm(kind, x, weight, bias if layer else None, 1e-3, x)
    np.testing.assert_array_equal(x, out)


def test_rotation_turns_the_first_part_of_each_head(path: str) -> None:
    x = _random(3, 2, 10)
    before = x.astype(np.float64)
    angle = RNG.standard_normal((3, 4))
    layers.rotate(x, np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32))
    pairs = (before[..., :4] + 1j * before[..., 4:8]) * np.exp(1j * angle)[:, None]
    np.testing.assert_allclose(x[..., :4], pairs.real, rtol=0, atol=1e-6)
    np.testing.assert_allclose(x[..., 4:8], pairs.imag, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(x[..., 8:], before[..., 8:])


@pytest.mark.parametrize("columns", [1, 16, 45])
def test_rows_of_bfloat16_are_multiplied_as_they_are_stored(columns: int) -> None:
    stored = (_random(5, columns).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    wide = (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    x, out = _random(columns), np.empty(5, np.float32)
    assert native.product_bf16(x, stored, out) == bool(paths())
    if paths():
        np.testing.assert_allclose(out, wide.astype(np.float64) @ x, rtol=1e-5, atol=1e-6)


def test_a_kernel_leaves_alone_what_it_cannot_take() -> None:
    x = _random(4, 8)
    assert not native.rms_norm(x.T, _random(4), 1e-5, np.empty_like(x.T))
    assert not native.rms_norm(x, np.ones(1, np.float32), 1e-5, np.empty_like(x))
    assert not native.activate("gelu", x)
    assert not native.rotate(x[:, None, ::2], _random(4, 2), _random(4, 2))
    assert not native.attention(
        x[:, None], x[:3, None], x[:3, None], 1.0, None, None, np.empty_like(x[:, None])
    )
    assert not native.product_bf16(x[0], np.zeros((2, 7), np.uint16), np.empty(2, np.float32))


@pytest.mark.parametrize("kind", Activation)
def test_slopes_are_those_of_the_activations(kind: Activation) -> None:
    x = _random(50)
    x = x[np.abs(x) > 0.1]  # ReLU has no derivative at 0

    def value(step: float) -> NDArray[np.float64]:
        return layers.activate(kind, (x + step).astype(np.float32)).astype(np.float64)

    np.testing.assert_allclose(layers.slope(kind, x), difference(value), rtol=0, atol=2e-4)


@pytest.mark.parametrize("queries", [1, 5])
def test_a_window_may_be_larger_than_all_integers(path: str, queries: int) -> None:
    q, k, v = _random(queries, 2, 8), _random(9, 1, 8), _random(9, 1, 8)
    out, expected = np.empty_like(q), np.empty_like(q)
    layers.attention(q, k, v, AttentionScores(0.7, 2**70, None), out)
    layers.attention(q, k, v, AttentionScores(0.7, None, None), expected)
    np.testing.assert_array_equal(out, expected)


SMALL = [1e-6, 1e-4, 1e-2, 0.3, 0.62, 0.63, 1.0, 4.0]


@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("x", SMALL)
def test_a_soft_cap_is_precise_for_scores_far_below_it(path: str, x: float, queries: int) -> None:
    """Compare the weight of the key with score 0, `1 / (1 + e^score)`.

    Its relative error is about the absolute error of the score.
    """
    cap = np.float32(5 / x)
    k, v = np.array([[[0.0]], [[1.0]]], np.float32), np.array([[[1.0]], [[0.0]]], np.float32)
    q, out = np.full((queries, 1, 1), 5, np.float32), np.empty((queries, 1, 1), np.float32)
    for sign in (1, -1):
        layers.attention(q * np.float32(sign), k, v, AttentionScores(1.0, None, float(cap)), out)
        score = sign * float(cap) * math.tanh(5 / float(cap))
        assert out[-1, 0, 0] == pytest.approx(1 / (1 + math.exp(score)), rel=5e-6)
