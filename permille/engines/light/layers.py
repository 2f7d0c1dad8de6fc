"""The pointwise and row-wise parts of a decoder.

numpy computes the cases that the kernels of `permille.native.layers` do not accept. The results are the same
up to rounding. Each function works on some rows and writes to an array of the caller, so threads can divide
the rows among themselves.

# Legend: M tokens, H width, T tokens of one sequence, S tokens that they attend to (the T tokens are the last
of these), A heads, B key-value heads, D numbers of a head, 2 E rotated numbers of a head.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from permille.models.architecture import Activation
from permille.models.descriptions import NormKind
from permille.native import layers as native

Array = NDArray[np.float32]


def norm(
    kind: NormKind, x_MH: Array, weight_H: Array, bias_H: Array | None, epsilon: float, out: Array
) -> None:
    """Set `out = w x / sqrt(mean(x^2) + epsilon)`.

    A LAYER norm first subtracts `mean(x)` from x, and adds a bias at the end.
    """
    if kind is not NormKind.LAYER and native.rms_norm(x_MH, weight_H, epsilon, out):
        return
    scaled_MH, _ = standardized(kind, x_MH, epsilon)
    np.multiply(scaled_MH, weight_H, out=out)
    if bias_H is not None:
        out += bias_H


def standardized(kind: NormKind, x_MH: Array, epsilon: float) -> tuple[Array, Array]:
    """Return `n = x r` and `r = 1 / sqrt(mean(x^2) + epsilon)`.

    For LAYER, `mean(x)` is first subtracted from x.
    """
    if kind is NormKind.LAYER:
        x_MH = x_MH - x_MH.mean(axis=1, keepdims=True)
    mean_M = np.einsum("mh,mh->m", x_MH, x_MH) / np.float32(x_MH.shape[1])
    r_M1 = (1 / np.sqrt(mean_M + np.float32(epsilon)))[:, None]
    return x_MH * r_M1, r_M1


def activate(kind: Activation, x: Array) -> Array:
    """Apply the activation function to each number of x, in place, and return x."""
    if native.activate(kind.value, x):
        return x
    if kind is Activation.RELU:
        return np.maximum(x, 0, out=x)
    if kind is Activation.SILU:
        # For x far below 0, the exponential overflows to infinity. The quotient is then 0, as it should be.
        x /= 1 + np.exp(-x)
        return x
    if kind is Activation.GELU:
        x *= 0.5 * (1 + erf(x * np.float32(math.sqrt(0.5))))
        return x
    x *= np.float32(0.5) * (1 + np.tanh(_tanh_argument(x)))
    return x


def slope(kind: Activation, x: Array) -> Array:
    """Return the derivative of the activation function, pointwise."""
    if kind is Activation.RELU:
        return (x > 0).astype(np.float32)
    found: Array
    if kind is Activation.SILU:
        sigmoid: Array = np.reciprocal(1 + np.exp(-x))
        found = sigmoid * (1 + x * (1 - sigmoid))
        return found
    if kind is Activation.GELU:
        density: Array = np.exp(np.float32(-0.5) * x * x) * np.float32(1 / math.sqrt(2 * math.pi))
        found = np.float32(0.5) * (1 + erf(x * np.float32(math.sqrt(0.5)))) + x * density
        return found
    tanh = np.tanh(_tanh_argument(x))
    inner = np.float32(_ROOT_2_PI) * (1 + np.float32(3 * _CUBIC) * x * x)
    found = 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * inner
    return found


_ROOT_2_PI, _CUBIC = math.sqrt(2 / math.pi), 0.044715
# Abramowitz and Stegun, 7.1.26: |error| at most 1.5e-7.
_ERF_P = 0.3275911
_ERF_A = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def erf(x: Array) -> Array:
    """Compute the error function, with an error of at most 2e-7.

    >>> [round(float(y), 4) for y in erf(np.array([0.0, 1.0], np.float32))]
    [0.0, 0.8427]
    """
    # Compute in float64. In float32, rounding would exceed the error of formula 7.1.26.
    t = 1 / (1 + _ERF_P * np.abs(x).astype(np.float64))
    series = np.zeros_like(t)
    for factor in reversed(_ERF_A):
        series = (series + factor) * t
    value: Array = np.copysign(1 - series * np.exp(-np.square(x, dtype=np.float64)), x).astype(np.float32)
    return value


def _tanh_argument(x: Array) -> Array:
    argument: Array = np.float32(_ROOT_2_PI) * (x + np.float32(_CUBIC) * x * x * x)
    return argument


def rotate(x_MAD: Array, cosine_ME: Array, sine_ME: Array) -> None:
    """Rotate the first 2E numbers of each head, in place."""
    if native.rotate(x_MAD, cosine_ME, sine_ME):
        return
    half = cosine_ME.shape[1]
    cosine, sine = cosine_ME[:, None], sine_ME[:, None]
    first, second = x_MAD[..., :half], x_MAD[..., half : 2 * half]
    # Keep the new first half aside, because the second half still needs the old first half.
    turned = first * cosine - second * sine
    second *= cosine
    second += first * sine
    first[...] = turned


class AttentionScores(NamedTuple):
    """Settings of attention scores `cap tanh(scale q k / cap)`.

    Without a `cap`, the scores are `scale q k`. `window` is the largest number of tokens that a token attends
    to, itself included.
    """

    scale: float
    window: int | None = None
    cap: float | None = None


def attention(q_TAD: Array, k_SBD: Array, v_SBD: Array, scores: AttentionScores, out_TAD: Array) -> None:
    """Compute causal attention of the last T of S tokens. Head a reads key-value head a // (A / B)."""
    if native.attention(q_TAD, k_SBD, v_SBD, *scores, out_TAD):
        return
    group = q_TAD.shape[1] // k_SBD.shape[1]
    for head in range(k_SBD.shape[1]):
        # The query heads that read this key-value head.
        own = slice(head * group, (head + 1) * group)
        weight_GTS, _ = attention_weights(q_TAD[:, own].transpose(1, 0, 2), k_SBD[:, head], scores)
        np.matmul(weight_GTS, v_SBD[:, head], out=out_TAD[:, own].transpose(1, 0, 2))


