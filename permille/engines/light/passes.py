"""The forward pass of a decoder: its parts, and their order in a layer.

States are [G, M, H]: groups of variants, each with its values. The residual is changed in place.

A layer uses three buffers beside the residual. "normed" holds first the input of a part of the layer
(attention or feed-forward), and later the output of the heads or of the feed-forward part. "inner" holds
intermediate results: queries, keys and values, or the inner activations of the feed-forward part. "kept" is
used only in parallel blocks, where both parts have the same input.

# Legend: G groups of variants, M tokens, H hidden size, K features, A heads, B key-value heads, D numbers of
a head, C masked weights of a layer.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from permille.engines.key_values import KeyValues
from permille.engines.light import layers as numbers
from permille.engines.light.linear import Inputs, LightLinear, Tools
from permille.engines.light.model import LightLayer, LightModel, Norm
from permille.engines.light.sequences import JoinedSequences
from permille.engines.light.threads import blocks
from permille.models.architecture import Architecture
from permille.models.descriptions import BlockKind
from permille.models.rope import Rope
from permille.native.int8 import padded, quantize_tokens

Array = NDArray[np.float32]

# How many rows a pointwise task covers.
_ROWS = 256


class Workspace:
    """Work memory by name. It is kept between layers and calls."""

    def __init__(self) -> None:
        self._kept: dict[str, Array] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> Array:
        """Return memory of this shape. Its previous content is lost."""
        size = math.prod(shape)
        kept = self._kept.get(name)
        if kept is None or len(kept) < size:
            # Drop the old array first, else both would be resident.
            self._kept.pop(name, None)
            kept = self._kept[name] = np.empty(size, np.float32)
        return kept[:size].reshape(shape)

    def clear(self) -> None:
        """Free all memory."""
        self._kept.clear()


class LossPass:
    """A pass of groups of variants through decoder layers."""

    def __init__(
        self,
        tools: Tools,
        architecture: Architecture,
        workspace: Workspace,
        joined: JoinedSequences,
        after: KeyValues | None = None,
    ) -> None:
        """Prepare a pass. Each sequence continues a text whose keys and values are `after`."""
        self._values_GK = np.empty((0, 0), np.float32)
        self._tools = tools
        self.architecture = architecture
        self._workspace = workspace
        self._joined = joined
        self._after = after
        self._tables: dict[int, tuple[Array, Array]] = {}

    def buffers(self, name: str, x_GMK: Array, *widths: int) -> list[Array]:
        """Return work memory [G, M, width] for each width, one after the other.

        G and M are those of `x_GMK`. The same name gives the same memory.
        """
        states, tokens = x_GMK.shape[:2]
        flat = self._workspace.take(name, (states * tokens * sum(widths),))
        stops = [states * tokens * sum(widths[: index + 1]) for index in range(len(widths))]
        return [
            flat[stop - states * tokens * width : stop].reshape(states, tokens, width)
            for stop, width in zip(stops, widths, strict=True)
        ]

    def rotate(self, layer: LightLayer, x_GMAD: Array) -> None:
        """Rotate queries or keys to their positions, in place. Do nothing for a layer without rotation."""
        rope = layer.settings.rope
        if rope is None:
            return
        cosine_ME, sine_ME = self._rotation(rope)

        def rows(task: tuple[int, slice]) -> None:
            state, part = task
            numbers.rotate(x_GMAD[state, part], cosine_ME[part], sine_ME[part])

        self._each_row(x_GMAD, rows)

    def _rotation(self, rope: Rope) -> tuple[Array, Array]:
        # Layers with the same rotation share a `Rope` object, so its cosines and sines are computed once for
        # all of these layers.
        if id(rope) not in self._tables:
            self._tables[id(rope)] = rope.tables(self._joined.position_M)
        return self._tables[id(rope)]

    def _each_row(self, x: Array, work: Callable[[tuple[int, slice]], None]) -> None:
        tasks = [(state, rows) for state in range(x.shape[0]) for rows in blocks(x.shape[1], _ROWS)]
        self._tools.threads.each(work, tasks)

    def set_values(self, values_GK: Array) -> None:
        """Set the values of each group, [G, K], for the following calls."""
        self._values_GK = values_GK

    def norm(self, norm: Norm, x_GMH: Array, out_GMH: Array) -> None:
        """Normalize each token. `out_GMH` may be `x_GMH`."""

        def rows(task: tuple[int, slice]) -> None:
            state, part = task
            x, out = _flat(x_GMH[state, part]), _flat(out_GMH[state, part])
            numbers.norm(norm.kind, x, norm.weight_H, norm.bias_H, norm.epsilon, out)

        self._each_row(x_GMH, rows)

    def linear(self, layers: Sequence[LightLinear], x_GMK: Array, outs: Sequence[Array]) -> None:
        """Compute quantized layers of the same input, each to its own output [G, M, N]."""
        inputs = self._inputs(x_GMK)
        values = {id(layer): layer.values(self._tools, x_GMK, self._values_GK) for layer in layers}

        def tile(task: tuple[LightLinear, Array, slice]) -> None:
            layer, out_GMN, rows = task
            layer.variants_tile(self._tools, inputs, values[id(layer)], rows, out_GMN)

        threads = self._tools.threads
        # Run the tiles of all layers as one list, so that threads wait for each other only once.
        tasks = [
            (layer, out, rows)
            for layer, out in zip(layers, outs, strict=True)
            for rows in layer.tiles(threads.count)
        ]
        threads.each(tile, tasks)

    def feed_forward(self, gate: LightLinear | None, up: LightLinear, x_GMH: Array, out_GMI: Array) -> None:
        """Compute `act(gate x) * (up x)`, or `act(up x)` without a gate.

        Gate and up are computed tile by tile, so `out_GMI` is the only array of this size.
        """
        tools, kind = self._tools, self.architecture.activation
        inputs, first = self._inputs(x_GMH), up if gate is None else gate
        first_values = first.values(tools, x_GMH, self._values_GK)
        up_values = first_values if gate is None else up.values(tools, x_GMH, self._values_GK)

        def tile(rows: slice) -> None:
            # First write the activated gate of all groups to the result. Then multiply the result by up.
            for group, part_MR in first.products(tools, inputs, first_values, rows, "up"):
                out_GMI[group, :, rows] = numbers.activate(kind, part_MR)
            if gate is None:
                return
            for group, part_MR in up.products(tools, inputs, up_values, rows, "up"):
                out_GMI[group, :, rows] *= part_MR

        tools.threads.each(tile, up.tiles(tools.threads.count))

    def _inputs(self, x_GMK: Array) -> Inputs:
        """Return the inputs of linear layers in the form that `LightLinear.products` takes."""
        if not self._tools.int8:
            return Inputs(x_GMK=x_GMK)
        states, tokens, columns = x_GMK.shape
        wide = padded(columns)
        # One float32 buffer holds the 8-bit inputs of all tokens, and then a scale for each token.
        kept = self._workspace.take("int8", (states * tokens * (wide // 4 + 1),))
        q_GMP = kept[: states * tokens * wide // 4].view(np.uint8).reshape(states, tokens, wide)
        scale_GM = kept[states * tokens * wide // 4 :].reshape(states, tokens)

        def rows(task: tuple[int, slice]) -> None:
            state, part = task
            quantize_tokens(x_GMK[state, part], q_GMP[state, part], scale_GM[state, part])

        self._each_row(x_GMK, rows)
        return Inputs(x_GMK=x_GMK, q_GMP=q_GMP, scale_GM=scale_GM)

    def attend(self, layer: LightLayer, q: Array, k: Array, v: Array, out: Array) -> None:
        """Compute causal attention within each sequence. Arrays are [G, M, heads, D]."""

        def sequence(task: tuple[int, slice]) -> None:
            state, rows = task
            seen = k[state, rows], v[state, rows]
            if self._after is not None:
                before = self._after.layers[layer.number]
                seen = np.concatenate([before[0], seen[0]]), np.concatenate([before[1], seen[1]])
            numbers.attention(q[state, rows], *seen, layer.scores, out[state, rows])

        # Each sequence is a task of its own, because tokens do not attend across sequences.
        tasks = [(state, rows) for state in range(len(q)) for rows in self._joined.sequences]
        self._tools.threads.each(sequence, tasks)


def _flat(x: Array) -> Array:
    """Return [M, H] as it is, and [M, A, D] with contiguous heads as [M A, D]. The result is a view."""
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


def run_layer(run: LossPass, layer: LightLayer, x_GMH: Array) -> None:
    """Replace the layer's input by its output, in place."""
    architecture, kind = run.architecture, run.architecture.block
    attended_GMH = _attention(run, layer, x_GMH)
    if kind is BlockKind.PARALLEL:
        (added_GMH,) = run.buffers("kept", x_GMH, x_GMH.shape[2])
        # Save this sum first, because the feed-forward part reuses the buffer of the attention.
        np.add(attended_GMH, x_GMH, out=added_GMH)
        np.add(_mlp(run, layer, x_GMH), added_GMH, out=x_GMH)
        return
    # Gemma 2 and 3, OLMo 2 and 3 and EXAONE 4 normalize the output of a part before it is added to the
    # residual.
    if layer.norm_attention_out is not None:
        run.norm(layer.norm_attention_out, attended_GMH, attended_GMH)
    scale_residual(architecture, attended_GMH)
    x_GMH += attended_GMH
    # POST normalizes the sum of the residual and the part's output.
    if kind is BlockKind.POST and layer.norm_attention is not None:
        run.norm(layer.norm_attention, x_GMH, x_GMH)
    moved_GMH = _mlp(run, layer, x_GMH)
    if layer.norm_mlp_out is not None:
        run.norm(layer.norm_mlp_out, moved_GMH, moved_GMH)
    scale_residual(architecture, moved_GMH)
    x_GMH += moved_GMH
    if kind is BlockKind.POST and layer.norm_mlp is not None:
        run.norm(layer.norm_mlp, x_GMH, x_GMH)


