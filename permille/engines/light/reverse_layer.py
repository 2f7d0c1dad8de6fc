"""Reverse pass of a decoder layer: recompute its inside, then go from output to input.

The order of the parts is that of `decoder`, reversed; each rule is the transpose of what `TangentPass`
computes (see `reverse_rules`). All work memory is of tokens, none of a weight.

# Legend: M tokens, H hidden size, A heads * D, I width of the feed-forward part, K masked weights of the
package.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from permille.engines.light.decoder import head_buffers, norm_heads, scale_residual
from permille.engines.light.layers import activate, rotate
from permille.engines.light.linear import LightLinear, Tools
from permille.engines.light.model import LightLayer, Norm
from permille.engines.light.passes import LossPass, Workspace
from permille.engines.light.reverse_rules import (
    Heads,
    add_gradient,
    attention_back,
    feed_forward_back,
    linear_back,
    norm_back,
)
from permille.engines.light.sequences import JoinedSequences
from permille.engines.light.threads import blocks
from permille.models.architecture import Architecture
from permille.models.descriptions import BlockKind

Array = NDArray[np.float32]

# Numbers of a pointwise task: they stay in the caches.
_NUMBERS = 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Attended:
    """Intermediate results of attention: input, queries and keys before their norms, heads.

    Queries and keys are None without norms.
    """

    x_MH: Array
    before_norm: tuple[Array, Array] | None
    heads: Heads

    @property
    def out(self) -> Array:
        """[M, A]: all heads of a token side by side."""
        return self.heads.out.reshape(len(self.x_MH), -1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Fed:
    """Intermediate results of the feed-forward part: input, gate, up, and `inner = a(gate) up`.

    The gate is None if there is none.
    """

    x_MH: Array
    gate_MI: Array | None
    up_MI: Array
    inner_MI: Array


class LayerReverse(LossPass):
    """Some sequences that go through layers forward and back; the gradient of the values is added up."""

    def __init__(
        self,
        tools: Tools,
        architecture: Architecture,
        workspace: Workspace,
        joined: JoinedSequences,
        value_K: Array,
    ) -> None:
        super().__init__(tools, architecture, workspace, joined)
        self.set_values(value_K[None])
        self._value_K = value_K
        self.gradient_K = np.zeros_like(value_K)

    def layer_back(self, layer: LightLayer, x_MH: Array, d_MH: Array) -> None:
        """The gradient at the layer's output becomes that at its input x."""
        kind, post = self._architecture.block, self._architecture.block is BlockKind.POST
        attended = self._attend(layer, x_MH)
        if kind is BlockKind.PARALLEL:
            d_out_MH = self._take("attended", x_MH)
            np.copyto(d_out_MH, d_MH)
            d_MH += self._attention_back(layer, x_MH, attended, d_out_MH)
            d_MH += self._feed_forward_back(layer, x_MH, self._feed(layer, x_MH), d_out_MH)
            return
        moved_MH, middle_MH = self._take("attended", x_MH), self._take("middle", x_MH)
        self.linear([layer.output], attended.out[None], [moved_MH[None]])
        if post:
            moved_MH += x_MH
            self.norm_or_copy(layer.norm_attention, moved_MH, middle_MH)
        else:
            self.norm_or_copy(layer.norm_attention_out, moved_MH, middle_MH)
            scale_residual(self._architecture, middle_MH)
            middle_MH += x_MH
        fed = self._feed(layer, middle_MH)
        d_out_MH = self._after_feed_forward(layer, fed, middle_MH, d_MH)
        d_MH += self._feed_forward_back(layer, middle_MH, fed, d_out_MH)
        d_out_MH = d_MH if post else moved_MH
        self.norm_back(layer.norm_attention if post else layer.norm_attention_out, moved_MH, d_MH, d_out_MH)
        scale_residual(self._architecture, d_out_MH)
        d_MH += self._attention_back(layer, x_MH, attended, d_out_MH)

    def _after_feed_forward(self, layer: LightLayer, fed: _Fed, middle_MH: Array, d_MH: Array) -> Array:
        """The gradient at the output of the feed-forward part, before the norm that may follow it."""
        post = self._architecture.block is BlockKind.POST
        norm = layer.norm_mlp if post else layer.norm_mlp_out
        if norm is None:
            if self._architecture.residual_scale == 1:
                return d_MH
            out_MH = self._take("fed", d_MH)
            np.copyto(out_MH, d_MH)
            scale_residual(self._architecture, out_MH)
            return out_MH
        out_MH = self._take("fed", d_MH)
        self.linear([layer.down], fed.inner_MI[None], [out_MH[None]])
        if post:
            out_MH += middle_MH
        d_out_MH = d_MH if post else out_MH
        self.norm_back(norm, out_MH, d_MH, d_out_MH)
        return d_out_MH

    def _attend(self, layer: LightLayer, x_MH: Array) -> _Attended:
        shape = self._architecture
        normed_MH = self._normed("normed", self._norm_before_attention(layer), x_MH)
        outs, (q, k, v) = head_buffers(self, "heads", shape, layer, x_MH[None])
        self.linear(layer.projections, normed_MH[None], outs)
        before = None
        if layer.norm_query is not None and layer.norm_key is not None:
            before = (q[0].copy(), k[0].copy())
            norm_heads(self, layer.norm_query, q)
            norm_heads(self, layer.norm_key, k)
        self.rotate(layer, q)
        self.rotate(layer, k)
        out = self._workspace.take("out", q.shape)
        self.attend(layer, q, k, v, out)
        return _Attended(x_MH=normed_MH, before_norm=before, heads=Heads(q=q[0], k=k[0], v=v[0], out=out[0]))

    def _attention_back(self, layer: LightLayer, x_MH: Array, attended: _Attended, d_out_MH: Array) -> Array:
        d_out_MA = self._workspace.take("d out", attended.out.shape)
        self._linear_back([layer.output], attended.out, [d_out_MH], d_out_MA)
        d_outs, (d_q, d_k, d_v) = head_buffers(self, "d heads", self._architecture, layer, x_MH[None])
        heads = attended.heads
        d = Heads(q=d_q[0], k=d_k[0], v=d_v[0], out=d_out_MA.reshape(heads.out.shape))

        def sequence(rows: slice) -> None:
            attention_back(layer.scores, heads.of(rows), d.of(rows))
            if layer.settings.rope is not None:
                cosine_ME, sine_ME = self._rotation(layer.settings.rope)
                for d_head in (d.q, d.k):
                    rotate(d_head[rows], cosine_ME[rows], -sine_ME[rows])

        self._tools.threads.each(sequence, self._joined.sequences)
        if attended.before_norm is not None:
            for norm, before, d_head in zip(
                (layer.norm_query, layer.norm_key), attended.before_norm, (d.q, d.k), strict=True
            ):
                if norm is None:
                    continue
                width = len(norm.weight_H)
                d_flat = d_head.reshape(-1, width)
                self.norm_back(norm, before.reshape(-1, width), d_flat, d_flat)
        d_MH = self._take("d normed", x_MH)
        self._linear_back(layer.projections, attended.x_MH, [d_out[0] for d_out in d_outs], d_MH)
        self.norm_back(self._norm_before_attention(layer), x_MH, d_MH, d_MH)
        return d_MH

    def _feed(self, layer: LightLayer, x_MH: Array) -> _Fed:
        normed_MH = self._normed("normed again", self._norm_before_mlp(layer), x_MH)
        linears = [layer.up] if layer.gate is None else [layer.up, layer.gate]
        up, *gate = outs = self.buffers("inner", x_MH[None], *(linear.rows for linear in linears))
        self.linear(linears, normed_MH[None], outs)
        (inner,) = self.buffers("product", x_MH[None], layer.up.rows)
        kind = self._architecture.activation

        def rows(part: slice) -> None:
            np.copyto(inner[0, part], (gate[0] if gate else up)[0, part])
            inner[0, part] = activate(kind, inner[0, part])
            if gate:
                inner[0, part] *= up[0, part]

        self._each_rows(rows, inner[0])
        return _Fed(x_MH=normed_MH, gate_MI=gate[0][0] if gate else None, up_MI=up[0], inner_MI=inner[0])

    def _feed_forward_back(self, layer: LightLayer, x_MH: Array, fed: _Fed, d_out_MH: Array) -> Array:
        add_gradient(self._tools, layer.down, fed.inner_MI, d_out_MH, self._value_K, self.gradient_K)
        d_inner_MI = fed.inner_MI
        d_inner_MI[...] = 0
        linear_back(self._tools, layer.down, self._value_K, d_out_MH, d_inner_MI)

        def rows(part: slice) -> None:
            gate_MI = None if fed.gate_MI is None else fed.gate_MI[part]
            feed_forward_back(self._architecture.activation, gate_MI, fed.up_MI[part], d_inner_MI[part])

        self._each_rows(rows, d_inner_MI)
        d_MH = self._take("d normed", x_MH)
        linears = [layer.up] if layer.gate is None else [layer.up, layer.gate]
        d_outs = [fed.up_MI] if fed.gate_MI is None else [fed.up_MI, fed.gate_MI]
        self._linear_back(linears, fed.x_MH, d_outs, d_MH)
        self.norm_back(self._norm_before_mlp(layer), x_MH, d_MH, d_MH)
        return d_MH

    def _linear_back(
        self, linears: Sequence[LightLinear], x_MK: Array, d_outs: Sequence[Array], d_x_MK: Array
    ) -> None:
        """Linear layers of the same input: `d_x` is the sum of what they send back."""
        d_x_MK[...] = 0
        for linear, d_out_MN in zip(linears, d_outs, strict=True):
            add_gradient(self._tools, linear, x_MK, d_out_MN, self._value_K, self.gradient_K)
            linear_back(self._tools, linear, self._value_K, d_out_MN, d_x_MK)

    def norm_or_copy(self, norm: Norm | None, x_MH: Array, out_MH: Array) -> None:
        """Without a norm, x as it is."""
        if norm is None:
            np.copyto(out_MH, x_MH)
        else:
            self.norm(norm, x_MH[None], out_MH[None])

    def norm_back(self, norm: Norm | None, x_MH: Array, d_out_MH: Array, d_x_MH: Array) -> None:
        """The transpose of `norm_or_copy`; `d_x` may be `d_out` or x."""
        if norm is None:
            np.copyto(d_x_MH, d_out_MH)
            return
        found = norm

        def rows(part: slice) -> None:
            norm_back(found, x_MH[part], d_out_MH[part], d_x_MH[part])

        self._each_rows(rows, x_MH)

    def _normed(self, name: str, norm: Norm | None, x_MH: Array) -> Array:
        if norm is None:
            return x_MH
        out_MH = self._take(name, x_MH)
        self.norm_or_copy(norm, x_MH, out_MH)
        return out_MH

    def _norm_before_attention(self, layer: LightLayer) -> Norm | None:
        return None if self._architecture.block is BlockKind.POST else layer.norm_attention

    def _norm_before_mlp(self, layer: LightLayer) -> Norm | None:
        return None if self._architecture.block is BlockKind.POST else layer.norm_mlp

    def _each_rows(self, work: Callable[[slice], None], x_MH: Array) -> None:
        """Rows of x, split over the threads."""
        tokens, width = x_MH.shape
        most = max(1, _NUMBERS // width)
        self._tools.threads.each(work, blocks(tokens, min(most, -(-tokens // self._tools.threads.count))))

    def _take(self, name: str, like: Array) -> Array:
        """Work memory of this shape."""
        return self._workspace.take(name, like.shape)
