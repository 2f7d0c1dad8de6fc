"""Sums of `coefficient * bit` over many steps: what replay spends its time on.

For every bit position of the generator's stream: `sum_t c_t * bit_t`. A centred binomial is a sum of bits, so
replay needs nothing else. Steps are taken 16 at a time: a 16 x 16 bit transpose turns their words into one
16-bit index per position, and a table of the 65,536 subset sums of their coefficients turns 16 multiply-adds
into one look-up (`make bench-replay`). Where the native kernels are built, they do the same (ADR 92).

Shapes: G = 16 steps of a group, B = generator blocks, L = 8 lanes of 16 bits in a block, E = table entries.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from permille.native.library import load
from permille.native.replay import replay_sums
from permille.zo.philox import BLOCK_BITS, Words, encrypt

GROUP = 16

_LANES = BLOCK_BITS // GROUP
_STAGES = tuple(
    (width, np.uint64(int("".join(("0" * width + "1" * width) * (32 // width)), 2))) for width in (8, 4, 2, 1)
)

Integers = NDArray[np.signedinteger]


def bit_sums(
    *,
    seed: int,
    block_B: Words,
    tensor_B: Words,
    steps: Sequence[int],
    queries: Sequence[int],
    coefficients: NDArray[np.int64],
) -> NDArray[np.int64]:
    """`sum_i coefficients[i] * bit(steps[i], queries[i], position)` for all 128 positions of each block.

    Args:
        block_B, tensor_B: counter words 0 and 1 of the blocks, uint64.
        steps, queries, coefficients: one direction each; the sum of |coefficients| is below 2**63.

    Returns:
        int64 [B * 128], in the order of the generator's bits.
    """
    library = load()
    if library is not None:
        return replay_sums(
            library,
            seed=seed,
            block_B=np.ascontiguousarray(block_B),
            tensor_B=np.ascontiguousarray(tensor_B),
            step_D=np.array(steps, dtype=np.int64),
            query_D=np.array(queries, dtype=np.int64),
            coefficient_D=np.ascontiguousarray(coefficients),
        )
    small = int(np.abs(coefficients).sum()) < 1 << 31
    dtype: np.dtype[np.signedinteger] = np.dtype(np.int32 if small else np.int64)
    sums_GBL = np.zeros((GROUP, len(block_B), _LANES), dtype=dtype)
    scratch = _Scratch(len(block_B), dtype)
    for first in range(0, len(coefficients), GROUP):
        group = slice(first, first + GROUP)
        counter = (block_B, tensor_B, _column(steps[group]), _column(queries[group]))
        scratch.add(counter, seed, _subset_sums(coefficients[group], dtype), sums_GBL)
    return sums_GBL.transpose(1, 2, 0).reshape(-1).astype(np.int64)


class _Scratch:
    """Arrays kept between groups, because allocating them costs more than using them."""

    def __init__(self, blocks: int, dtype: np.dtype[np.signedinteger]) -> None:
        self._words = np.empty((6, GROUP, blocks), dtype=np.uint64)
        self._pairs_GB2 = np.empty((GROUP, blocks, 2), dtype=np.uint64)
        self._index_GBL = np.empty((GROUP, blocks, _LANES), dtype=np.intp)
        self._found_GBL = np.empty((GROUP, blocks, _LANES), dtype=dtype)

    def add(
        self, counter: tuple[Words, Words, Words, Words], seed: int, table_E: Integers, sums_GBL: Integers
    ) -> None:
        """Add the table's entry of every bit position to `sums_GBL`."""
        x0, x1, x2, x3, p0, p1 = self._words
        for word, start in zip((x0, x1, x2, x3), counter, strict=True):
            word[...] = start
        encrypt((x0, x1, x2, x3), (p0, p1), seed)
        for half, (low, high) in enumerate(((x0, x1), (x2, x3))):
            np.left_shift(high, np.uint64(32), out=p0)
            np.bitwise_or(low, p0, out=self._pairs_GB2[:, :, half])
        _transpose_bits(self._pairs_GB2.reshape(GROUP, -1), p0.reshape(-1), p1.reshape(-1))
        np.copyto(
            self._index_GBL, self._pairs_GB2.astype("<u8", copy=False).view("<u2").reshape(sums_GBL.shape)
        )
        np.take(table_E, self._index_GBL, out=self._found_GBL, mode="clip")
        np.add(sums_GBL, self._found_GBL, out=sums_GBL)


def _transpose_bits(rows_GW: Words, swap_S: Words, shifted_S: Words) -> None:
    """Transpose the 16 x 16 bits of every 16-bit lane, in place: bit i of row g becomes bit g of row i.

    The swap network of Hacker's Delight, section 7-3, on four lanes a word.
    """
    words = rows_GW.shape[1]
    for width, mask in _STAGES:
        pairs = rows_GW.reshape(GROUP // (2 * width), 2, width, words)
        upper, lower = pairs[:, 0], pairs[:, 1]
        swap, shifted = swap_S.reshape(upper.shape), shifted_S.reshape(upper.shape)
        np.right_shift(upper, np.uint64(width), out=swap)
        np.bitwise_xor(swap, lower, out=swap)
        np.bitwise_and(swap, mask, out=swap)
        np.bitwise_xor(lower, swap, out=lower)
        np.left_shift(swap, np.uint64(width), out=shifted)
        np.bitwise_xor(upper, shifted, out=upper)


def _subset_sums(coefficients_G: NDArray[np.int64], dtype: np.dtype[np.signedinteger]) -> Integers:
    """Entry e is the sum of the coefficients whose bit is set in e."""
    table_E = np.zeros(1 << GROUP, dtype=dtype)
    for index, c in enumerate(coefficients_G.astype(dtype)):
        table_E[1 << index : 2 << index] = table_E[: 1 << index] + c
    for index in range(len(coefficients_G), GROUP):
        table_E[1 << index : 2 << index] = table_E[: 1 << index]
    return table_E


def _column(numbers: Sequence[int]) -> Words:
    """A group's counter word as [16, 1]; a short group is filled with zeros, whose coefficient is none."""
    column_G = np.zeros(GROUP, dtype=np.uint64)
    column_G[: len(numbers)] = numbers
    return column_G[:, None]
