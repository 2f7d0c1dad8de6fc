"""Torch modules that keep quantized weights in their codes.

bitsandbytes multiplies NF4 codes (see `_quant_state` for an exception). It decodes a whole matrix on a CPU,
for many rows, and in the reverse pass, and frees it after the product. All other codes are decoded in
tiles (some output rows at a time), with torch operations that every device has. An 8-bit embedding decodes
only the rows that are looked up. The head is decoded and multiplied tile by tile.

A linear layer sees the rows of all variants together, one variant after the other. The product with the codes
is computed once for all rows. Then each variant's own part is added to its rows.

# Legend: V variants, M rows of a variant; N, K = out and in features; R rows of a tile, or an adapter's rank;
# C masked weights of a layer, or an adapter's numbers; G groups of a row; D vocabulary, H hidden size;
# L hidden states whose logits are computed.
"""

from typing import Any, Protocol, assert_never

import bitsandbytes
import numpy as np
import torch
from bitsandbytes.functional import QuantState
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from permille.choices import AdapterKind
from permille.engines.light.threads import blocks
from permille.package.manifest import AdapterInfo
from permille.quantization.nf4 import BLOCK_SIZE, NF4_CODES
from permille.quantization.types import QuantizedTensor, Scheme
from permille.tensors import Q8_0, Q8_0_BYTES, Q8_0_WEIGHTS, RawTensor

