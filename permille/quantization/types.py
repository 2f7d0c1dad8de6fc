"""What a quantized weight is: codes, scales and how they are laid out. Arrays only, no arithmetic.

Shapes: N = out features, K = in features, G = groups of a row (`ceil(K / group_size)`), B = flat blocks
(`ceil(N*K / group_size)`).
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from permille.choices import choice_of


class Scheme(StrEnum):
    """How four bits stand for a weight (FORMAT 4.2)."""

    NF4 = "nf4"
    INT4 = "int4"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantizedTensor:
    """One weight matrix in four bits a weight.

    Attributes:
        scheme: which code book.
        shape: (N, K) of the weight that was quantized.
        group_size: weights that share a scale: NF4 counts along the flat row-major matrix, INT4 along a row.
        packed: [ceil(N*K / 2)] uint8, two codes a byte in flat row-major order, the first in the high nibble;
            of an odd number of codes the last low nibble is 0.
        scales: float32, finite and not negative: NF4 absmax [B], INT4 scale [N, G].
    """

    scheme: Scheme
    shape: tuple[int, int]
    group_size: int
    packed: NDArray[np.uint8]
    scales: NDArray[np.float32]

    def __post_init__(self) -> None:
        """Refuse a scheme that does not exist (InputError)."""
        object.__setattr__(self, "scheme", choice_of(Scheme, self.scheme, "a scheme"))


def packed_size(shape: tuple[int, int]) -> int:
    """Bytes that hold the codes of a weight of this shape."""
    rows, columns = shape
    return (rows * columns + 1) // 2


def scales_shape(scheme: Scheme, shape: tuple[int, int], group_size: int) -> tuple[int, ...]:
    """Shape of the scales: NF4 [B] flat blocks, INT4 [N, G] groups of a row."""
    rows, columns = shape
    match choice_of(Scheme, scheme, "a scheme"):
        case Scheme.NF4:
            return (-(-rows * columns // group_size),)
        case Scheme.INT4:
            return (rows, -(-columns // group_size))
