"""A four-bit weight as the kernels take it, and its rows as numpy decodes them (FORMAT 4.2).

Shapes: N, K = out and in features; R = rows of a range.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
