"""The reverse pass: a loss and the gradient of the masked weights alone, in float32.

The forward pass keeps what enters each decoder layer. Then, from the last layer to the first masked one, a
layer's inside is computed again and gone through backwards ("Training deep nets with sublinear memory cost",
section 3, a layer being a segment). What exists at a time is one hidden vector a token and layer, the inside
of one layer, a tile of a weight and a block of logits: nothing of a matrix's size.

    gradient of weight (n, m) = sum over tokens of d_out[n] x[m]          for the masked (n, m) only

# Legend: L layers, M tokens, H hidden size, R target tokens, E width of the head, K masked weights of the
package.
"""

import numpy as np
from numpy.typing import NDArray

from permille.engines.light.decoder import run_layer
from permille.engines.light.linear import Tools
from permille.engines.light.model import LightModel
from permille.engines.light.passes import Workspace
from permille.engines.light.reverse_layer import LayerReverse
from permille.engines.light.sequences import JoinedSequences

Array = NDArray[np.float32]

# Bounds what the tokens of one part need; more of them make the products faster, up to a few hundred.
_PART_BYTES = 56 << 20
_FEWEST_TOKENS = 64


class ReversePass:
    """Goes through a model forward and back."""

    def __init__(self, tools: Tools, model: LightModel, workspace: Workspace) -> None:
        self._tools, self._model, self._workspace = tools, model, workspace

    def part_tokens(self, tokens: int) -> int:
        """Return the number of tokens that go through the layers together.

        Tokens are divided into equal parts within the memory bound.
        """
        model, shape = self._model, self._model.architecture
        inner = max(layer.up.rows for layer in model.layers)
        heads = 4 * shape.head * (shape.heads + shape.kv_heads)
        token_bytes = 4 * (model.hidden * (len(model.layers) + 8) + 3 * inner + heads)
        most = max(_FEWEST_TOKENS, _PART_BYTES // token_bytes)
        return -(-tokens // -(-tokens // most))

    def gradient(self, joined: JoinedSequences, value_K: Array, x_1MH: Array) -> tuple[float, Array]:
        """The sum of the token losses, and its gradient by the values, float32 [K].

        Args:
            x_1MH: what enters the lowest masked layer; used up.
        """
        model = self._model
        run = LayerReverse(self._tools, model.architecture, self._workspace, joined, value_K)
        layers = model.layers[model.first_masked :]
        kept_L1MH = self._workspace.take("layer inputs", (len(layers), *x_1MH.shape))
        for kept_1MH, layer in zip(kept_L1MH, layers, strict=True):
            np.copyto(kept_1MH, x_1MH)
            run_layer(run, model.architecture, layer, x_1MH)
        d_MH = x_1MH[0]
        loss = self._head_back(run, joined, d_MH)
        for kept_1MH, layer in zip(kept_L1MH[::-1], reversed(layers), strict=True):
            run.layer_back(layer, kept_1MH[0], d_MH)
        return loss, run.gradient_K

    def _head_back(self, run: LayerReverse, joined: JoinedSequences, x_MH: Array) -> float:
        """The sum of the losses; its gradient at the last layer's output takes the place of that output."""
        model, states_RH = self._model, x_MH[joined.state_R]
        read_RH = np.empty_like(states_RH)
        run.norm_or_copy(model.final_norm, states_RH, read_RH)
        project_EH = model.project_out_EH
        read_RE = read_RH if project_EH is None else read_RH @ project_EH.T
        loss_R, d_RE = model.head.gradients(read_RE, joined.target_R, joined.soft)
        d_RH = d_RE if project_EH is None else d_RE @ project_EH
        run.norm_back(model.final_norm, states_RH, d_RH, d_RH)
        x_MH[...] = 0
        x_MH[joined.state_R] = d_RH  # a token stands before one target at most
        return float(loss_R.sum(dtype=np.float64))
