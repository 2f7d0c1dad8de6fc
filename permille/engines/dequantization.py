"""Four-bit codes to floating point in torch, into a buffer that the caller owns.

In float32 the values are bit for bit those of `permille.quantization.dequantize`: one table look-up and one
float32 product a weight. Other dtypes are that float32 value, rounded once.

A byte holds two codes. The table therefore has 256 entries of two float32 each, looked up as one 64-bit
integer: a quarter of the time of unpacking nibbles.

# Legend: N, K = out and in features; G = ceil(K / group_size); R = rows of a chunk; S = group_size.
"""

import math
import warnings

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from permille.errors import InputError
from permille.quantization.nf4 import NF4_CODES
from permille.quantization.types import QuantizedTensor, Scheme, packed_size, scales_shape

# On a CPU a chunk stays in the second-level cache between the look-up and the product.
_CPU_CHUNK_WEIGHTS = 1 << 18

_INT4_CODES = np.arange(-8, 8, dtype=np.float32)


class PackedWeight:
    """Codes and scales of one weight [N, K] on a device; on a CPU they stay where the package mapped them."""

    def __init__(self, quantized: QuantizedTensor, device: torch.device) -> None:
        """
        Raises:
            InputError: as many codes or scales as the shape does not ask for.
        """
        _check(quantized)
        self.shape = quantized.shape
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
        for start, stop in self._chunks(first * columns, last * columns):
            self._dequantize_chunk(buffer, start, stop, first * columns)
        return buffer[: (last - first) * columns].view(-1, columns)

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
    codes = NF4_CODES if scheme is Scheme.NF4 else _INT4_CODES
    pairs = np.stack([np.repeat(codes, 16), np.tile(codes, 16)], axis=1).astype(np.float32)
    return torch.from_numpy(np.ascontiguousarray(pairs)).view(torch.int64).flatten()


def _check(quantized: QuantizedTensor) -> None:
    """The table is indexed without bounds checks on some devices: sizes are settled here, once."""
    expected = (packed_size(quantized.shape),)
    if quantized.packed.shape != expected or quantized.packed.dtype != np.uint8:
        raise InputError(
            f"expected codes uint8 {expected} for a weight {quantized.shape}, "
            f"got {quantized.packed.dtype} {quantized.packed.shape}"
        )
    scales = scales_shape(quantized.scheme, quantized.shape, quantized.group_size)
    if quantized.scales.shape != scales or quantized.scales.dtype != np.float32:
        raise InputError(
            f"expected scales float32 {scales} for a weight {quantized.shape}, "
            f"got {quantized.scales.dtype} {quantized.scales.shape}"
        )
