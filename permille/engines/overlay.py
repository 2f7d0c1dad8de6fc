"""A linear layer of a package: packed codes, and sparse values that replace what the codes decode to.

    y = x W^T + b,    W = dequantize(codes),    W[mask] = values

(Zeroth-order fine-tuning with extreme sparsity, equation 11, adds what is masked; ours replaces: ADR 3.)

A layer is dequantized once in a forward pass, for all variants: every variant sets all masked positions, so
nothing of the variant before it remains. It is dequantized in tiles of rows that share one scratch buffer;
what fits the cache is kept whole.

Where the compute dtype is coarser than float32 the weight carries the rounded value and the rest goes
through a sparse product of its own: a perturbation below half a unit in the last place of bf16 still
reaches the output (ADR 41).

Forward-mode: the tangent of the layer is `W x' + (z on the mask) x`; all directions of a call share the
primal `W x`.

A text is written with one set of values. A kept weight carries them from token to token, until another call
sets others; a weight that is not kept multiplies a few tokens straight from its codes, and a sparse product
adds what the values change.

# Legend: N, K = out and in features; C masked weights of the layer; G groups of variants; Q directions;
# M flat tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from permille.engines.dequantization import PackedWeight
from permille.engines.sparse_pattern import SparsePattern

# On a CPU a tile is read from the last cache by the product that follows; a GPU takes a weight whole.
_TILE_WEIGHTS = 1 << 21


class FixedValues:
    """Values [k] that stay the same for many calls, and what layers derive from them."""

    def __init__(self, value_K: Tensor) -> None:
        self.value_K = value_K
        # Value minus what the code decodes to, of each layer that is not kept dequantized, by its start.
        self.changes: dict[int, Tensor] = {}


class Overlay:
    """What the layers of one engine share: the values of the running forward pass, and a scratch weight."""

    def __init__(self, device: torch.device, dtype: torch.dtype, *, int8_inputs: bool = False) -> None:
        """`int8_inputs`: layers see their inputs as int8 would hold them; for experiments."""
        self.device = device
        self.dtype = dtype
        self.int8_inputs = int8_inputs
        self.differentiated = False
        self.fixed: FixedValues | None = None
        self._values_GK: Tensor | None = None
        self._kept: dict[str, Tensor] = {}

    @contextmanager
    def using(
        self, values_GK: Tensor, *, differentiated: bool = False, fixed: FixedValues | None = None
    ) -> Iterator[None]:
        """Run with these values, float32 [g, k].

        Args:
            differentiated: they may carry a tangent, and g = 1.
            fixed: they are these; g = 1.
        """
        self._values_GK, self.differentiated, self.fixed = values_GK, differentiated, fixed
        try:
            yield
        finally:
            self._values_GK, self.differentiated, self.fixed = None, False, None

    def values(self, start: int, stop: int) -> Tensor:
        """[g, stop - start]."""
        if self._values_GK is None:
            raise RuntimeError("an overlay layer was called outside Overlay.using")
        return self._values_GK[:, start:stop]

    def scratch(self, size: int, name: str = "weight") -> Tensor:
        """`size` elements; for one name the same memory for every layer, so valid until the next layer runs.

        Memory that stays is never faulted in again: on a virtual machine that costs a millisecond a MiB.
        """
        if name not in self._kept or self._kept[name].numel() < size:
            # Dropped before the new one is made, or both would be resident.
            self._kept.pop(name, None)
            self._kept[name] = torch.empty(size, dtype=self.dtype, device=self.device)
        return self._kept[name][:size]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a layer leaves its output: in memory of the caller's, or multiplied onto what stands there."""

    out_MN: Tensor
    factor: bool


