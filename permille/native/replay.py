"""Sums of `coefficient * bit` over many directions in C: bit for bit `permille.zo.bit_sums.bit_sums`.

Shapes: B = generator blocks, D = directions.
"""

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille.native.arrays import check_array
from permille.native.library import Library

_LARGEST = (1 << 60) - 1
_BLOCK_BITS = 128


def replay_sums(
    library: Library,
    *,
    seed: int,
    block_B: NDArray[np.uint64],
    tensor_B: NDArray[np.uint64],
    step_D: NDArray[np.int64],
    query_D: NDArray[np.int64],
    coefficient_D: NDArray[np.int64],
) -> NDArray[np.int64]:
    """`sum_d coefficient[d] * bit(step[d], query[d], position)`, int64 [B * 128] in the generator's order.

    One thread; spans of blocks may be given to several. The sum of |coefficients| is below 2**63.

    Raises:
        InputError: other types or shapes, or a coefficient of 2**60 and more.
    """
    check_array("blocks", block_B, np.uint64, (None,))
    check_array("tensors", tensor_B, np.uint64, block_B.shape)
    check_array("coefficients", coefficient_D, np.int64, (None,))
    check_array("steps", step_D, np.int64, coefficient_D.shape)
    check_array("queries", query_D, np.int64, coefficient_D.shape)
    low, high = int(coefficient_D.min(initial=0)), int(coefficient_D.max(initial=0))
    if low < -_LARGEST or high > _LARGEST:
        raise InputError(f"expected coefficients within {_LARGEST}, got {low} to {high}")
    sums = np.zeros(len(block_B) * _BLOCK_BITS, dtype=np.int64)
    key = seed - (1 << 64) if seed >= 1 << 63 else seed
    directions = (step_D, query_D, coefficient_D, len(coefficient_D))
    library.call("bit_sums", key, block_B, tensor_B, len(block_B), *directions, sums)
    return sums
