"""The gated feed-forward part of a layer, `down(act(gate x) * (up x))`, in half the memory.

As transformers writes it, three arrays of the inner width exist at a time: the activated gate, `up x`, and
their product. Here there is one, which all layers share; the activation goes over it in blocks of rows, and
`up x` is multiplied onto it tile by tile. The same operations on the same numbers.

Blocks of transformers that have this form are known by their parts. Where a tangent is carried, where a text
is written, and in a compute dtype that is coarser than the values, the block runs as it was.

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
        for rows in inner_MN.split(max(1, _BLOCK // gate.out_features)):
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
        out = torch.empty_like(x)
        rows = max(1, _BLOCK // width)
        for part, into in zip(x.view(-1, width).split(rows), out.view(-1, width).split(rows), strict=True):
            into.copy_(self.norm(part))
        return out


def make_thrifty(layers: nn.ModuleList, overlay: Overlay) -> None:
    """Change the parts of decoder layers that have a known form; others stay as they are."""
    for layer in layers:
        for name, child in list(layer.named_children()):
            parts = {part for part, _ in child.named_children()}
            if parts == set(_MLP):
                setattr(layer, name, GatedMlp(child, overlay))
            elif not parts and any(True for _ in child.parameters()):
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
