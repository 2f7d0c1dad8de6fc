"""The parts of a decoder layer backwards: each is the transpose of its tangent in `layers`.

A gradient `d_x` is that of one number, a loss, with respect to x. No gradient of a weight matrix is formed:
of a linear layer only the masked weights get theirs, one sum over the tokens each.

# Legend: M tokens, H width, I width of the feed-forward part, N, K = out and in features, R rows of a tile, C
masked weights of a layer, T tokens of one sequence, A heads, B key-value heads, G = A / B, D numbers of a
head.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from permille.engines.light.layers import AttentionScores, activate, attention_weights, slope, standardized
from permille.engines.light.linear import LightLinear, Tools
from permille.engines.light.model import Norm
from permille.engines.light.threads import blocks
from permille.models.architecture import Activation
from permille.models.descriptions import NormKind

Array = NDArray[np.float32]

# Scores of some heads of one sequence, and products of tokens and masked weights, that exist at a time.
_SCORES = 1 << 20
_PRODUCTS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Heads:
    """Inputs and output of attention, or their gradients: q and out [M, A, D], k and v [M, B, D]."""

    q: Array
    k: Array
    v: Array
    out: Array

    def of(self, rows: slice) -> "Heads":
        """Return the arrays of one sequence."""
        return Heads(q=self.q[rows], k=self.k[rows], v=self.v[rows], out=self.out[rows])


def norm_back(norm: Norm, x_MH: Array, d_out_MH: Array, d_x_MH: Array) -> None:
    """`d_x = r (g - n mean(n g))`, `g = w d_out`, n and r as in `norm_tangent`; `d_x` may be `d_out` or x."""
    scaled_MH, r_M1 = standardized(norm.kind, x_MH, norm.epsilon)
    g_MH = d_out_MH * norm.weight_H
    if norm.kind is NormKind.LAYER:
        g_MH -= g_MH.mean(axis=1, keepdims=True)
    scaled_MH *= np.einsum("mh,mh->m", scaled_MH, g_MH)[:, None] / np.float32(x_MH.shape[1])
    np.subtract(g_MH, scaled_MH, out=d_x_MH)
    d_x_MH *= r_M1


def feed_forward_back(kind: Activation, gate_MI: Array | None, up_MI: Array, d_inner_MI: Array) -> None:
    """Compute the gradients of `a(gate) up`, or `a(up)`, in place of gate and up.

    `d_inner` is overwritten.
    """
    if gate_MI is None:
        np.multiply(slope(kind, up_MI), d_inner_MI, out=up_MI)
        return
    slope_MI = slope(kind, gate_MI)
    slope_MI *= d_inner_MI
    d_inner_MI *= activate(kind, gate_MI)
    np.multiply(slope_MI, up_MI, out=gate_MI)
    np.copyto(up_MI, d_inner_MI)


def attention_back(scores: AttentionScores, heads: Heads, d: Heads) -> None:
    """`d.out` of one sequence to `d.q`, `d.k` and `d.v`, with `P` the weights of the softmax:

    `d_v = P^T d_out`, `d_s = scale slope P (d_out v^T - sum(d_out out))`, `d_q = d_s k`, `d_k = d_s^T q`.
    """
    tokens, kv_heads = heads.k.shape[:2]
    group = heads.q.shape[1] // kv_heads
    d.k[...] = d.v[...] = 0
    for head in range(kv_heads):
        k_TD, v_TD = heads.k[:, head], heads.v[:, head]
        for part in blocks(group, max(1, _SCORES // tokens**2)):
            own = slice(head * group + part.start, head * group + part.stop)
            q_GTD, out_GTD, d_out_GTD = (
                array[:, own].transpose(1, 0, 2) for array in (heads.q, heads.out, d.out)
            )
            weight_GTT, slope_GTT = attention_weights(q_GTD, k_TD, scores)
            d.v[:, head] += np.matmul(weight_GTT.transpose(0, 2, 1), d_out_GTD).sum(axis=0)
            d_s_GTT = np.matmul(d_out_GTD, v_TD.T)
            d_s_GTT -= np.einsum("gtd,gtd->gt", d_out_GTD, out_GTD)[..., None]
            d_s_GTT *= weight_GTT
            if slope_GTT is not None:
                d_s_GTT *= slope_GTT
            d_s_GTT *= np.float32(scores.scale)
            d.q[:, own] = np.matmul(d_s_GTT, k_TD).transpose(1, 0, 2)
            d.k[:, head] += np.matmul(d_s_GTT.transpose(0, 2, 1), q_GTD).sum(axis=0)


def linear_back(tools: Tools, layer: LightLinear, value_K: Array, d_out_MN: Array, d_x_MK: Array) -> None:
    """`d_x += d_out W`: one tile of rows of W after the other, made by all threads, then read by all."""
    pool, value_C = tools.threads, value_K[layer.span]
    parts = blocks(len(d_x_MK), -(-len(d_x_MK) // pool.count))
    for rows in layer.tiles(1):
        height = rows.stop - rows.start
        tile_RK = pool.scratch("weight", height * layer.columns).reshape(height, -1)

        def fill(part: slice, first: int = rows.start, tile_RK: Array = tile_RK) -> None:
            layer.fill(slice(first + part.start, first + part.stop), value_C, tile_RK[part])

        def product(part: slice, rows: slice = rows, tile_RK: Array = tile_RK) -> None:
            tools.blas.add_product(d_out_MN[part, rows], tile_RK, d_x_MK[part])

        pool.each(fill, blocks(height, -(-height // pool.count)))
        pool.each(product, parts)
    if layer.adapter is not None:
        layer.adapter.add_back(tools.blas, d_out_MN, value_K, d_x_MK)


def add_gradient(
    tools: Tools, layer: LightLinear, x_MK: Array, d_out_MN: Array, value_K: Array, gradient_K: Array
) -> None:
    """`gradient[c] += sum over t of d_out[t, row of c] x[t, column of c]`, or that of the adapter."""
    if layer.adapter is not None:
        layer.adapter.add_gradient(tools.threads, x_MK, d_out_MN, value_K, gradient_K)
        return
    gradient_C = gradient_K[layer.span]

    def add(part: slice) -> None:
        row_C, column_C = np.divmod(layer.indices[part], np.uint32(layer.columns))
        # take: half the time of indexing with arrays.
        d_out_MC, x_MC = d_out_MN.take(row_C, axis=1), x_MK.take(column_C, axis=1)
        gradient_C[part] += np.einsum("mc,mc->c", d_out_MC, x_MC)

    tools.threads.each(add, blocks(len(gradient_C), max(1, _PRODUCTS // len(x_MK))))