_TILE_WEIGHTS = 1 << 22  # weights that are decoded at a time
_PRODUCTS = 1 << 24  # products of rows and masked weights that are in memory at a time
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Tiled(Protocol):
    """A matrix [N, K] that is decoded one range of rows at a time."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        ...

    def tile(self, rows: slice) -> Tensor:
        """Decode rows of the matrix to a new tensor [R, K]."""
        ...


class CodedWeight(nn.Module):
    """A quantized weight in the layout of the package."""

    def __init__(self, coded: QuantizedTensor, device: torch.device, dtype: torch.dtype) -> None:
        """Copy the codes to the device. The weight decodes to `dtype`."""
        super().__init__()
        self.shape, self._dtype = coded.shape, dtype
        self._scheme, self._group, self._bits = coded.scheme, coded.group_size, coded.bits
        self.register_buffer("packed", as_tensor(coded.packed, device))
        self.register_buffer("scales", as_tensor(coded.scales, device))
        self.register_buffer("minima", None if coded.minima is None else as_tensor(coded.minima, device))
        self.packed: Tensor
        self.scales: Tensor
        self.minima: Tensor | None
        self._state = self._quant_state()

    def product(self, x_MK: Tensor) -> Tensor:
        """Return `x W^T`, differentiable with respect to x."""
        if self._state is None:
            return tiled_product(x_MK, self)
        found: Tensor = bitsandbytes.matmul_4bit(x_MK, self.packed.view(-1, 1), self._state)
        return found

    def at(self, indices_C: NDArray[np.integer]) -> Tensor:
        """Return the weights at flat, increasing indices as float32, with the same bits that products use."""
        # `tile` decodes as products do. So in `SparseAdd`, `value - decoded` takes away exactly what the
        # product has added.
        columns, found = self.shape[1], []
        for rows in tiles(self):
            first, last = np.searchsorted(indices_C, [rows.start * columns, rows.stop * columns])
            if last > first:
                at = indices_C[first:last].astype(np.int64) - rows.start * columns
                found.append(self.tile(rows).view(-1)[as_tensor(at, self.packed.device)].float())
        return torch.cat(found) if found else torch.empty(0, device=self.packed.device)

    def tile(self, rows: slice) -> Tensor:
        """Decode rows to [R, K] as `permille.quantization.dequantize` does, and round them to the dtype."""
        columns = self.shape[1]
        first, last = rows.start * columns, rows.stop * columns
        return self._decoded(first, last, rows).view(-1, columns).to(self._dtype)

    def _quant_state(self) -> QuantState | None:
        # bitsandbytes 0.50 reads wrong scales on AVX-512 if blocks reach across rows (ADR 13). Without a
        # state, `product` decodes such a matrix tile by tile.
        if self._scheme is not Scheme.NF4 or self.shape[1] % BLOCK_SIZE:
            return None
        return QuantState(
            absmax=self.scales,
            shape=torch.Size(self.shape),
            code=torch.from_numpy(NF4_CODES).to(self.scales.device),
            blocksize=BLOCK_SIZE,
            quant_type="nf4",
            dtype=self._dtype,
        )

    def _decoded(self, first: int, last: int, rows: slice) -> Tensor:
        """Decode the codes `first` to `last` to float32, flat."""
        codes = self._codes(first, last)
        match self._scheme:
            case Scheme.NF4:
                levels = torch.from_numpy(NF4_CODES).to(codes.device)[codes.int()]
            case Scheme.INT4 | Scheme.INT8 | Scheme.SOURCE if self.minima is None:
                levels = (codes.view(torch.int8) - (0 if self._bits == 8 else 8)).float()
            case Scheme.INT4 | Scheme.INT8 | Scheme.SOURCE:
                levels = codes.float()
            case other:
                assert_never(other)
        weights = levels * self._spread(self.scales, first, last, rows)
        return weights if self.minima is None else weights + self._spread(self.minima, first, last, rows)

    def _codes(self, first: int, last: int) -> Tensor:
        if self._bits == 8:
            # These codes have the scheme INT8, or SOURCE with a Q8_0 tensor.
            return self.packed[first:last]
        # FORMAT 4.2: the first code is in the high half of a byte. A tile may start or end within a byte.
        pairs = self.packed[first // 2 : (last + 1) // 2]
        return torch.stack([pairs >> 4, pairs & 15], dim=1).view(-1)[first % 2 :][: last - first]

    def _spread(self, heads: Tensor, first: int, last: int, rows: slice) -> Tensor:
        """Repeat the number of each group in `heads` (scales or minima) for each code of the group."""
        if self._scheme is Scheme.NF4:  # groups run along the flat matrix, not along rows
            begin = first // self._group
            part = heads.view(-1)[begin : -(-last // self._group)].repeat_interleave(self._group)
            return part[first - begin * self._group :][: last - first]
        return heads[rows].repeat_interleave(self._group, dim=1)[:, : self.shape[1]].reshape(-1)


class SparseAdd(nn.Module):
    """`x (S - W)^T` for each variant: what the sparse values S add to a product with the weight W (ADR 12).

    Here, S and W have only the masked weights, and are 0 elsewhere.
    """

    def __init__(self, weight: CodedWeight, indices_C: NDArray[np.uint32]) -> None:
        """Index the masked weights by row and by column. `indices_C` are their flat indices, increasing."""
        super().__init__()
        rows, columns = self.shape = weight.shape
        device = weight.packed.device
        row_C, column_C = (part.astype(np.int32) for part in np.divmod(indices_C, np.uint32(columns)))
        order_C = np.argsort(column_C, kind="stable").astype(np.int32)
        arrays = {
            "row_start_N1": np.searchsorted(row_C, np.arange(rows + 1)).astype(np.int32),
            "column_C": column_C,
            # The same masked weights, ordered by column for the reverse pass.
            "column_start_K1": np.searchsorted(column_C[order_C], np.arange(columns + 1)).astype(np.int32),
            "row_C": row_C[order_C],
            "order_C": order_C,
        }
        for name, array in arrays.items():
            self.register_buffer(name, as_tensor(array, device))
        self.register_buffer("decoded_C", weight.at(indices_C))
        self.row_start_N1: Tensor
        self.column_C: Tensor
        self.column_start_K1: Tensor
        self.row_C: Tensor
        self.order_C: Tensor
        self.decoded_C: Tensor

    def forward(self, x_VMK: Tensor, values_VC: Tensor) -> Tensor:
        """Return the added part, float32 [V, M, N]."""
        found: Tensor = _SparseProduct.apply(  # type: ignore[no-untyped-call]
            x_VMK.float(), values_VC - self.decoded_C, self
        )
        return found

    def product(self, x_MK: Tensor, value_C: Tensor) -> Tensor:
        """Return `x S^T` [M, N], where S has these values at the mask and is 0 elsewhere."""
        return _sparse_rows(x_MK, self.column_C, self.row_start_N1, value_C)

    def back(self, d_MN: Tensor, value_C: Tensor) -> Tensor:
        """Return `d S` [M, K]."""
        return _sparse_rows(d_MN, self.row_C, self.column_start_K1, value_C[self.order_C])

    def gradient(self, d_MN: Tensor, x_MK: Tensor) -> Tensor:
        """Return `sum over m of d[m, row] x[m, column]` for each masked weight, [C]."""
        # Transpose once, so that each masked weight reads two contiguous rows.
        d_NM, x_KM = d_MN.T.contiguous(), x_MK.T.contiguous()
        found = torch.empty(len(self.column_C), device=x_MK.device)
        # Work in slices of the masked weights to bound the memory. A slice has one product for each of its
        # weights and each row of x.
        for part in blocks(len(found), max(1, _PRODUCTS // len(x_MK))):
            order = self.order_C[part]
            found[order] = (d_NM[self.row_C[part]] * x_KM[self.column_C[order]]).sum(dim=1)
        return found


class LowRank(nn.Module):
    """`scale (x A^T) B^T` of each variant: an adapter beside a weight (FORMAT 4.10)."""

    def __init__(self, adapter: AdapterInfo, a_RK: NDArray[np.float32], device: torch.device) -> None:
        """Keep the frozen A of LoRA-FA. For LoRA, only the shape of `a_RK` is used."""
        super().__init__()
        self._adapter, self._shape = adapter, a_RK.shape
        frozen = None if adapter.kind is AdapterKind.LORA else as_tensor(a_RK, device)
        self.register_buffer("a_RK", frozen)
        self.a_RK: Tensor | None

    def forward(self, x_VMK: Tensor, values_VC: Tensor) -> Tensor:
        """Return the added part, float32 [V, M, N]."""
        # FORMAT 4.10: the values are A, then B. If A is frozen, they are B alone.
        trained = self._shape[0] * self._shape[1] if self.a_RK is None else 0
        a = self.a_RK if self.a_RK is not None else values_VC[:, :trained].reshape(-1, *self._shape)
        b_VNR = values_VC[:, trained:].reshape(len(values_VC), -1, self._adapter.rank)
        low_VMR = x_VMK.float() @ a.transpose(-1, -2)
        return self._adapter.scale * (low_VMR @ b_VNR.transpose(-1, -2))


class CodedLinear(nn.Module):
    """`y = x W^T + b`, plus what the trained values of each variant add."""

    def __init__(self, weight: CodedWeight, bias_N: Tensor | None, added: SparseAdd | LowRank | None) -> None:
        """`added` is None for a layer without trained values."""
        super().__init__()
        self.weight, self.added = weight, added
        self.register_buffer("bias", bias_N)
        self.bias: Tensor | None
        self.values_VC = torch.empty(1, 0)
        """This layer's values. The engine sets them before each call. After losses and gradients, it clears
        them to free memory. After text generation, they stay until the next call."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [V * B, T, K], or [V * B * T, K] for OPT, to N columns."""
        y = self.weight.product(x.reshape(-1, x.shape[-1]))
        if self.bias is not None:
            y = y + self.bias
        if self.added is not None:
            # Sum in float32, so that the added part is rounded only once (ADR 18).
            # The rows of a variant are contiguous, so reshaping separates the variants.
            added: Tensor = self.added(x.reshape(len(self.values_VC), -1, x.shape[-1]), self.values_VC)
            y = (y.float() + added.view(y.shape)).to(y.dtype)
        return y.view(*x.shape[:-1], -1)


