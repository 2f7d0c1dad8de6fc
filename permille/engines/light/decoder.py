"""One decoder layer, written once for all that runs through it: variants, tangents, one token of a text.

A `Run` knows what its states are and does the parts; the order of the parts is here. States are [G, M, H]:
groups of variants, or a primal with its tangents. The residual is changed in place.

# Legend: G states, M tokens, H hidden size, A heads, B key-value heads, D numbers of a head.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from permille.engines.light.architecture import Architecture, BlockKind
from permille.engines.light.linear import LightLinear
from permille.engines.light.model import LightLayer, Norm

Array = NDArray[np.float32]


class Run(Protocol):
    """What a decoder layer is made of. Names are those of work memory that `buffer` keeps."""

    def buffer(self, name: str, x_GMK: Array, width: int) -> Array:
        """[G, M, width], G and M those of x; the same memory for the same name."""
        ...

    def norm(self, norm: Norm, x_GMH: Array, out_GMH: Array) -> None:
        """`out` may be x."""
        ...

    def linear(self, layer: LightLinear, x_GMK: Array, out_GMN: Array) -> None:
        """A quantized layer."""
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


def run_layer(run: Run, architecture: Architecture, layer: LightLayer, x_GMH: Array) -> None:
    """The layer's output takes the place of its input."""
    kind = architecture.block
    attended_GMH = _attention(run, architecture, layer, x_GMH)
    if kind is BlockKind.PARALLEL:
        added_GMH = run.buffer("kept", x_GMH, x_GMH.shape[2])
        np.add(attended_GMH, x_GMH, out=added_GMH)
        np.add(_mlp(run, layer, x_GMH), added_GMH, out=x_GMH)
        return
    if layer.norm_attention_out is not None:
        run.norm(layer.norm_attention_out, attended_GMH, attended_GMH)
    x_GMH += attended_GMH
    if kind is BlockKind.POST and layer.norm_attention is not None:
        run.norm(layer.norm_attention, x_GMH, x_GMH)
    moved_GMH = _mlp(run, layer, x_GMH, normed=kind is not BlockKind.POST)
    if layer.norm_mlp_out is not None:
        run.norm(layer.norm_mlp_out, moved_GMH, moved_GMH)
    x_GMH += moved_GMH
    if kind is BlockKind.POST and layer.norm_mlp is not None:
        run.norm(layer.norm_mlp, x_GMH, x_GMH)


def _attention(run: Run, architecture: Architecture, layer: LightLayer, x_GMH: Array) -> Array:
    head, heads, kv_heads = architecture.head, architecture.heads, architecture.kv_heads
    normed_GMH = x_GMH
    if layer.norm_attention is not None and architecture.block is not BlockKind.POST:
        normed_GMH = run.buffer("normed", x_GMH, x_GMH.shape[2])
        run.norm(layer.norm_attention, x_GMH, normed_GMH)
    q, k, v = _query_key_value(run, layer, normed_GMH, heads, kv_heads, head)
    if layer.norm_query is not None and layer.norm_key is not None:
        run.norm(layer.norm_query, q, q)
        run.norm(layer.norm_key, k, k)
    if layer.settings.rope is not None:
        run.rotate(layer, q)
        run.rotate(layer, k)
    # The normed input has been used: attention's output takes its memory where it fits.
    out_GMA = run.buffer("normed", x_GMH, heads * head)
    run.attend(layer, q, k, v, out_GMA.reshape(*out_GMA.shape[:2], heads, head))
    result_GMH = run.buffer("wide", x_GMH, x_GMH.shape[2])
    run.linear(layer.output, out_GMA, result_GMH)
    return result_GMH


def _query_key_value(
    run: Run, layer: LightLayer, x_GMH: Array, heads: int, kv_heads: int, head: int
) -> tuple[Array, Array, Array]:
    """Views [G, M, heads, D]."""
    if layer.fused is not None:
        fused_GMN = run.buffer("wide", x_GMH, 3 * heads * head)
        run.linear(layer.fused, x_GMH, fused_GMN)
        parts = fused_GMN.reshape(*fused_GMN.shape[:2], heads, 3, head)
        return parts[..., 0, :], parts[..., 1, :], parts[..., 2, :]
    found = []
    for name, linear, count in (
        ("wide", layer.query, heads),
        ("key", layer.key, kv_heads),
        ("value", layer.value, kv_heads),
    ):
        if linear is None:
            raise RuntimeError("a decoder layer has neither fused nor separate projections")
        out_GMN = run.buffer(name, x_GMH, count * head)
        run.linear(linear, x_GMH, out_GMN)
        found.append(out_GMN.reshape(*out_GMN.shape[:2], count, head))
    return found[0], found[1], found[2]


def _mlp(run: Run, layer: LightLayer, x_GMH: Array, *, normed: bool = True) -> Array:
    normed_GMH = x_GMH
    if normed and layer.norm_mlp is not None:
        normed_GMH = run.buffer("normed", x_GMH, x_GMH.shape[2])
        run.norm(layer.norm_mlp, x_GMH, normed_GMH)
    inner_GMI = run.buffer("inner", x_GMH, layer.up.rows)
    run.feed_forward(layer.gate, layer.up, normed_GMH, inner_GMI)
    result_GMH = run.buffer("wide", x_GMH, x_GMH.shape[2])
    run.linear(layer.down, inner_GMI, result_GMH)
    return result_GMH