class OverlayLinear(nn.Module):
    """Takes the place of an `nn.Linear` whose weight is quantized and masked."""

    bias: Tensor | None

    def __init__(
        self,
        overlay: Overlay,
        weight: PackedWeight,
        indices: NDArray[np.uint32],
        start: int,
        *,
        cached: bool,
    ) -> None:
        """`indices` are flat and strictly increasing; `start` is their offset in the package's values."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_parameter("bias", None)
        self._overlay = overlay
        self._weight = weight
        self._span = (start, start + len(indices))
        self._mask = SparsePattern(indices, weight.shape, overlay.device)
        tile = _TILE_WEIGHTS if overlay.device.type == "cpu" else weight.size
        rows = weight.tiles(tile)
        marks = np.searchsorted(indices, [first * self.in_features for first, _ in rows]).tolist()
        # Rows of a tile, and its part of the masked weights.
        self._tiles = [
            (first, last, mark, until)
            for (first, last), mark, until in zip(rows, marks, [*marks[1:], len(indices)], strict=True)
        ]
        self._nothing = torch.empty(0, device=overlay.device)
        self._place: _Place | None = None
        # Where in the memory that layers share its output stands: (numbers a token before it, in all).
        self._among: tuple[int, int] | None = None
        self._cached = cached
        self._cache: Tensor | None = None
        # Whose values the cache holds; None where variants may have left any.
        self._holds: FixedValues | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x [g, ..., K], one block a group of variants along the first axis; returns [g, ..., N].

        One group takes any x; so do any groups where nothing is masked.
        """
        values_GC = self._overlay.values(*self._span)
        if self._overlay.differentiated:
            return self._differentiated(x, values_GC[0])
        x_MK = self.seen(x).reshape(-1, self.in_features)
        if self._overlay.fixed is not None and not self._cached and self._weight.multiplies(x_MK):
            y_MN = self._from_codes(x_MK, self._overlay.fixed, values_GC)
        else:
            y_MN = self._output(x, len(x_MK))
            groups = len(values_GC) if values_GC.shape[1] else 1
            self._by_tiles(x_MK.chunk(groups), values_GC, y_MN.chunk(groups))
        return y_MN.view(*x.shape[:-1], self.out_features)

    def stand_among(self, before: int, features: int) -> None:
        """From now on leave outputs in the memory "inner", `before` of `features` numbers a token further on,
        where no text is written and no tangent carried: whoever calls has done with them when others write
        there."""
        self._among = (before, features)

    def write_to(self, x: Tensor, out_MN: Tensor) -> Tensor:
        """As `forward`, into memory of the caller's; returns its view. Not for fixed values or tangents."""
        return self._placed(x, _Place(out_MN, factor=False))

    def multiply_onto(self, x: Tensor, out_MN: Tensor) -> Tensor:
        """`out *= forward(x)`, of which a tile exists at a time. Not for fixed values or tangents.

        The dtype must hold the values as they are.
        """
        return self._placed(x, _Place(out_MN, factor=True))

    def _output(self, x: Tensor, tokens: int) -> Tensor:
        """[M, N] to write to."""
        if self._place is not None:
            return self._place.out_MN
        if self._among is None or self._overlay.fixed is not None:
            return x.new_empty(tokens, self.out_features)
        before, features = self._among
        shared = self._overlay.scratch(tokens * features, "inner")
        return shared[tokens * before : tokens * (before + self.out_features)].view(tokens, -1)

    def _placed(self, x: Tensor, place: _Place) -> Tensor:
        self._place = place
        try:
            found: Tensor = self(x)
        finally:
            self._place = None
        return found

    def seen(self, x: Tensor) -> Tensor:
        """The input as the product takes it."""
        return through_int8(x) if self._overlay.int8_inputs else x

    def current_weight(self) -> Tensor:
        """The weight [N, K] of `primal`'s product; valid until another layer runs."""
        return self._buffer(self._weight.buffer_size)[: self._weight.size].view(self._weight.shape)

    def primal(self, x: Tensor, value_C: Tensor) -> Tensor:
        """The layer's output for one variant, the whole weight left in its buffer."""
        weight_NK = self._whole()
        self._holds = None
        self._mask.set(weight_NK, 0, value_C, 0)
        y = functional.linear(x, weight_NK, self.bias)
        self._add_rest(y, x, value_C)
        return y

    def sparse_product(self, x: Tensor, z_QC: Tensor) -> Tensor:
        """`(z on the mask) x` for each of Q rows: [Q, ..., N] in the dtype of x."""
        return self._mask.product(x, z_QC)

    def _differentiated(self, x: Tensor, value_C: Tensor) -> Tensor:
        # What torch makes outside of a Function belongs to the differentiation, and a buffer must not.
        # Without masked weights only x can have a tangent, and has none below the first mask.
        chosen_C = value_C if len(value_C) else self._nothing
        product: Tensor = _OverlayProduct.apply(x, chosen_C, self)  # type: ignore[no-untyped-call]
        return product

    def _by_tiles(self, parts: tuple[Tensor, ...], values_GC: Tensor, outs: tuple[Tensor, ...]) -> None:
        """Each group's rows of x times the weight with its values."""
        fixed = self._overlay.fixed
        kept = fixed is not None and self._holds is fixed
        self._holds = None
        for first, last, mark, until in self._tiles:
            tile_RK = self._tile(first, last)
            for group, (x_MK, out_MN) in enumerate(zip(parts, outs, strict=True)):
                if until > mark and not kept:
                    self._mask.set(tile_RK, first, values_GC[group, mark:until], mark)
                if self._place is None or not self._place.factor:
                    self._multiply(x_MK, tile_RK, out_MN[:, first:last], first, last)
                    continue
                part_MR = self._overlay.scratch(len(x_MK) * (last - first), "factor").view(len(x_MK), -1)
                self._multiply(x_MK, tile_RK, part_MR, first, last)
                out_MN[:, first:last] *= part_MR
        self._holds = fixed if self._cache is not None else None
        if values_GC.shape[1]:
            for x_MK, out_MN, value_C in zip(parts, outs, values_GC, strict=True):
                self._add_rest(out_MN, x_MK, value_C)

    def _from_codes(self, x_MK: Tensor, fixed: FixedValues, value_1C: Tensor) -> Tensor:
        """A few tokens times the weight as its codes have it, then what the values change."""
        wide_MK = x_MK.float()
        y_MN = self._weight.product(wide_MK)
        if value_1C.shape[1]:
            start = self._span[0]
            if start not in fixed.changes:
                fixed.changes[start] = value_1C - self._weight.decoded_at(self._mask.indices)
            change_1C = fixed.changes[start]
            if len(wide_MK) == 1:
                self._mask.add_token_product(wide_MK[0], change_1C[0], y_MN[0])
            else:
                self._mask.add_product(wide_MK, change_1C, y_MN[None])
        return (y_MN if self.bias is None else y_MN + self.bias).to(x_MK.dtype)

    def _multiply(self, x_MK: Tensor, tile_RK: Tensor, out_MR: Tensor, first: int, last: int) -> None:
        if self.bias is None:
            torch.mm(x_MK, tile_RK.T, out=out_MR)
        else:
            torch.addmm(self.bias[first:last], x_MK, tile_RK.T, out=out_MR)

    def _add_rest(self, y: Tensor, x: Tensor, value_C: Tensor) -> None:
        """Add to y the product with what rounding took from the values, if anything."""
        if self._overlay.dtype.itemsize < value_C.dtype.itemsize:
            rest_C = value_C - value_C.to(self._overlay.dtype).to(value_C.dtype)
            y += self._mask.product(x, rest_C[None])[0]

    def _tile(self, first: int, last: int) -> Tensor:
        """Rows of the weight; at masked positions they hold anything until values are set."""
        if self._cached:
            return self._whole()[first:last]
        size = (last - first) * self.in_features
        return self._weight.dequantize_rows(first, last, self._overlay.scratch(size + size % 2))

    def _whole(self) -> Tensor:
        """The weight [N, K]; at masked positions it holds anything until values are set."""
        size = self._weight.buffer_size
        if self._cache is not None:
            return self.current_weight()
        if self._cached:
            self._cache = torch.empty(size, dtype=self._overlay.dtype, device=self._overlay.device)
        return self._weight.dequantize_into(self._buffer(size))

    def _buffer(self, size: int) -> Tensor:
        return self._overlay.scratch(size) if self._cache is None else self._cache