class CodedTable(nn.Module):
    """An embedding or a head [D, H] as the package stores it: 8-bit codes with scales, or floats."""

    def __init__(self, raw: RawTensor, device: torch.device) -> None:
        super().__init__()
        self.shape = (raw.shape[0], raw.shape[1])
        self.register_buffer("scales", None)
        self.scales: Tensor | None
        self.codes: Tensor
        if raw.dtype == Q8_0:
            block_BR = raw.data.reshape(-1, Q8_0_BYTES)
            scale_B = np.ascontiguousarray(block_BR[:, :2]).view("<f2").reshape(self.shape[0], -1)
            self.scales = as_tensor(scale_B, device)
            self.register_buffer(
                "codes", as_tensor(block_BR[:, 2:].view(np.int8).reshape(self.shape), device)
            )
        else:
            numbers = as_tensor(raw.data, device).view(_FLOATS[raw.dtype])
            self.register_buffer("codes", numbers.view(self.shape))

    def tile(self, rows: slice | Tensor) -> Tensor:
        """Decode some rows to a new float32 tensor."""
        found = self.codes[rows].float()
        if self.scales is None:
            return found
        return found * self.scales[rows].float().repeat_interleave(Q8_0_WEIGHTS, dim=-1)


class CodedEmbedding(nn.Module):
    """An embedding whose rows are multiplied by a factor that the model family defines."""

    def __init__(self, table: CodedTable, factor: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = table
        # Round the factor to the compute dtype first, as transformers does.
        self._factor, self._dtype = torch.tensor(factor, dtype=dtype).item(), dtype

    def forward(self, ids: Tensor) -> Tensor:
        """Look up the rows of token ids."""
        return self.table.tile(ids).to(self._dtype) * self._factor


class CodedHead(nn.Module):
    """Float32 logits of the hidden states that the engine selects.

    Logits in bfloat16 would hide the difference between two perturbed losses.
    """

    def __init__(self, table: CodedTable) -> None:
        super().__init__()
        self.table = table
        self.place_L: Tensor | slice = slice(None)
        """Indices of the hidden states whose logits are computed, with all sequences joined end to end.

        The engine sets the indices for each call.
        """

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [..., H] to [L, D]."""
        return tiled_product(hidden.reshape(-1, hidden.shape[-1])[self.place_L].float(), self.table)


def tiled_product(x_MK: Tensor, weight: Tiled) -> Tensor:
    """Return `x W^T`, differentiable with respect to x. The reverse pass decodes the matrix again."""
    found: Tensor = _TiledProduct.apply(x_MK, weight)  # type: ignore[no-untyped-call]
    return found


def tiles(weight: Tiled) -> list[slice]:
    """Return the ranges of rows that are decoded together."""
    rows, columns = weight.shape
    return blocks(rows, max(1, _TILE_WEIGHTS // columns))


def as_tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to the device, even if the device is a CPU.

    A tensor must not share memory with a package's arrays, which are read-only maps of a file.
    """
    return torch.tensor(array, device=device)


class _TiledProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, weight: Tiled) -> Tensor:
        # Keep the codes, because the decoded tiles would take the memory of the whole matrix.
        ctx.weight = weight
        y_MN = x_MK.new_empty(len(x_MK), weight.shape[0])
        for rows in tiles(weight):
            y_MN[:, rows] = functional.linear(x_MK, weight.tile(rows))
        return y_MN

    @staticmethod
    def backward(ctx: Any, *d: Tensor) -> Any:
        (d_MN,) = d
        # Sum in float32, also for bfloat16. For 256 terms, the error of the sum is 0.2 % in float32 and 1.9 %
        # in bfloat16.
        d_MK = torch.zeros(len(d_MN), ctx.weight.shape[1], device=d_MN.device)
        for rows in tiles(ctx.weight):
            d_MK += d_MN[:, rows] @ ctx.weight.tile(rows)
        return d_MK.to(d_MN.dtype), None


