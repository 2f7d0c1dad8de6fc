"""Parts of a decoder layer in less memory than transformers takes for them, to rounding the same numbers.

The gated feed-forward part is `down(act(gate x) * (up x))`. As transformers writes it, three arrays of the
inner width exist at a time: the activated gate, `up x`, and their product. Here there is one, shared by all
layers; the activation goes over it in blocks of rows, and `up x` is multiplied onto it tile by tile. Queries,
keys and values of the attention before it stand in the same memory. Norms go in blocks of rows.

Parts are known by the names of theirs. Where a tangent is carried or a text is written all run as they were,
and the gated part also in a compute dtype that is coarser than the values. On a GPU nothing is changed: many
small operations would cost more there than the memory.

# Legend: M flat tokens, N inner width.
"""

import torch
from torch import Tensor, nn

from permille.engines.overlay import Overlay, OverlayLinear

_MLP = ("gate_proj", "up_proj", "down_proj", "act_fn")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
# What is done in blocks of rows has so many numbers at a time.
_BLOCK = 1 << 18


class GatedMlp(nn.Module):
    """Takes the place of a block whose three layers are `OverlayLinear`."""

    def __init__(self, block: nn.Module, overlay: Overlay) -> None:
        super().__init__()
        self.block = block
        self._overlay = overlay

    def forward(self, x: Tensor) -> Tensor:
        """x [g, ..., K]; returns the same shape."""
        overlay, block = self._overlay, self.block
        if overlay.differentiated or overlay.fixed is not None or overlay.dtype.itemsize < 4:
            whole: Tensor = block(x)
            return whole
        gate: OverlayLinear = block.gate_proj  # type: ignore[assignment]
        up: OverlayLinear = block.up_proj  # type: ignore[assignment]
        tokens = x.numel() // gate.in_features
        inner_MN = overlay.scratch(tokens * gate.out_features, "inner").view(tokens, -1)
        gate.write_to(x, inner_MN)
        step = max(1, _BLOCK // gate.out_features)
        for first in range(0, tokens, step):
            rows = inner_MN[first : first + step]
            rows.copy_(block.act_fn(rows))  # type: ignore[operator]
        product: Tensor = block.down_proj(up.multiply_onto(x, inner_MN))  # type: ignore[operator]
        return product


class InRowBlocks(nn.Module):
    """Takes the place of a norm, whose rows know nothing of each other: its temporaries are small."""

    def __init__(self, norm: nn.Module, overlay: Overlay) -> None:
        super().__init__()
        self.norm = norm
        self._overlay = overlay

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H]; returns the same shape."""
        width = x.shape[-1]
        if self._overlay.differentiated or x.numel() <= _BLOCK:
            whole: Tensor = self.norm(x)
            return whole
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        x_MH, out_MH = x.reshape(-1, width), out.view(-1, width)
        step = max(1, _BLOCK // width)
        for first in range(0, len(x_MH), step):
            rows = slice(first, first + step)
            out_MH[rows].copy_(self.norm(x_MH[rows]))
        return out


def make_thrifty(layers: nn.ModuleList, overlay: Overlay) -> None:
    """Change the parts of decoder layers that have a known form; others stay as they are."""
    if overlay.device.type != "cpu":
        return
    for layer in layers:
        for name, child in list(layer.named_children()):
            parts = {part for part, _ in child.named_children()}
            if parts == set(_MLP):
                setattr(layer, name, GatedMlp(child, overlay))
            elif type(child).__name__.endswith("Norm"):
                setattr(layer, name, InRowBlocks(child, overlay))
            elif parts >= set(_ATTENTION):
                _share(child)


def _share(attention: nn.Module) -> None:
    """Queries, keys and values are read before the feed-forward part begins, so they stand in its memory."""
    found = [getattr(attention, name) for name in _ATTENTION[:3]]
    features = sum(linear.out_features for linear in found)
    before = 0
    for linear in found:
        linear.stand_among(before, features)
        before += linear.out_features