def through_int8(x: Tensor) -> Tensor:
    """x [..., K] rounded to 8 bits and back, each token with its own symmetric scale: `max|x| / 127`."""
    scale = x.abs().amax(dim=-1, keepdim=True) / 127
    return torch.where(scale > 0, torch.round(x / scale) * scale, x)


class _OverlayProduct(torch.autograd.Function):
    """The layer as a function of x and of its sparse values, for forward-mode differentiation.

    The engine calls it under `vmap(jvp(...))`: the primal is computed once, only tangents have a direction
    axis.
    """

    @staticmethod
    def forward(x: Tensor, value_C: Tensor, layer: OverlayLinear) -> Tensor:
        return layer.primal(layer.seen(x), value_C)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, OverlayLinear], _: Tensor) -> None:
        x, _, layer = inputs  # Rounding of inputs is passed straight through by tangents.
        ctx.set_materialize_grads(False)
        ctx.save_for_forward(layer.seen(x))
        ctx.layer = layer

    @staticmethod
    def jvp(ctx: Any, x_tangent: Tensor | None, value_tangent_C: Tensor | None, _: None) -> Tensor:
        (x,) = ctx.saved_tensors
        terms: list[Tensor] = []
        if x_tangent is not None:
            terms.append(functional.linear(x_tangent, ctx.layer.current_weight()))
        if value_tangent_C is not None:
            terms.append(_SparseProduct.apply(x, value_tangent_C, ctx.layer))  # type: ignore[no-untyped-call]
        return sum(terms[1:], start=terms[0])

    @staticmethod
    def vmap(_: Any, in_dims: tuple[int | None, ...], *__: object) -> tuple[Tensor, int]:
        raise RuntimeError(f"expected tangents alone to have a direction axis, got axes {in_dims}")


class _SparseProduct(torch.autograd.Function):
    """`(z on the mask) x`, for one z or, under vmap, for all directions at once."""

    @staticmethod
    def forward(x: Tensor, z_C: Tensor, layer: OverlayLinear) -> Tensor:
        return layer.sparse_product(x, z_C[None])[0]

    @staticmethod
    def setup_context(*_: object) -> None:
        return None

    @staticmethod
    def vmap(
        _: Any, in_dims: tuple[int | None, int | None, None], x: Tensor, z: Tensor, layer: OverlayLinear
    ) -> tuple[Tensor, int]:
        x_dim, z_dim = in_dims[:2]
        if x_dim is not None or z_dim is None:
            raise RuntimeError(f"expected directions alone to have a batch axis, got axes {in_dims}")
        return layer.sparse_product(x, z.movedim(z_dim, 0)), 0