def attention_weights(q_GTD: Array, k_SD: Array, scores: AttentionScores) -> tuple[Array, Array | None]:
    """Return the softmax of the scores [G, T, S], and the derivative of the soft cap (None without a cap)."""
    scale, window, cap = scores
    score_GTS = np.matmul(q_GTD, k_SD.T)
    score_GTS *= np.float32(scale)
    slope_GTS = None
    if cap is not None:
        score_GTS /= np.float32(cap)
        np.tanh(score_GTS, out=score_GTS)
        slope_GTS = 1 - score_GTS * score_GTS
        score_GTS *= np.float32(cap)
    # exp(-inf) is 0. A token always attends to itself, so no row consists of -inf alone.
    np.copyto(score_GTS, -np.inf, where=~visible(q_GTD.shape[1], len(k_SD), window))
    score_GTS -= score_GTS.max(axis=2, keepdims=True)
    np.exp(score_GTS, out=score_GTS)
    score_GTS /= score_GTS.sum(axis=2, keepdims=True)
    return score_GTS, slope_GTS


def visible(queries: int, keys: int, window: int | None) -> NDArray[np.bool_]:
    """Return which of S tokens each of the last T attends to: itself and earlier tokens, bool [T, S].

    With a `window`, these are the last `window` tokens at most.

    >>> visible(2, 3, 2).astype(int).tolist()
    [[1, 1, 0], [0, 1, 1]]
    """
    behind_TS = np.arange(keys - queries, keys)[:, None] - np.arange(keys)
    seen_TS: NDArray[np.bool_] = behind_TS >= 0
    return seen_TS if window is None else seen_TS & (behind_TS < window)
