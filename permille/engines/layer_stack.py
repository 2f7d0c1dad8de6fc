"""The decoder layers of a model of transformers, run in an order of our own.

transformers' decoder prepares embeddings, positions and rotary angles, calls its layers one by one, and ends
with a norm. Here each layer's place is taken by a slot. While a program is set, the slots note what each
layer would have been called with; the last one runs the program, which calls the layers as it likes: from a
hidden state that is known, for groups of variants, up to some layer only. What it returns goes on to the
norm. Without a program a slot is its layer, so generation runs as transformers has it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from permille.engines.packed_attention import PACKED, Segments

# Runs one layer: (index, hidden states [G, M, H]) -> hidden states [G, M, H].
RunLayer = Callable[[int, Tensor], Tensor]
# From the hidden states [1, M, H] that enter the first layer to those that go on to the final norm.
Program = Callable[[Tensor, RunLayer], Tensor]


class LayerStack:
    """Holds the layers of one model, whose `ModuleList` it fills with slots."""

    def __init__(self, layers: nn.ModuleList, config: Any) -> None:
        self._layers = list(layers)
        self._config = config
        self._program: Program | None = None
        self._segments: Segments | None = None
        self._entry: Tensor | None = None
        self._arguments: list[dict[str, Any]] = []
        for index, layer in enumerate(self._layers):
            layers[index] = _Slot(self, index, layer)

    def __len__(self) -> int:
        return len(self._layers)

    @contextmanager
    def running(self, program: Program, segments: Segments) -> Iterator[None]:
        """The decoder's next call runs the program, with attention over these sequences."""
        usual = self._config._attn_implementation
        # The modules read their config at each call; for this name transformers makes no mask.
        self._config._attn_implementation = PACKED
        self._program, self._segments = program, segments
        try:
            yield
        finally:
            self._config._attn_implementation = usual
            self._program, self._segments, self._entry, self._arguments = None, None, None, []

    def visit(self, index: int, hidden: Tensor, arguments: dict[str, Any]) -> Tensor:
        """What a slot does when the decoder calls it."""
        if self._program is None:
            output: Tensor = self._layers[index](hidden, **arguments)
            return output
        if index == 0:
            self._entry, self._arguments = hidden, []
        self._arguments.append(arguments)
        if index + 1 < len(self._layers):
            return hidden
        entry = self._entry
        if entry is None:
            raise RuntimeError("the decoder called its last layer without its first")
        return self._program(entry, self._run)

    def _run(self, index: int, hidden: Tensor) -> Tensor:
        output: Tensor = self._layers[index](hidden, **self._arguments[index], segments=self._segments)
        if hidden is self._entry and not (self._segments and self._segments.tangents):
            # The decoder's frame keeps it until its end, and nobody reads it any more.
            self._entry = None
            hidden.set_()  # type: ignore[call-overload]
        return output


class _Slot(nn.Module):
    def __init__(self, stack: LayerStack, index: int, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self._index = index
        self._visit = stack.visit

    def forward(self, hidden: Tensor, **arguments: Any) -> Tensor:
        return self._visit(self._index, hidden, arguments)
