"""The forward pass of text generation. It keeps keys and values of earlier tokens.

For a single token, the kernel multiplies the codes directly and unpacks no weight to memory. If the kernel
cannot be used, numpy dequantizes rows. The `TokenProduct` of a layer is made once for a text and used for
every token. The prompt goes through dequantized tiles, as in training.

# Legend: M new tokens, S tokens so far, B key-value heads, D numbers of a head, V vocabulary, R target
# positions, H hidden size, I outputs of the gate, N and K outputs and inputs of a layer, G variants (one). In
# `value_K` and `_values_GK`, K is the number of trained values.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from permille.engines.key_values import KeyValues
from permille.engines.light import layers as numbers
from permille.engines.light.linear import LightLinear, Tools
from permille.engines.light.model import LightLayer, LightModel
from permille.engines.light.passes import LossPass, Workspace, finish, run_layer
from permille.engines.light.sequences import JoinedSequences
from permille.engines.light.threads import blocks
from permille.native.products import TokenProduct

Array = NDArray[np.float32]

_TASK_WEIGHTS = 1 << 18


class TextPass(LossPass):
    """The pass of one growing sequence with one variant of the values."""

    def __init__(
        self, tools: Tools, model: LightModel, value_K: Array, room: int, after: KeyValues | None = None
    ) -> None:
        """Reserve memory for `room` tokens: the prompt and the new tokens together.

        The sequence begins with the tokens of `after`, for which no room is counted.
        """
        self._model = model
        super().__init__(tools, model.architecture, Workspace(), _tokens(0, 0))
        self.set_values(value_K[None])
        self.length = 0 if after is None else len(after)
        self._ids = [] if after is None else [after.id_S]
        # The operating system allocates a page when it is first written, so unused room takes no memory.
        shape = (self.length + room, model.architecture.kv_heads, model.architecture.head)
        self._kept = [(np.empty(shape, np.float32), np.empty(shape, np.float32)) for _ in model.layers]
        for known, own in zip(() if after is None else after.layers, self._kept, strict=after is not None):
            own[0][: self.length], own[1][: self.length] = known
        self._products: dict[int, TokenProduct] = {}

    def next_logits(self, id_M: NDArray[np.int64]) -> Array:
        """Return the logits [V] after these tokens. The tokens follow those of earlier calls."""
        model = self._model
        self._joined = _tokens(self.length, len(id_M))
        # Drop the cosines and sines of the last call, because the new tokens have other positions.
        self._tables = {}
        x_1MH = model.embed(id_M, self._joined.position_M)[None]
        with np.errstate(all="ignore"):
            for layer in model.layers:
                run_layer(self, layer, x_1MH)
            self.length += len(id_M)
            self._ids.append(id_M)
            # The last hidden state alone predicts the next token, so the head computes one row.
            last_1RH = np.ascontiguousarray(x_1MH[:, -1:])
            logit_V: Array = model.head.logits(finish(self, model, last_1RH)[0])[0]
        return logit_V

    def key_values(self) -> KeyValues:
        """Return keys and values of all tokens so far. Later tokens do not change them."""
        return KeyValues(
            id_S=np.concatenate(self._ids),
            layers=tuple((key[: self.length], value[: self.length]) for key, value in self._kept),
        )

    def linear(self, layers: Sequence[LightLinear], x_GMK: Array, outs: Sequence[Array]) -> None:
        """See `LossPass`."""
        if x_GMK.shape[1] > 1:
            super().linear(layers, x_GMK, outs)
            return
        threads = self._tools.threads

        def part(task: tuple[LightLinear, Array, slice]) -> None:
            layer, out_1MN, rows = task
            self._product(layer).run(x_GMK[0], out_1MN[0], rows.start, rows.stop)

        threads.each(
            part,
            [
                (layer, out, rows)
                for layer, out in zip(layers, outs, strict=True)
                for rows in blocks(layer.rows, _rows_each(layer, threads.count))
            ],
        )
        for layer, out_1MN in zip(layers, outs, strict=True):
            # The kernel takes only codes and sparse values, so the adapter is added here.
            if layer.adapter is not None:
                low_rank = layer.adapter.of_variants(self._tools.blas, threads, x_GMK, self._values_GK)
                low_rank.add(self._tools.blas, 0, slice(None), out_1MN[0])

    def feed_forward(self, gate: LightLinear | None, up: LightLinear, x_GMH: Array, out_GMI: Array) -> None:
        """See `LossPass`."""
        if x_GMH.shape[1] > 1:
            super().feed_forward(gate, up, x_GMH, out_GMI)
            return
        kind = self.architecture.activation
        if gate is None:
            self.linear([up], x_GMH, [out_GMI])
            numbers.activate(kind, out_GMI)
            return
        # The output of the gate is one vector here, so it is computed as a whole, not tile by tile.
        (up_GMI,) = self.buffers("up", x_GMH, up.rows)
        self.linear([gate, up], x_GMH, [out_GMI, up_GMI])
        numbers.activate(kind, out_GMI)
        out_GMI *= up_GMI

    def attend(self, layer: LightLayer, q: Array, k: Array, v: Array, out: Array) -> None:
        """See `LossPass`. The new keys and values are appended to those of earlier tokens."""
        key_SBD, value_SBD = self._kept[layer.number]
        stop = self.length + k.shape[1]
        key_SBD[self.length : stop], value_SBD[self.length : stop] = k[0], v[0]
        window = layer.settings.window
        # Leave out the tokens before the window of the first new token. No new token attends to them.
        first = 0 if window is None else max(0, self.length + 1 - window)
        with np.errstate(all="ignore"):
            numbers.attention(q[0], key_SBD[first:stop], value_SBD[first:stop], layer.scores, out[0])

    def _product(self, layer: LightLinear) -> TokenProduct:
        found = self._products.get(id(layer))
        if found is None:
            found = self._products[id(layer)] = layer.token_product(self._values_GK[0, layer.span])
        return found


def _rows_each(layer: LightLinear, threads: int) -> int:
    """Return the number of rows of a task.

    A task has at least `_TASK_WEIGHTS` weights. Waking a thread for fewer costs more than it saves.
    """
    return max(-(-layer.rows // threads), -(-_TASK_WEIGHTS // layer.columns))


def _tokens(first: int, count: int) -> JoinedSequences:
    nothing = np.empty(0, np.int64)
    return JoinedSequences(
        id_M=nothing,
        position_M=np.arange(first, first + count),
        sequences=(slice(0, count),),
        state_R=nothing,
        target_R=nothing,
    )
