"""Four-bit codes to floating point in torch, into a buffer that the caller owns.

In float32 the values are bit for bit those of `permille.quantization.dequantize`: one table look-up and one
float32 product a weight. Other dtypes are that float32 value, rounded once.

On a CPU the compiled kernels do it where they are there. Else torch does: a byte holds two codes, so the
table has 256 entries of two float32 each, looked up as one 64-bit integer: a quarter of the time of unpacking
nibbles.

# Legend: N, K = out and in features; G = ceil(K / group_size); R = rows of a chunk; S = group_size.
"""

import math
import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from permille.engines.row_threads import RowThreads
from permille.engines.sparse_pattern import as_numpy
from permille.native.library import load
from permille.native.products import MAX_TOKENS, packed_product
from permille.native.rows import CODES, PackedRows
from permille.native.weights import decoded_at, dequantize_rows, dequantize_rows_bf16
from permille.quantization.types import QuantizedTensor, Scheme

# On a CPU a chunk stays in the second-level cache between the look-up and the product.
_CPU_CHUNK_WEIGHTS = 1 << 18


class PackedWeight:
    """Codes and scales of one weight [N, K] on a device; on a CPU they stay where the package mapped them."""

    def __init__(
        self, quantized: QuantizedTensor, device: torch.device, threads: RowThreads | None = None
    ) -> None:
        """
        Raises:
            InputError: as many codes or scales as the shape does not ask for.
        """
        # The table is indexed without bounds checks on some devices: sizes are settled here, once.
        self.rows = PackedRows.of(quantized)
        self.shape = quantized.shape
        self._native = device.type == "cpu" and load() is not None
        self._threads = threads or RowThreads(1)
        self.scheme = quantized.scheme
        self.group_size = quantized.group_size
        self._packed = borrow(quantized.packed).to(device)
        self._scales = borrow(quantized.scales).to(device)
        self._pairs = _pair_table(quantized.scheme).to(device)

    @property
    def size(self) -> int:
        """Number of weights."""
        return self.shape[0] * self.shape[1]

    @property
    def buffer_size(self) -> int:
        """Elements that a buffer for `dequantize_into` needs: even, since a byte holds two codes."""
        return 2 * self._packed.numel()

    def dequantize_into(self, buffer: Tensor) -> Tensor:
        """Fill the flat `buffer`, `buffer_size` elements of any float dtype; returns its view [N, K]."""
        return self.dequantize_rows(0, self.shape[0], buffer)

    def dequantize_rows(self, first: int, last: int, buffer: Tensor) -> Tensor:
        """Fill the flat `buffer` with some rows; returns its view [last - first, K].

        Args:
            first: a bound of `tiles`; so is `last`.
            buffer: as many elements as the rows, and one more where their number is odd.
        """
        columns = self.shape[1]
        out_RK = buffer[: (last - first) * columns].view(-1, columns)
        if self._native and buffer.dtype in (torch.float32, torch.bfloat16):
            self._compiled(first, last, as_numpy(out_RK))
            return out_RK
        for start, stop in self._chunks(first * columns, last * columns):
            self._dequantize_chunk(buffer, start, stop, first * columns)
        return out_RK

    def _compiled(self, first: int, last: int, out_RK: NDArray[np.generic]) -> None:
        kernel: Any = dequantize_rows if out_RK.dtype == np.float32 else dequantize_rows_bf16

        def part(begin: int, end: int) -> None:
            kernel(self.rows, begin, end, out_RK[begin - first : end - first])

        self._threads.each(part, first, last, self.shape[1])

    def multiplies(self, x_MK: Tensor) -> bool:
        """Whether `product` takes this x: few tokens on a CPU with compiled kernels."""
        return self._native and len(x_MK) <= MAX_TOKENS and x_MK.dtype in (torch.float32, torch.bfloat16)

    def product(self, x_MK: Tensor) -> Tensor:
        """`x W^T` [M, N] float32, straight from the codes; x float32 [M, K] of few tokens."""
        y_MN = torch.empty(len(x_MK), self.shape[0])
        x, y = as_numpy(x_MK), as_numpy(y_MN)

        def part(first: int, last: int) -> None:
            packed_product(self.rows, x, y, first, last)

        self._threads.each(part, 0, *self.shape)
        return y_MN

    def decoded_at(self, indices: NDArray[np.uint32]) -> Tensor:
        """What the codes decode to at flat indices, float32, on a CPU."""
        return torch.from_numpy(decoded_at(self.rows, indices))

    def tiles(self, weights: int) -> list[tuple[int, int]]:
        """Ranges of rows of at most `weights` weights each where that can be, to dequantize one by one."""
        rows, columns = self.shape
        unit = self._unit()
        # Each range begins at a byte, and for NF4 at a group of weights, which may run across rows.
        aligned = unit // math.gcd(unit, columns)
        step = max(aligned, weights // columns // aligned * aligned)
        return [(first, min(first + step, rows)) for first in range(0, rows, step)]

    def _unit(self) -> int:
        """Weights between places where a byte begins, and a block of weights with their own scales."""
        return 2 * self.group_size if self.scheme is Scheme.NF4 else 2 * self.shape[1]

    def _chunks(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Flat ranges from `begin`, each a multiple of the unit but for the last."""
        unit = self._unit()
        limit = _CPU_CHUNK_WEIGHTS if self._packed.device.type == "cpu" else self.size
        step = max(unit, limit // unit * unit)
        return [(start, min(start + step, end)) for start in range(begin, end, step)]

    def _dequantize_chunk(self, buffer: Tensor, start: int, stop: int, begin: int) -> None:
        packed = self._packed[start // 2 : (stop + 1) // 2]
        target = buffer[start - begin : start - begin + 2 * packed.numel()]
        codes = target if target.dtype == torch.float32 else torch.empty_like(target, dtype=torch.float32)
        torch.index_select(self._pairs, 0, packed.to(torch.int32), out=codes.view(torch.int64))
        self._scale(codes[: stop - start], start)
        if codes is not target:
            target.copy_(codes)

    def _scale(self, codes: Tensor, start: int) -> None:
        """Multiply the codes of a chunk by their scales, in place."""
        if self.scheme is Scheme.NF4:
            first = start // self.group_size
            _scale_groups(codes[None], self._scales[None, first:], self.group_size)
        else:
            code_RK = codes.view(-1, self.shape[1])
            first = start // self.shape[1]
            _scale_groups(code_RK, self._scales[first : first + code_RK.shape[0]], self.group_size)


def borrow(array: NDArray[np.generic]) -> Tensor:
    """A tensor over the same memory. The memory may be a read-only map: whoever borrows never writes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
        return torch.from_numpy(array)


def _scale_groups(code_RK: Tensor, scale_RG: Tensor, group_size: int) -> None:
    """Rows in groups of `group_size`, the last one shorter where K is no multiple of it."""
    whole, tail = divmod(code_RK.shape[1], group_size)
    if whole:
        code_RGS = code_RK[:, : whole * group_size].view(len(code_RK), whole, group_size)
        code_RGS.mul_(scale_RG[:, :whole, None])
    if tail:
        code_RK[:, whole * group_size :].mul_(scale_RG[:, whole, None])


def _pair_table(scheme: Scheme) -> Tensor:
    """[256] int64: the two float32 codes of each byte, high nibble first, as one 64-bit pattern."""
    codes = CODES[scheme]
    pairs = np.stack([np.repeat(codes, 16), np.tile(codes, 16)], axis=1).astype(np.float32)
    return torch.from_numpy(np.ascontiguousarray(pairs)).view(torch.int64).flatten()
