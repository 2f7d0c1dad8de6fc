"""The reverse pass: a loss and the gradient of the masked weights alone, in float32.

From the first masked layer on, the forward pass keeps the input of each decoder layer. Then each layer, from
the last to the first masked one, is computed again and differentiated ("Training deep nets with sublinear
memory cost", section 3, with a layer as a segment). At any time, memory holds one hidden vector for each
token and layer, the intermediate results of one layer, a tile of a weight and a block of logits. Weights are
decoded only tile by tile.

    gradient of weight (n, k) = sum over tokens of d_out[n] x[k]          for the masked (n, k) only

`d_x` is the gradient of the loss with respect to x. No gradient of a whole weight matrix is computed.

# Legend: L layers, M tokens, H width, R target tokens, E width of the head, I width of the feed-forward part,
N, K = out and in features, R rows of a tile, C masked weights of a layer, T tokens of one sequence, A heads,
B key-value heads, G = A / B, D numbers of a head. In `value_K` and `gradient_K`, K is the number of masked
weights of the package.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from permille.engines.light.layers import (
    AttentionScores,
    activate,
    attention_weights,
    rotate,
    slope,
    standardized,
)
from permille.engines.light.linear import LightLinear, Tools
from permille.engines.light.model import LightLayer, LightModel, Norm
from permille.engines.light.passes import (
    LossPass,
    Workspace,
    head_buffers,
    norm_before,
    norm_heads,
    run_layer,
    scale_residual,
)
from permille.engines.light.sequences import JoinedSequences
from permille.engines.light.threads import blocks
from permille.models.architecture import Activation, Architecture
from permille.models.descriptions import BlockKind, NormKind

Array = NDArray[np.float32]

# A batch runs in parts, and the tokens of a part go through the layers together. A part has at most as many
# tokens as fit into this memory. Products get faster with more tokens, up to a few hundred.
_PART_BYTES = 56 << 20
_FEWEST_TOKENS = 64
# How many array elements a thread's task covers in pointwise operations. So many fit into the processor's
# caches.
_NUMBERS = 1 << 17
# The largest number of attention scores, and the largest number of products of tokens and masked weights,
# that are in memory at a time (for each thread).
_SCORES = 1 << 20
_PRODUCTS = 1 << 18


class ReversePass:
    """The reverse pass of a model."""

    def __init__(self, tools: Tools, model: LightModel, workspace: Workspace) -> None:
        self._tools, self._model, self._workspace = tools, model, workspace

    def part_tokens(self, tokens: int) -> int:
        """Return the number of tokens that go through the layers together.

        Tokens are divided into equal parts, each within `_PART_BYTES`.
        """
        model, shape = self._model, self._model.architecture
        inner = max(layer.up.rows for layer in model.layers)
        # The numbers of a token's queries, outputs, keys and values, and of their gradients.
        heads = 4 * shape.head * (shape.heads + shape.kv_heads)
        token_bytes = 4 * (model.hidden * (len(model.layers) + 8) + 3 * inner + heads)
        most = max(_FEWEST_TOKENS, _PART_BYTES // token_bytes)
        return -(-tokens // -(-tokens // most))

    def gradient(self, joined: JoinedSequences, value_K: Array, x_1MH: Array) -> tuple[float, Array]:
        """Return the sum of the token losses, and its gradient with respect to the values, float32 [K].

        Args:
            joined: the sequences.
            value_K: the values.
            x_1MH: the input of the lowest masked layer. It is overwritten.
        """
        model = self._model
        run = LayerReverse(self._tools, model.architecture, self._workspace, joined, value_K)
        layers = model.layers[model.first_masked :]
        kept_L1MH = self._workspace.take("layer inputs", (len(layers), *x_1MH.shape))
        for kept_1MH, layer in zip(kept_L1MH, layers, strict=True):
            # Copy the input, because `run_layer` overwrites it.
            np.copyto(kept_1MH, x_1MH)
            run_layer(run, layer, x_1MH)
        d_MH = x_1MH[0]
        loss = self._head_back(run, joined, d_MH)
        for kept_1MH, layer in zip(kept_L1MH[::-1], reversed(layers), strict=True):
            run.layer_back(layer, kept_1MH[0], d_MH)
        return loss, run.gradient_K

    def _head_back(self, run: "LayerReverse", joined: JoinedSequences, x_MH: Array) -> float:
        """Return the sum of the losses. Replace the last layer's output by the gradient at that output."""
        model, states_RH = self._model, x_MH[joined.state_R]
        read_RH = np.empty_like(states_RH)
        run.norm_or_copy(model.final_norm, states_RH, read_RH)
        project_EH = model.project_out_EH
        read_RE = read_RH if project_EH is None else read_RH @ project_EH.T
        loss_R, d_RE = model.head.gradients(read_RE, joined.target_R, joined.soft)
        d_RH = d_RE if project_EH is None else d_RE @ project_EH
        run.norm_back(model.final_norm, states_RH, d_RH, d_RH)
        x_MH[...] = 0
        x_MH[joined.state_R] = d_RH  # a token stands before at most one target, so no gradients add up
        # Sum in float64, so that the division of a batch into parts hardly changes the loss.
        return float(loss_R.sum(dtype=np.float64))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Attended:
    """Intermediate results of attention: its input, its heads, and queries and keys before their norms.

    `before_norm` is None if queries and keys have no norms.
    """

    x_MH: Array
    before_norm: tuple[Array, Array] | None
    heads: "Heads"

    @property
    def out(self) -> Array:
        """Return [M, A * D]: the outputs of all heads of a token, side by side."""
        return self.heads.out.reshape(len(self.x_MH), -1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Fed:
    """Intermediate results of the feed-forward part: input, gate, up, and `inner = a(gate) up`.

    Here, a is the activation function. `gate_MI` is None for a layer without a gate.
    """

    x_MH: Array
    gate_MI: Array | None
    up_MI: Array
    inner_MI: Array


class LayerReverse(LossPass):
    """A pass of some sequences forward and backward. It accumulates the gradient of the values."""

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
        """Turn the gradient at the layer's output into the gradient at its input, in place."""
        kind, post = self.architecture.block, self.architecture.block is BlockKind.POST
        attended = self._attend(layer, x_MH)
        if kind is BlockKind.PARALLEL:
            # Both branches read the gradient at the output. Copy it, because the first branch changes `d_MH`.
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
            scale_residual(self.architecture, middle_MH)
            middle_MH += x_MH
        fed = self._feed(layer, middle_MH)
        d_out_MH = self._after_feed_forward(layer, fed, middle_MH, d_MH)
        d_MH += self._feed_forward_back(layer, middle_MH, fed, d_out_MH)
        # With POST, the norm covers the sum of residual and attention, so both have the same gradient.
        d_out_MH = d_MH if post else moved_MH
        self.norm_back(layer.norm_attention if post else layer.norm_attention_out, moved_MH, d_MH, d_out_MH)
        scale_residual(self.architecture, d_out_MH)
        d_MH += self._attention_back(layer, x_MH, attended, d_out_MH)

    def _after_feed_forward(self, layer: LightLayer, fed: _Fed, middle_MH: Array, d_MH: Array) -> Array:
        """Return the gradient at the output of the feed-forward part, before the norm that may follow."""
        post = self.architecture.block is BlockKind.POST
        norm = layer.norm_mlp if post else layer.norm_mlp_out
        if norm is None:
            if self.architecture.residual_scale == 1:
                return d_MH
            out_MH = self._take("fed", d_MH)
            np.copyto(out_MH, d_MH)
            scale_residual(self.architecture, out_MH)
            return out_MH
        out_MH = self._take("fed", d_MH)
        self.linear([layer.down], fed.inner_MI[None], [out_MH[None]])
        if post:
            out_MH += middle_MH
        d_out_MH = d_MH if post else out_MH
        self.norm_back(norm, out_MH, d_MH, d_out_MH)
        return d_out_MH

    def _attend(self, layer: LightLayer, x_MH: Array) -> _Attended:
        normed_MH = self._normed("normed", norm_before(self.architecture, layer.norm_attention), x_MH)
        outs, (q, k, v) = head_buffers(self, "heads", layer, x_MH[None])
        self.linear(layer.projections, normed_MH[None], outs)
        before = None
        if layer.norm_query is not None and layer.norm_key is not None:
            # Copy the input of the norms. They work in place, and their derivative needs the input.
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
        d_outs, (d_q, d_k, d_v) = head_buffers(self, "d heads", layer, x_MH[None])
        heads = attended.heads
        d = Heads(q=d_q[0], k=d_k[0], v=d_v[0], out=d_out_MA.reshape(heads.out.shape))

        def sequence(rows: slice) -> None:
            attention_back(layer.scores, heads.of(rows), d.of(rows))
            if layer.settings.rope is not None:
                # The derivative of a rotation is the rotation by the opposite angle.
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
        self.norm_back(norm_before(self.architecture, layer.norm_attention), x_MH, d_MH, d_MH)
        return d_MH

    def _feed(self, layer: LightLayer, x_MH: Array) -> _Fed:
        normed_MH = self._normed("normed again", norm_before(self.architecture, layer.norm_mlp), x_MH)
        linears = [layer.up] if layer.gate is None else [layer.up, layer.gate]
        up, *gate = outs = self.buffers("inner", x_MH[None], *(linear.rows for linear in linears))
        self.linear(linears, normed_MH[None], outs)
        (inner,) = self.buffers("product", x_MH[None], layer.up.rows)
        kind = self.architecture.activation

        def rows(part: slice) -> None:
            # Copy the input of the activation, which works in place. Its derivative needs the input.
            np.copyto(inner[0, part], (gate[0] if gate else up)[0, part])
            inner[0, part] = activate(kind, inner[0, part])
            if gate:
                inner[0, part] *= up[0, part]

        self._each_rows(rows, inner[0])
        return _Fed(x_MH=normed_MH, gate_MI=gate[0][0] if gate else None, up_MI=up[0], inner_MI=inner[0])

    def _feed_forward_back(self, layer: LightLayer, x_MH: Array, fed: _Fed, d_out_MH: Array) -> Array:
        add_gradient(self._tools, layer.down, fed.inner_MI, d_out_MH, self._value_K, self.gradient_K)
        # The gradient of `down` was the last reader of the inner activations, so their memory is free.
        d_inner_MI = fed.inner_MI
        d_inner_MI[...] = 0
        linear_back(self._tools, layer.down, self._value_K, d_out_MH, d_inner_MI)

        def rows(part: slice) -> None:
            gate_MI = None if fed.gate_MI is None else fed.gate_MI[part]
            feed_forward_back(self.architecture.activation, gate_MI, fed.up_MI[part], d_inner_MI[part])

        self._each_rows(rows, d_inner_MI)
        d_MH = self._take("d normed", x_MH)
        linears = [layer.up] if layer.gate is None else [layer.up, layer.gate]
        # The function `feed_forward_back` has replaced up and gate by their gradients.
        d_outs = [fed.up_MI] if fed.gate_MI is None else [fed.up_MI, fed.gate_MI]
        self._linear_back(linears, fed.x_MH, d_outs, d_MH)
        self.norm_back(norm_before(self.architecture, layer.norm_mlp), x_MH, d_MH, d_MH)
        return d_MH

    def _linear_back(
        self, linears: Sequence[LightLinear], x_MK: Array, d_outs: Sequence[Array], d_x_MK: Array
    ) -> None:
        """Differentiate linear layers of the same input: `d_x` is the sum of their contributions."""
        d_x_MK[...] = 0
        for linear, d_out_MN in zip(linears, d_outs, strict=True):
            add_gradient(self._tools, linear, x_MK, d_out_MN, self._value_K, self.gradient_K)
            linear_back(self._tools, linear, self._value_K, d_out_MN, d_x_MK)

    def norm_or_copy(self, norm: Norm | None, x_MH: Array, out_MH: Array) -> None:
        """Normalize x, or copy it if there is no norm."""
        if norm is None:
            np.copyto(out_MH, x_MH)
        else:
            self.norm(norm, x_MH[None], out_MH[None])

    def norm_back(self, norm: Norm | None, x_MH: Array, d_out_MH: Array, d_x_MH: Array) -> None:
        """Differentiate `norm_or_copy`. `d_x_MH` may be `d_out_MH` or `x_MH`."""
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

    def _each_rows(self, work: Callable[[slice], None], x_MH: Array) -> None:
        """Run a task on parts of the rows, with all threads."""
        tokens, width = x_MH.shape
        most = max(1, _NUMBERS // width)
        self._tools.threads.each(work, blocks(tokens, min(most, -(-tokens // self._tools.threads.count))))

    def _take(self, name: str, like: Array) -> Array:
        """Return work memory of the shape of `like`."""
        return self._workspace.take(name, like.shape)


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
    """Set `d_x = r (g - n mean(n g))`, where `g = w d_out`, and w is the weight of the norm.

    Here, `r = 1 / sqrt(mean(x^2) + epsilon)` and `n = x r`. For LAYER, `mean(x)` is first subtracted from x,
    and `mean(g)` from g.
    """
    scaled_MH, r_M1 = standardized(norm.kind, x_MH, norm.epsilon)
    # Compute g in a new array, because `d_x` may share memory with x or with `d_out`.
    g_MH = d_out_MH * norm.weight_H
    if norm.kind is NormKind.LAYER:
        g_MH -= g_MH.mean(axis=1, keepdims=True)
    scaled_MH *= np.einsum("mh,mh->m", scaled_MH, g_MH)[:, None] / np.float32(x_MH.shape[1])
    np.subtract(g_MH, scaled_MH, out=d_x_MH)
    d_x_MH *= r_M1


def feed_forward_back(kind: Activation, gate_MI: Array | None, up_MI: Array, d_inner_MI: Array) -> None:
    """Replace gate and up by the gradients at gate and up, given the gradient at `a(gate) up`.

    Here, a is the activation function. Without a gate, replace up by the gradient at up, given the gradient
    at `a(up)`. `d_inner_MI`, the given gradient, may be overwritten.
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
    """Compute `d.q`, `d.k` and `d.v` from `d.out` of one sequence.

    `d_v = P^T d_out`, `d_s = scale slope P (d_out v^T - sum(d_out out))`, `d_q = d_s k`, `d_k = d_s^T q`.
    Here, `s = q k^T`, P is the output of the softmax, and `slope` is the derivative of the soft cap (1
    without a cap).
    """
    tokens, kv_heads = heads.k.shape[:2]
    group = heads.q.shape[1] // kv_heads
    # Start from 0, because several query heads add to one key-value head.
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
    """Add `d_out W` to `d_x`. All threads decode a tile of W together, and then all of them read it."""
    pool, value_C = tools.threads, value_K[layer.span]
    tiles = layer.tiles(1)
    shares = [tiles[start :: pool.count] for start in range(min(pool.count, len(tiles)))]
    # Each thread sums the products of its own tiles. The sums are added in the order of the shares, so the
    # result depends only on the number of threads.
    sums = [d_x_MK, *(np.zeros_like(d_x_MK) for _ in shares[1:])]

    def work(share: int) -> None:
        for rows in shares[share]:
            tile_RK = pool.scratch("weight", (rows.stop - rows.start) * layer.columns).reshape(
                -1, layer.columns
            )
            layer.fill(rows, value_C, tile_RK)
            tools.blas.add_product(d_out_MN[:, rows], tile_RK, sums[share])

    pool.each(work, range(len(shares)))
    for other_MK in sums[1:]:
        d_x_MK += other_MK
    if layer.adapter is not None:
        layer.adapter.add_back(tools.blas, d_out_MN, value_K, d_x_MK)


def add_gradient(
    tools: Tools, layer: LightLinear, x_MK: Array, d_out_MN: Array, value_K: Array, gradient_K: Array
) -> None:
    """Add `sum over t of d_out[t, row of c] x[t, column of c]` to each `gradient[c]`.

    For a layer with an adapter, add the gradient of the adapter's numbers instead.
    """
    if layer.adapter is not None:
        layer.adapter.add_gradient(tools.threads, x_MK, d_out_MN, value_K, gradient_K)
        return
    gradient_C = gradient_K[layer.span]

    def add(part: slice) -> None:
        row_C, column_C = np.divmod(layer.indices[part], np.uint32(layer.columns))
        # `take` needs half the time of indexing with arrays.
        d_out_MC, x_MC = d_out_MN.take(row_C, axis=1), x_MK.take(column_C, axis=1)
        gradient_C[part] += np.einsum("mc,mc->c", d_out_MC, x_MC)

    tools.threads.each(add, blocks(len(gradient_C), max(1, _PRODUCTS // len(x_MK))))
