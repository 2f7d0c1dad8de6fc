"""The passes through a decoder: groups of variants, and a primal with its tangents.

# Legend: G groups of variants, Q directions, M tokens, H hidden size, K features, A heads, D numbers of a
head, C masked weights of a layer.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from permille.engines.light import layers as numbers
from permille.engines.light.linear import Inputs, LayerTangents, LightLinear, Tools
from permille.engines.light.model import LightLayer, Norm
from permille.engines.light.sequences import JoinedSequences
from permille.engines.light.threads import blocks
from permille.models.architecture import Architecture
from permille.models.rope import Rope
from permille.native.int8 import padded, quantize_tokens

Array = NDArray[np.float32]

# Rows of a pointwise task.
_ROWS = 256


class Workspace:
    """Work memory by name, kept between layers and calls."""

    def __init__(self) -> None:
        self._kept: dict[str, Array] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> Array:
        """Memory of this shape; what it held is lost."""
        size = math.prod(shape)
        kept = self._kept.get(name)
        if kept is None or len(kept) < size:
            # Dropped before the new one is made, or both would be resident.
            self._kept.pop(name, None)
            kept = self._kept[name] = np.empty(size, np.float32)
        return kept[:size].reshape(shape)

    def clear(self) -> None:
        """Give all of it back."""
        self._kept.clear()


class _Tokens:
    """Parts that every pass over joined sequences shares: work memory, positions, tasks over rows."""

    def __init__(
        self, tools: Tools, architecture: Architecture, workspace: Workspace, joined: JoinedSequences
    ) -> None:
        self._tools = tools
        self._architecture = architecture
        self._workspace = workspace
        self._joined = joined
        self._tables: dict[int, tuple[Array, Array]] = {}

    def buffers(self, name: str, x_GMK: Array, *widths: int) -> list[Array]:
        """See `Pass`."""
        states, tokens = x_GMK.shape[:2]
        flat = self._workspace.take(name, (states * tokens * sum(widths),))
        stops = [states * tokens * sum(widths[: index + 1]) for index in range(len(widths))]
        return [
            flat[stop - states * tokens * width : stop].reshape(states, tokens, width)
            for stop, width in zip(stops, widths, strict=True)
        ]

    def rotate(self, layer: LightLayer, x_GMAD: Array) -> None:
        """See `Pass`. Linear: primal and tangents alike."""
        rope = layer.settings.rope
        if rope is None:
            return
        cosine_ME, sine_ME = self._rotation(rope)

        def rows(task: tuple[int, slice]) -> None:
            state, part = task
            numbers.rotate(x_GMAD[state, part], cosine_ME[part], sine_ME[part])

        self._each_row(x_GMAD, rows)

    def _rotation(self, rope: Rope) -> tuple[Array, Array]:
        if id(rope) not in self._tables:
            self._tables[id(rope)] = rope.tables(self._joined.position_M)
        return self._tables[id(rope)]

    def _each_row(self, x: Array, work: Callable[[tuple[int, slice]], None]) -> None:
        tasks = [(state, rows) for state in range(x.shape[0]) for rows in blocks(x.shape[1], _ROWS)]
        self._tools.threads.each(work, tasks)


class LossPass(_Tokens):
    """States are groups of variants, with their values for each layer."""

    def __init__(
        self, tools: Tools, architecture: Architecture, workspace: Workspace, joined: JoinedSequences
    ) -> None:
        super().__init__(tools, architecture, workspace, joined)
        self._values_GK = np.empty((0, 0), np.float32)

    def set_values(self, values_GK: Array) -> None:
        """The values of each group, [g, k], until set anew."""
        self._values_GK = values_GK

    def norm(self, norm: Norm, x_GMH: Array, out_GMH: Array) -> None:
        """See `Pass`."""

        def rows(task: tuple[int, slice]) -> None:
            state, part = task
            x, out = _flat(x_GMH[state, part]), _flat(out_GMH[state, part])
            numbers.norm(norm.kind, x, norm.weight_H, norm.bias_H, norm.epsilon, out)

        self._each_row(x_GMH, rows)

    def linear(self, layers: Sequence[LightLinear], x_GMK: Array, outs: Sequence[Array]) -> None:
        """See `Pass`."""

        inputs = self._inputs(x_GMK)

        values = {id(layer): layer.values(self._tools, x_GMK, self._values_GK) for layer in layers}

        def tile(task: tuple[LightLinear, Array, slice]) -> None:
            layer, out_GMN, rows = task
            layer.variants_tile(self._tools, inputs, values[id(layer)], rows, out_GMN)

        self._tools.threads.each(tile, _tile_tasks(layers, outs, self._tools.threads.count))

    def feed_forward(self, gate: LightLinear | None, up: LightLinear, x_GMH: Array, out_GMI: Array) -> None:
        """See `Pass`. Gate and up go tile by tile, so that the gate's output never exists as a whole."""
        tools, kind = self._tools, self._architecture.activation
        inputs, first = self._inputs(x_GMH), up if gate is None else gate
        first_values = first.values(tools, x_GMH, self._values_GK)
        up_values = first_values if gate is None else up.values(tools, x_GMH, self._values_GK)

        def tile(rows: slice) -> None:
            # The gate first, into the result's place; then up, for all groups, onto it.
            for group, part_MR in first.products(tools, inputs, first_values, rows, "up"):
                out_GMI[group, :, rows] = numbers.activate(kind, part_MR)
            if gate is None:
                return
            for group, part_MR in up.products(tools, inputs, up_values, rows, "up"):
                out_GMI[group, :, rows] *= part_MR

        tools.threads.each(tile, up.tiles(tools.threads.count))

    def _inputs(self, x_GMK: Array) -> Inputs:
        """The inputs of linear layers as their products take them."""
        if not self._tools.int8:
            return Inputs(x_GMK=x_GMK)
        states, tokens, columns = x_GMK.shape
        wide = padded(columns)
        kept = self._workspace.take("int8", (states * tokens * (wide // 4 + 1),))
        q_GMP = kept[: states * tokens * wide // 4].view(np.uint8).reshape(states, tokens, wide)
        scale_GM = kept[states * tokens * wide // 4 :].reshape(states, tokens)

        def rows(task: tuple[int, slice]) -> None:
            state, part = task
            quantize_tokens(x_GMK[state, part], q_GMP[state, part], scale_GM[state, part])

        self._each_row(x_GMK, rows)
        return Inputs(x_GMK=x_GMK, q_GMP=q_GMP, scale_GM=scale_GM)

    def attend(self, layer: LightLayer, q: Array, k: Array, v: Array, out: Array) -> None:
        """See `Pass`."""

        def sequence(task: tuple[int, slice]) -> None:
            state, rows = task
            numbers.attention(q[state, rows], k[state, rows], v[state, rows], layer.scores, out[state, rows])

        tasks = [(state, rows) for state in range(len(q)) for rows in self._joined.sequences]
        self._tools.threads.each(sequence, tasks)


class TangentPass(_Tokens):
    """State 0 is the primal, the others are its tangents in the directions."""

    def __init__(
        self,
        tools: Tools,
        architecture: Architecture,
        workspace: Workspace,
        joined: JoinedSequences,
        value_K: Array,
        z_QK: Array,
    ) -> None:
        super().__init__(tools, architecture, workspace, joined)
        self._value_K, self._z_QK = value_K, z_QK

    def norm(self, norm: Norm, x_QMH: Array, out_QMH: Array) -> None:
        """See `Pass`."""

        def rows(part: slice) -> None:
            primal = _flat(x_QMH[0, part])
            primal = primal.copy() if np.may_share_memory(x_QMH, out_QMH) else primal
            for state in range(1, len(x_QMH)):
                change, out = _flat(x_QMH[state, part]), _flat(out_QMH[state, part])
                numbers.norm_tangent(norm.kind, primal, change.copy(), norm.weight_H, norm.epsilon, out)
            out = _flat(out_QMH[0, part])
            numbers.norm(norm.kind, primal, norm.weight_H, norm.bias_H, norm.epsilon, out)

        self._tools.threads.each(rows, blocks(x_QMH.shape[1], _ROWS))

    def linear(self, layers: Sequence[LightLinear], x_QMK: Array, outs: Sequence[Array]) -> None:
        """See `Pass`."""

        tangents = {id(layer): self._tangents(layer, x_QMK) for layer in layers}

        def tile(task: tuple[LightLinear, Array, slice]) -> None:
            layer, out_QMN, rows = task
            out_QMN[:, :, rows] = layer.tangent_tile(self._tools, x_QMK, tangents[id(layer)], rows, "product")

        self._tools.threads.each(tile, _tile_tasks(layers, outs, self._tools.threads.count))

    def feed_forward(self, gate: LightLinear | None, up: LightLinear, x_QMH: Array, out_QMI: Array) -> None:
        """`(a(g) u)' = a'(g) g' u + a(g) u'`."""
        kind, first = self._architecture.activation, up if gate is None else gate
        first_tangents = self._tangents(first, x_QMH)
        up_tangents = first_tangents if gate is None else self._tangents(up, x_QMH)

        def tile(rows: slice) -> None:
            gate_QMR = first.tangent_tile(self._tools, x_QMH, first_tangents, rows, "gate")
            slope_MR = numbers.slope(kind, gate_QMR[0])
            numbers.activate(kind, gate_QMR[0])
            gate_QMR[1:] *= slope_MR
            if gate is not None:
                up_QMR = up.tangent_tile(self._tools, x_QMH, up_tangents, rows, "up")
                gate_QMR[1:] *= up_QMR[0]
                up_QMR[1:] *= gate_QMR[0]
                gate_QMR[1:] += up_QMR[1:]
                gate_QMR[0] *= up_QMR[0]
            out_QMI[:, :, rows] = gate_QMR

        self._tools.threads.each(tile, up.tiles(self._tools.threads.count))

    def attend(self, layer: LightLayer, q: Array, k: Array, v: Array, out: Array) -> None:
        """See `Pass`."""

        def sequence(rows: slice) -> None:
            numbers.attention_tangents(q[:, rows], k[:, rows], v[:, rows], layer.scores, out[:, rows])

        self._tools.threads.each(sequence, self._joined.sequences)

    def _tangents(self, layer: LightLinear, x_QMK: Array) -> LayerTangents:
        return layer.tangents(self._tools, x_QMK, self._value_K, self._z_QK)


def _flat(x: Array) -> Array:
    """[M, H] as it is; [M, A, D] of contiguous heads, for norms of heads, as [M A, D]: always a view."""
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


def _tile_tasks(
    layers: Sequence[LightLinear], outs: Sequence[Array], threads: int
) -> list[tuple[LightLinear, Array, slice]]:
    return [
        (layer, out, rows) for layer, out in zip(layers, outs, strict=True) for rows in layer.tiles(threads)
    ]
