"""A four-bit weight as the kernels take it, and its rows as floats (FORMAT 4.2): in C, or in numpy without.

Shapes: N, K = out and in features; R = rows of a range.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from permille.native.arrays import check_array, check_range, check_writable
from permille.native.library import load
from permille.quantization.nf4 import NF4_CODES
from permille.quantization.source import check_quantized
from permille.quantization.types import QuantizedTensor, Scheme

CODES: dict[Scheme, NDArray[np.float32]] = {
    Scheme.NF4: NF4_CODES,
    Scheme.INT4: np.arange(-8, 8, dtype=np.float32),
}
"""What the 16 codes of a scheme stand for, before the scale."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedRows:
    """A view of one weight [N, K]: sizes, types and contiguity are checked once, when it is made by `of`.

    Attributes:
        packed: uint8 [ceil(N*K / 2)], may be a read-only map of the package's file.
        scales: float32, nf4 one for each `group_size` flat weights, int4 [N, ceil(K / group_size)].
    """

    packed: NDArray[np.uint8]
    scales: NDArray[np.float32]
    scheme: Scheme
    group_size: int
    shape: tuple[int, int]

    @classmethod
    def of(cls, quantized: QuantizedTensor) -> "PackedRows":
        """Borrow the arrays of a quantized tensor; what is not contiguous is copied.

        Raises:
            InputError: as many codes or scales as the shape does not ask for.
        """
        check_quantized(quantized)
        return cls(
            packed=np.ascontiguousarray(quantized.packed),
            scales=np.ascontiguousarray(quantized.scales),
            scheme=Scheme(quantized.scheme),
            group_size=quantized.group_size,
            shape=quantized.shape,
        )

    @property
    def line(self) -> int:
        """Weights after which groups begin anew: a row for int4, the whole matrix for nf4."""
        rows, columns = self.shape
        return columns if self.scheme is Scheme.INT4 else rows * columns


def dequantize_rows(weight: PackedRows, first: int, last: int, out: NDArray[np.float32]) -> None:
    """Rows first..last to `out` float32 [last - first, K], bit for bit `permille.quantization.dequantize`.

    Raises:
        InputError: a range outside the weight, or an `out` that does not fit.
    """
    _check_rows(weight, first, last, out, np.float32)
    library = load()
    if library is None:
        out[...] = decode_rows(weight, first, last)
    else:
        library.call("dequantize_f32", *_flat(weight, first, last), out)


def dequantize_rows_bf16(weight: PackedRows, first: int, last: int, out: NDArray[np.uint16]) -> None:
    """As `dequantize_rows`, each float32 rounded once to bfloat16, ties to even; `out` uint16.

    Raises:
        InputError: as `dequantize_rows`.
    """
    _check_rows(weight, first, last, out, np.uint16)
    library = load()
    if library is None:
        out[...] = bf16_of(decode_rows(weight, first, last))
    else:
        library.call("dequantize_bf16", *_flat(weight, first, last), out)


def decode(weight: PackedRows, flat: NDArray[np.int64]) -> NDArray[np.float32]:
    """The weights at flat indices, in any shape: one float32 product each."""
    codes = (weight.packed[flat >> 1] >> np.where(flat & 1, 0, 4).astype(np.uint8)) & np.uint8(15)
    line, column = np.divmod(flat, weight.line)
    groups = -(-weight.line // weight.group_size)
    scales = weight.scales.reshape(-1)[line * groups + column // weight.group_size]
    w: NDArray[np.float32] = CODES[weight.scheme][codes] * scales
    return w


def decode_rows(weight: PackedRows, first: int, last: int) -> NDArray[np.float32]:
    """Rows first..last, [R, K]."""
    columns = weight.shape[1]
    start, stop = first * columns, last * columns
    packed = weight.packed[start // 2 : (stop + 1) // 2]
    codes = np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)[start % 2 :][: stop - start]
    w_RK: NDArray[np.float32] = CODES[weight.scheme][codes].reshape(last - first, columns)
    if weight.scheme is Scheme.INT4:
        w_RK *= np.repeat(weight.scales[first:last], weight.group_size, axis=1)[:, :columns]
    else:
        group = weight.group_size
        scales = np.repeat(weight.scales[start // group : -(-stop // group)], group)
        w_RK *= scales[start % group :][: stop - start].reshape(w_RK.shape)
    return w_RK


def bf16_of(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Nearest bfloat16, ties to even, as uint16; every NaN becomes 0x7fc0."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, np.uint32(0x7FC0), rounded).astype(np.uint16)


def _check_rows(
    weight: PackedRows, first: int, last: int, out: NDArray[np.generic], dtype: type[np.generic]
) -> None:
    check_range(first, last, weight.shape[0])
    check_array("out", out, dtype, (last - first, weight.shape[1]))
    check_writable("out", out)


def _flat(weight: PackedRows, first: int, last: int) -> tuple[NDArray[np.generic] | int, ...]:
    columns = weight.shape[1]
    codes = CODES[weight.scheme]
    return (
        weight.packed, weight.scales, codes, weight.group_size, weight.line, first * columns, last * columns
    )  # fmt: skip
