"""A reverse pass through a model with one decoder layer in memory at a time.

The forward pass goes up layer by layer and keeps the input of each layer. The reverse pass comes down: it
loads each layer again, computes it once more, and hands the gradient of its input to the layer below.
Checkpointing in a whole model (`permille.sensitivity.backward`) does the same operations on the same
numbers, so the gradients have the same bits.

A pass reads the model twice, so it takes as many sequences as fit into `hidden_bytes` of hidden states. The
number of sequences in a pass changes neither gradients nor sums, because each layer handles sequences one at
a time, in their order.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from permille.errors import InputError
from permille.models.families import layer_of, shape_of
from permille.models.layerwise import DecoderLayer, LayerStream


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedModel:
    """A model that is read layer by layer. `hidden_bytes` is the memory for hidden states of one pass."""

    stream: LayerStream
    hidden_bytes: int = 1 << 30

    def sequences_a_pass(self, length: int) -> int:
        """Return the number of sequences that go through the layers together."""
        hidden = shape_of(self.stream.checkpoint.config).hidden
        # A sequence keeps the input of each layer, the output of the last one, and a gradient.
        return max(1, self.hidden_bytes // (4 * length * hidden * (self.stream.layers + 2)))


Watched = Callable[[DecoderLayer, int], AbstractContextManager[None]]
"""A function of a layer and a sequence's number. It returns a context for their reverse pass."""


def backward_by_layer(
    model: StreamedModel,
    sequences_NT: NDArray[np.int64],
    names: Sequence[str],
    watched: Watched,
    *,
    progress: Callable[[int], None] | None = None,
    until_s: float = math.inf,
) -> int:
    """Differentiate the losses of sequences with respect to the named weights. Return their number.

    Args:
        watched: returns a context around the reverse pass of each layer and sequence. Within a pass,
            the layers come from the last one down, and for each layer the sequences of the pass in order.
        progress: called with the number of sequences done. Within a pass, the number grows with the layers.
        until_s: the time, as of `time.monotonic`, after which no other pass begins. At least one is finished.

    Raises:
        InputError: a loss is not finite.
    """
    size = model.sequences_a_pass(sequences_NT.shape[1])
    for start in range(0, len(sequences_NT), size):
        _Pass(model.stream, sequences_NT[start : start + size], names, start, progress).run(watched)
        if time.monotonic() >= until_s:
            return min(start + size, len(sequences_NT))
    return len(sequences_NT)


class _Pass:
    def __init__(
        self,
        stream: LayerStream,
        tokens_QT: NDArray[np.int64],
        names: Sequence[str],
        first: int,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._stream = stream
        self._ids = [torch.from_numpy(np.ascontiguousarray(tokens_T))[None] for tokens_T in tokens_QT]
        self._names = frozenset(names)
        self._lowest = min(index for index in map(layer_of, names) if index is not None)
        self._first = first
        self._progress = progress
        self._done = 0

    def run(self, watched: Watched) -> None:
        before = self._forward()
        gradients = self._head(before.pop())
        for index in reversed(range(self._lowest, self._stream.layers)):
            with self._stream.layer(index) as layer:
                for name, parameter in layer.module.named_parameters():
                    parameter.requires_grad_(f"{layer.prefix}.{name}" in self._names)
                hidden = before.pop()
                for number, gradient in enumerate(gradients):
                    # The input of the lowest layer in scope needs no gradient.
                    input_BTH = hidden[number].requires_grad_(index > self._lowest)
                    with watched(layer, self._first + number):
                        layer(input_BTH).backward(gradient)  # type: ignore[no-untyped-call]
                    if input_BTH.grad is not None:
                        gradients[number] = input_BTH.grad
                    # Free the input now: the inputs of all layers take most of the memory of a pass.
                    hidden[number] = torch.empty(0)
            self._tell()

    def _forward(self) -> list[list[Tensor]]:
        """Return the hidden states before each layer from the lowest in scope, and after the last."""
        before: list[list[Tensor]] = []
        with torch.no_grad():
            with self._stream.ends() as ends:
                hidden = [ends.embed(ids_BT) for ids_BT in self._ids]
            for index in range(self._stream.layers):
                if index >= self._lowest:
                    before.append(hidden)
                with self._stream.layer(index) as layer:
                    hidden = [layer(hidden_BTH) for hidden_BTH in hidden]
                self._tell()
        return [*before, hidden]

    def _head(self, hidden: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of the losses with respect to the hidden states after the last layer."""
        found = []
        with self._stream.ends() as ends:
            for number, (hidden_BTH, ids_BT) in enumerate(zip(hidden, self._ids, strict=True)):
                input_BTH = hidden_BTH.detach().requires_grad_()
                logits_TV = ends.logits(input_BTH)[0, :-1].float()
                loss = functional.cross_entropy(logits_TV, ids_BT[0, 1:].to(logits_TV.device))
                if not torch.isfinite(loss):
                    at = self._first + number
                    raise InputError(f"The loss of sequence {at} is not finite: {loss.item()}.")
                loss.backward()  # type: ignore[no-untyped-call]
                if input_BTH.grad is None:
                    raise RuntimeError("expected a gradient behind the last layer, got none")
                found.append(input_BTH.grad)
        return found

    def _tell(self) -> None:
        self._done += 1
        if self._progress is not None:
            # A pass goes up through all layers, and down to the lowest one in scope.
            layers = 2 * self._stream.layers - self._lowest
            self._progress(self._first + len(self._ids) * self._done // layers)