class _SparseProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_VMK: Tensor, value_VC: Tensor, entries: SparseAdd) -> Tensor:
        ctx.save_for_backward(x_VMK, value_VC)
        ctx.entries = entries
        return torch.stack([entries.product(*each) for each in zip(x_VMK, value_VC, strict=True)])

    @staticmethod
    def backward(ctx: Any, *d: Tensor) -> Any:
        (d_VMN,), (x_VMK, value_VC), entries = d, ctx.saved_tensors, ctx.entries
        d_x_VMK = d_value_VC = None
        if ctx.needs_input_grad[0]:
            d_x_VMK = torch.stack([entries.back(*each) for each in zip(d_VMN, value_VC, strict=True)])
        if ctx.needs_input_grad[1]:
            d_value_VC = torch.stack([entries.gradient(*each) for each in zip(d_VMN, x_VMK, strict=True)])
        return d_x_VMK, d_value_VC, None


def _sparse_rows(x_MK: Tensor, index_C: Tensor, start: Tensor, value_C: Tensor) -> Tensor:
    """Return `sum over entries c of row n of value[c] x[m, index[c]]`: [M, N].

    embedding_bag adds in a fixed order, so results are reproducible.
    """
    # Each output row n is a bag. It sums rows of `x_MK.T` (one row for each feature), weighted by the values.
    summed_NM = functional.embedding_bag(
        index_C, x_MK.T.contiguous(), start, mode="sum", per_sample_weights=value_C, include_last_offset=True
    )
    return summed_NM.T
