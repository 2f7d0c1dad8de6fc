"""Forward pass of a decoder layer, shared by variants, tangents and single tokens.

A `Pass` knows what its states are and does the parts; the order of the parts is here. States are [G, M, H]:
groups of variants, or a primal with its tangents. The residual is changed in place.

Three stretches of work memory serve a layer beside the residual. "normed" holds what goes into a part of the
layer and then what comes out of it; "inner" what lies between, in the attention (queries, keys, values) as in
the feed-forward part; "kept" is for the parallel block alone.

# Legend: G states, M tokens, H hidden size, A heads, B key-value heads, D numbers of a head.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from permille.engines.light.linear import LightLinear
from permille.engines.light.model import LightLayer, LightModel, Norm
from permille.models.architecture import Architecture
from permille.models.descriptions import BlockKind

Array = NDArray[np.float32]


class Pass(Protocol):
    """Operations of a decoder layer. Names are those of the work memory in `buffers`."""

    def buffers(self, name: str, x_GMK: Array, *widths: int) -> list[Array]:
        """[G, M, width] for each width, G and M those of x, one after the other: the same memory for the
        same name."""
        ...

    def norm(self, norm: Norm, x_GMH: Array, out_GMH: Array) -> None:
        """`out` may be x."""
        ...

    def linear(self, layers: Sequence[LightLinear], x_GMK: Array, outs: Sequence[Array]) -> None:
        """Quantized layers of the same input, each to its own [G, M, N]."""
        ...

    def feed_forward(self, gate: LightLinear | None, up: LightLinear, x_GMH: Array, out_GMI: Array) -> None:
        """`act(gate x) * (up x)`, or `act(up x)` without a gate."""
        ...

    def rotate(self, layer: LightLayer, x_GMAD: Array) -> None:
        """Rotary positions, in place."""
        ...

    def attend(self, layer: LightLayer, q_GMAD: Array, k_GMBD: Array, v_GMBD: Array, out_GMAD: Array) -> None:
        """Causal attention within each sequence."""
        ...


def run_layer(run: Pass, architecture: Architecture, layer: LightLayer, x_GMH: Array) -> None:
    """The layer's output takes the place of its input."""
    kind = architecture.block
    attended_GMH = _attention(run, architecture, layer, x_GMH)
    if kind is BlockKind.PARALLEL:
        (added_GMH,) = run.buffers("kept", x_GMH, x_GMH.shape[2])
        np.add(attended_GMH, x_GMH, out=added_GMH)
        np.add(_mlp(run, layer, x_GMH), added_GMH, out=x_GMH)
        return
    if layer.norm_attention_out is not None:
        run.norm(layer.norm_attention_out, attended_GMH, attended_GMH)
    scale_residual(architecture, attended_GMH)
    x_GMH += attended_GMH
    if kind is BlockKind.POST and layer.norm_attention is not None:
        run.norm(layer.norm_attention, x_GMH, x_GMH)
    moved_GMH = _mlp(run, layer, x_GMH, normed=kind is not BlockKind.POST)
    if layer.norm_mlp_out is not None:
        run.norm(layer.norm_mlp_out, moved_GMH, moved_GMH)
    scale_residual(architecture, moved_GMH)
    x_GMH += moved_GMH
    if kind is BlockKind.POST and layer.norm_mlp is not None:
        run.norm(layer.norm_mlp, x_GMH, x_GMH)


def scale_residual(architecture: Architecture, added: Array) -> None:
    """Multiply what a part of a layer adds by the family's factor, in place. Linear: tangents alike."""
    if architecture.residual_scale != 1:
        added *= np.float32(architecture.residual_scale)


def norm_heads(run: Pass, norm: Norm, x_GMAD: Array) -> None:
    """Norm each head, in place; or all heads of a token as one, where the norm is as wide."""
    x = x_GMAD.reshape(*x_GMAD.shape[:2], -1, len(norm.weight_H))
    run.norm(norm, x, x)


def finish(run: Pass, model: LightModel, states_GRH: Array) -> Array:
    """Return the input of the head, from the last layer's hidden states, which are overwritten."""
    if model.final_norm is not None:
        run.norm(model.final_norm, states_GRH, states_GRH)
    return states_GRH if model.project_out_EH is None else states_GRH @ model.project_out_EH.T


def _attention(run: Pass, architecture: Architecture, layer: LightLayer, x_GMH: Array) -> Array:
    norm = None if architecture.block is BlockKind.POST else layer.norm_attention
    normed_GMH = _normed(run, norm, x_GMH)
    outs, (q, k, v) = head_buffers(run, "inner", architecture, layer, x_GMH)
    run.linear(layer.projections, normed_GMH, outs)
    if layer.norm_query is not None and layer.norm_key is not None:
        norm_heads(run, layer.norm_query, q)
        norm_heads(run, layer.norm_key, k)
    if layer.settings.rope is not None:
        run.rotate(layer, q)
        run.rotate(layer, k)
    (out_GMA,) = run.buffers("normed", x_GMH, architecture.heads * architecture.head)
    run.attend(layer, q, k, v, out_GMA.reshape(q.shape))
    (result_GMH,) = run.buffers("inner", x_GMH, x_GMH.shape[2])
    run.linear([layer.output], out_GMA, [result_GMH])
    return result_GMH


def head_buffers(
    run: Pass, name: str, architecture: Architecture, layer: LightLayer, x_GMH: Array
) -> tuple[list[Array], tuple[Array, Array, Array]]:
    """Work memory for the outputs of `layer.projections`, and in it q, k and v [G, M, heads, D]."""
    head, heads, kv_heads = architecture.head, architecture.heads, architecture.kv_heads
    if layer.fused is not None:
        (fused_GMN,) = run.buffers(name, x_GMH, 3 * heads * head)
        parts = fused_GMN.reshape(*fused_GMN.shape[:2], heads, 3, head)
        return [fused_GMN], (parts[..., 0, :], parts[..., 1, :], parts[..., 2, :])
    counts = (heads, kv_heads, kv_heads)
    found = run.buffers(name, x_GMH, *(count * head for count in counts))
    q, k, v = (out.reshape(*out.shape[:2], count, head) for out, count in zip(found, counts, strict=True))
    return found, (q, k, v)


def _mlp(run: Pass, layer: LightLayer, x_GMH: Array, *, normed: bool = True) -> Array:
    normed_GMH = _normed(run, layer.norm_mlp if normed else None, x_GMH)
    (inner_GMI,) = run.buffers("inner", x_GMH, layer.up.rows)
    run.feed_forward(layer.gate, layer.up, normed_GMH, inner_GMI)
    (result_GMH,) = run.buffers("normed", x_GMH, x_GMH.shape[2])
    run.linear([layer.down], inner_GMI, [result_GMH])
    return result_GMH


def _normed(run: Pass, norm: Norm | None, x_GMH: Array) -> Array:
    if norm is None:
        return x_GMH
    (normed_GMH,) = run.buffers("normed", x_GMH, x_GMH.shape[2])
    run.norm(norm, x_GMH, normed_GMH)
    return normed_GMH