def scale_residual(architecture: Architecture, added: Array) -> None:
    """Multiply the output of a part of a layer by the family's factor, in place."""
    if architecture.residual_scale != 1:
        added *= np.float32(architecture.residual_scale)


def norm_heads(run: LossPass, norm: Norm, x_GMAD: Array) -> None:
    """Normalize each head in place. A norm wider than a head covers all heads of a token together."""
    x = x_GMAD.reshape(*x_GMAD.shape[:2], -1, len(norm.weight_H))
    run.norm(norm, x, x)


def finish(run: LossPass, model: LightModel, states_GRH: Array) -> Array:
    """Return the input of the head. `states_GRH`, the hidden states after the last layer, are overwritten."""
    if model.final_norm is not None:
        run.norm(model.final_norm, states_GRH, states_GRH)
    return states_GRH if model.project_out_EH is None else states_GRH @ model.project_out_EH.T


def norm_before(architecture: Architecture, norm: Norm | None) -> Norm | None:
    """Return the norm before attention or the feed-forward part. In a POST block, the norms come after."""
    return None if architecture.block is BlockKind.POST else norm


def _attention(run: LossPass, layer: LightLayer, x_GMH: Array) -> Array:
    normed_GMH = _normed(run, norm_before(run.architecture, layer.norm_attention), x_GMH)
    outs, (q, k, v) = head_buffers(run, "inner", layer, x_GMH)
    run.linear(layer.projections, normed_GMH, outs)
    if layer.norm_query is not None and layer.norm_key is not None:
        norm_heads(run, layer.norm_query, q)
        norm_heads(run, layer.norm_key, k)
    run.rotate(layer, q)
    run.rotate(layer, k)
    # The projections have read the normalized input, so its memory can take the output of the heads.
    (out_GMA,) = run.buffers("normed", x_GMH, run.architecture.heads * run.architecture.head)
    run.attend(layer, q, k, v, out_GMA.reshape(q.shape))
    # Queries, keys and values are no longer needed, so their memory can take the result.
    (result_GMH,) = run.buffers("inner", x_GMH, x_GMH.shape[2])
    run.linear([layer.output], out_GMA, [result_GMH])
    return result_GMH


