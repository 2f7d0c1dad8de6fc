"""Types of quantized weights: codes, scales and their layout. There is no arithmetic here.

Shapes: N = out features, K = in features, G = groups of a row (`ceil(K / group_size)`), B = flat blocks
(`ceil(N*K / group_size)`).
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from permille.choices import choice_of


class Scheme(StrEnum):
    """Coding of weights (FORMAT 4.2). A code has 4 bits. With INT8 it has 8, and with SOURCE 4 or 8."""

    NF4 = "nf4"
    INT4 = "int4"
    INT8 = "int8"
    SOURCE = "source"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantizedTensor:
    """A weight matrix in codes.

    Attributes:
        scheme: the meaning of the codes.
        shape: (N, K) of the weight.
        group_size: the number of weights that share a scale. NF4 counts them along the flat row-major matrix,
            the other schemes along a row.
        packed: the codes, uint8 in flat row-major order. Codes of four bits: [ceil(N*K / 2)], two in a byte,
            the first in the high nibble. If N*K is odd, the last low nibble is 0. Codes of eight bits (INT8,
            and some of SOURCE): [N*K], the bytes of int8.
        scales: float32, all finite. NF4 has the largest absolute value of each block, [B]. INT4, INT8 and
            SOURCE have scales [N, G]. Only SOURCE may have negative scales. Its scales are exact in float16.
        minima: numbers that are added to code times scale, [N, G]. Only some four-bit weights of SOURCE have
            them.
    """

    scheme: Scheme
    shape: tuple[int, int]
    group_size: int
    packed: NDArray[np.uint8]
    scales: NDArray[np.float32]
    minima: NDArray[np.float32] | None = None

    @property
    def bits(self) -> int:
        """Return the number of bits of a code. For SOURCE, the size of `packed` decides."""
        # A GGUF file mixes types, so tensors of one package may differ.
        own = self.scheme is Scheme.SOURCE and self.packed.size == self.shape[0] * self.shape[1]
        return 8 if own else bits_of(self.scheme)

    def __post_init__(self) -> None:
        """Turn the scheme into an enum member. Raise InputError if it does not exist."""
        object.__setattr__(self, "scheme", choice_of(Scheme, self.scheme, "a scheme"))


def rows_of(weight: QuantizedTensor, first: int, last: int) -> QuantizedTensor:
    """Return some rows of a weight, as a view of its codes and scales.

    Args:
        weight: [N, K].
        first: the first row.
        last: the row after the last.

    Raises:
        ValueError: a byte, or a block of NF4, is shared with other rows.
    """
    columns = weight.shape[1]
    begin, end = (row * columns for row in (first, last))
    size = weight.group_size
    if begin * weight.bits % 8 or end * weight.bits % 8 or (weight.scheme is Scheme.NF4 and begin % size):
        raise ValueError(f"rows {first} to {last} of {columns} weights share a byte or a block with others")
    # The last block may reach beyond these rows. Its scale is right for the weights within them.
    blocks = slice(begin // size, -(-end // size)) if weight.scheme is Scheme.NF4 else slice(first, last)
    return QuantizedTensor(
        scheme=weight.scheme,
        shape=(last - first, columns),
        group_size=size,
        packed=weight.packed[begin * weight.bits // 8 : end * weight.bits // 8],
        scales=weight.scales[blocks],
        minima=None if weight.minima is None else weight.minima[blocks],
    )


def bits_of(scheme: Scheme) -> int:
    """Return the number of bits of a code. SOURCE has 4 or 8, and this returns 4."""
    return 8 if scheme is Scheme.INT8 else 4


def packed_size(bits: int, shape: tuple[int, int]) -> int:
    """Return the number of bytes that hold the codes of a weight of this shape."""
    return (shape[0] * shape[1] * bits + 7) // 8


def scales_shape(scheme: Scheme, shape: tuple[int, int], group_size: int) -> tuple[int, ...]:
    """Return the shape of the scales: [B] flat blocks for NF4, [N, G] groups of a row otherwise."""
    rows, columns = shape
    match choice_of(Scheme, scheme, "a scheme"):
        case Scheme.NF4:
            return (-(-rows * columns // group_size),)
        case Scheme.INT4 | Scheme.INT8 | Scheme.SOURCE:
            return (rows, -(-columns // group_size))
