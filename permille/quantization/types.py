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
    """Coding of weights (FORMAT 4.2): four bits each, eight for INT8, either for SOURCE."""

    NF4 = "nf4"
    INT4 = "int4"
    INT8 = "int8"
    SOURCE = "source"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantizedTensor:
    """A weight matrix in codes.

    Attributes:
        scheme: what codes stand for.
        shape: (N, K) of the weight that was quantized.
        group_size: weights that share a scale: NF4 counts along the flat row-major matrix, integers along a
            row.
        packed: uint8 in flat row-major order. [ceil(N*K / 2)], two codes a byte, the first in the high
            nibble; of an odd number of codes the last low nibble is 0. INT8, and SOURCE of eight bits: [N*K],
            the bytes of int8 codes.
        scales: float32, finite and not negative: NF4 absmax [B], INT4 and INT8 scale [N, G].
            The scales [N, G] of SOURCE have either sign, and each is exact in float16.
        minima: added to code times scale, like the scales of SOURCE [N, G]; only there, in four bits, and
            not always.
    """

    scheme: Scheme
    shape: tuple[int, int]
    group_size: int
    packed: NDArray[np.uint8]
    scales: NDArray[np.float32]
    minima: NDArray[np.float32] | None = None

    @property
    def bits(self) -> int:
        """Bits of a code; those of SOURCE are told by the number of bytes."""
        own = self.scheme is Scheme.SOURCE and self.packed.size == self.shape[0] * self.shape[1]
        return 8 if own else bits_of(self.scheme)

    def __post_init__(self) -> None:
        """Refuse a scheme that does not exist (InputError)."""
        object.__setattr__(self, "scheme", choice_of(Scheme, self.scheme, "a scheme"))


def rows_of(weight: QuantizedTensor, first: int, last: int) -> QuantizedTensor:
    """Return some rows of a weight, as a view of its codes and scales.

    Args:
        weight: [N, K].
        first: the first row.
        last: the row after the last.

    Raises:
        ValueError: a byte or, of NF4, a block begins before these rows.
    """
    columns = weight.shape[1]
    begin, end = (row * columns for row in (first, last))
    size = weight.group_size
    if begin * weight.bits % 8 or end * weight.bits % 8 or (weight.scheme is Scheme.NF4 and begin % size):
        raise ValueError(f"rows {first} to {last} of {columns} weights share a byte or a block with others")
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
    """Bits of a code, of SOURCE the fewest."""
    return 8 if scheme is Scheme.INT8 else 4


def packed_size(bits: int, shape: tuple[int, int]) -> int:
    """Bytes that hold the codes of a weight of this shape."""
    return (shape[0] * shape[1] * bits + 7) // 8


def scales_shape(scheme: Scheme, shape: tuple[int, int], group_size: int) -> tuple[int, ...]:
    """Shape of the scales: NF4 [B] flat blocks, integers [N, G] groups of a row."""
    rows, columns = shape
    match choice_of(Scheme, scheme, "a scheme"):
        case Scheme.NF4:
            return (-(-rows * columns // group_size),)
        case Scheme.INT4 | Scheme.INT8 | Scheme.SOURCE:
            return (rows, -(-columns // group_size))