def head_buffers(
    run: LossPass, name: str, layer: LightLayer, x_GMH: Array
) -> tuple[list[Array], tuple[Array, Array, Array]]:
    """Return work memory for the outputs of `layer.projections`, and q, k and v [G, M, heads, D] in it."""
    shape = run.architecture
    head, heads, kv_heads = shape.head, shape.heads, shape.kv_heads
    if layer.fused is not None:
        (fused_GMN,) = run.buffers(name, x_GMH, 3 * heads * head)
        # GPT-NeoX stores query, key and value of each head side by side.
        parts = fused_GMN.reshape(*fused_GMN.shape[:2], heads, 3, head)
        return [fused_GMN], (parts[..., 0, :], parts[..., 1, :], parts[..., 2, :])
    counts = (heads, kv_heads, kv_heads)
    found = run.buffers(name, x_GMH, *(count * head for count in counts))
    q, k, v = (out.reshape(*out.shape[:2], count, head) for out, count in zip(found, counts, strict=True))
    return found, (q, k, v)


def _mlp(run: LossPass, layer: LightLayer, x_GMH: Array) -> Array:
    normed_GMH = _normed(run, norm_before(run.architecture, layer.norm_mlp), x_GMH)
    (inner_GMI,) = run.buffers("inner", x_GMH, layer.up.rows)
    run.feed_forward(layer.gate, layer.up, normed_GMH, inner_GMI)
    # Only the inner activations needed the normalized input, so its memory can take the result.
    (result_GMH,) = run.buffers("normed", x_GMH, x_GMH.shape[2])
    run.linear([layer.down], inner_GMI, [result_GMH])
    return result_GMH


def _normed(run: LossPass, norm: Norm | None, x_GMH: Array) -> Array:
    if norm is None:
        return x_GMH
    (normed_GMH,) = run.buffers("normed", x_GMH, x_GMH.shape[2])
    run.norm(norm, x_GMH, normed_GMH)
    return normed_GMH
