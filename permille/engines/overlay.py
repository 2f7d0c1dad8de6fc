"""A linear layer of a package: packed codes, and sparse values that replace what the codes decode to.

    y = x W^T + b,    W = dequantize(codes),    W[mask] = values

(Zeroth-order fine-tuning with extreme sparsity, equation 11, adds what is masked; ours replaces: ADR 3.)

A layer is dequantized once in a forward pass, for all variants: every variant sets all masked positions, so
nothing of the variant before it remains. Weights that do not fit the cache share one scratch buffer.

Where the compute dtype is coarser than float32 the weight carries the rounded value and the rest goes
through a sparse product of its own: a perturbation below half a unit in the last place of bf16 still
reaches the output (ADR 41).

Forward-mode: the tangent of the layer is `W x' + (z on the mask) x`; all directions of a call share the
primal `W x`.

# Legend: N, K = out and in features; C masked weights of the layer; V variants; Q directions; M flat tokens.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from permille.engines.dequantization import PackedWeight


class Overlay:
    """What the layers of one engine share: the values of the running forward pass, and a scratch weight."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self.differentiated = False
        self._values_VK: Tensor | None = None
        self._scratch = torch.empty(0, dtype=dtype, device=device)

    @contextmanager
    def using(self, values_VK: Tensor, *, differentiated: bool = False) -> Iterator[None]:
        """Run with these values, float32 [v, k]; `differentiated`: they may carry a tangent, and v = 1."""
        self._values_VK, self.differentiated = values_VK, differentiated
        try:
            yield
        finally:
            self._values_VK, self.differentiated = None, False

    def values(self, start: int, stop: int) -> Tensor:
        """[v, stop - start]."""
        if self._values_VK is None:
            raise RuntimeError("an overlay layer was called outside Overlay.using")
        return self._values_VK[:, start:stop]

    def scratch(self, size: int) -> Tensor:
        """At least `size` elements; the same memory for every layer, so valid until the next layer runs."""
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=self.dtype, device=self.device)
        return self._scratch


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
        self._cached = cached
        self._cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x [v * B, ..., K], the variants in blocks along the first axis; returns [v * B, ..., N]."""
        values_VC = self._overlay.values(*self._span)
        if self._overlay.differentiated:
            product: Tensor = _OverlayProduct.apply(x, values_VC[0], self)  # type: ignore[no-untyped-call]
            return product
        weight_NK = self._dequantized()
        y = x.new_empty(*x.shape[:-1], self.out_features)
        variants = values_VC.shape[0]
        for part, out, value_C in zip(x.chunk(variants), y.chunk(variants), values_VC, strict=True):
            self._product(part, weight_NK, value_C, out)
        return y

    def current_weight(self) -> Tensor:
        """The weight [N, K] of the product that ran last; valid until another layer runs."""
        return self._buffer()[: self._weight.size].view(self._weight.shape)

    def primal(self, x: Tensor, value_C: Tensor) -> Tensor:
        """The layer's output for one variant."""
        y = x.new_empty(*x.shape[:-1], self.out_features)
        self._product(x, self._dequantized(), value_C, y)
        return y

    def sparse_product(self, x: Tensor, z_QC: Tensor) -> Tensor:
        """`(z on the mask) x` for each of Q rows: [Q, ..., N] in the dtype of x."""
        return self._mask.product(x, z_QC)

    def _product(self, x: Tensor, weight_NK: Tensor, value_C: Tensor, out: Tensor) -> None:
        """Set the values and write `x W^T + b` to `out`, which is contiguous."""
        rounded_C = value_C.to(weight_NK.dtype)
        weight_NK.view(-1).index_copy_(0, self._mask.indices, rounded_C)
        x_MK, out_MN = x.reshape(-1, self.in_features), out.view(-1, self.out_features)
        if self.bias is None:
            torch.mm(x_MK, weight_NK.T, out=out_MN)
        else:
            torch.addmm(self.bias, x_MK, weight_NK.T, out=out_MN)
        if weight_NK.dtype.itemsize < value_C.dtype.itemsize:
            out_MN += self._mask.product(x_MK, (value_C - rounded_C.to(value_C.dtype))[None])[0]

    def _dequantized(self) -> Tensor:
        """The weight [N, K]; at masked positions it holds anything until values are set."""
        if self._cache is not None:
            return self.current_weight()
        if self._cached:
            self._cache = torch.empty(
                self._weight.buffer_size, dtype=self._overlay.dtype, device=self._overlay.device
            )
        return self._weight.dequantize_into(self._buffer())

    def _buffer(self) -> Tensor:
        return self._overlay.scratch(self._weight.buffer_size) if self._cache is None else self._cache


class SparsePattern:
    """Positions of the masked weights of one layer, and products with matrices that are zero elsewhere."""

    def __init__(self, indices: NDArray[np.uint32], shape: tuple[int, int], device: torch.device) -> None:
        rows, columns = shape
        self.shape = shape
        flat = indices.astype(np.int64)
        self.indices = torch.from_numpy(flat).to(device)
        ends = np.cumsum(np.bincount(flat // columns, minlength=rows))
        self._columns_C = torch.from_numpy((flat % columns).astype(np.int32)).to(device)
        self._ends_N = torch.from_numpy(ends.astype(np.int32)).to(device)

    def product(self, x: Tensor, z_QC: Tensor) -> Tensor:
        """x [..., K] times the transposes of Q sparse matrices with values z_QC, summed in float32 or finer.

        One compressed-row product for all Q, the matrices stacked: 2 to 3% of the dense product at a
        density of 0.001, where gathering columns costs half of it.

        Returns:
            [Q, ..., N] in the dtype of x.
        """
        queries, count = z_QC.shape
        rows, columns = self.shape
        dtype = torch.promote_types(x.dtype, torch.float32)
        x_KM = x.reshape(-1, columns).T.to(dtype).contiguous()
        offsets_Q1 = torch.arange(queries, dtype=torch.int32, device=x.device)[:, None] * count
        ends = (self._ends_N + offsets_Q1).flatten()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
            matrix = torch.sparse_csr_tensor(
                torch.cat([ends.new_zeros(1), ends]),
                self._columns_C.repeat(queries),
                z_QC.to(dtype).flatten(),
                (queries * rows, columns),
                check_invariants=False,
            )
        y_QNM = (matrix @ x_KM).view(queries, rows, -1)
        return y_QNM.transpose(1, 2).to(x.dtype).reshape(queries, *x.shape[:-1], rows)


class _OverlayProduct(torch.autograd.Function):
    """The layer as a function of x and of its sparse values, for forward-mode differentiation.

    The engine calls it under `vmap(jvp(...))`: the primal is computed once, only tangents have a direction
    axis.
    """

    @staticmethod
    def forward(x: Tensor, value_C: Tensor, layer: OverlayLinear) -> Tensor:
        return layer.primal(x, value_C)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, OverlayLinear], _: Tensor) -> None:
        x, _, layer = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_forward(x)
        ctx.layer = layer

    @staticmethod
    def jvp(ctx: Any, x_tangent: Tensor | None, value_tangent_C: Tensor, _: None) -> Tensor:
        (x,) = ctx.saved_tensors
        tangent: Tensor = _SparseProduct.apply(x, value_tangent_C, ctx.layer)  # type: ignore[no-untyped-call]
        if x_tangent is None:
            return tangent
        return tangent + functional.linear(x_tangent, ctx.layer.current_weight())

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
