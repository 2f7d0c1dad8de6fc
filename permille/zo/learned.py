"""Learned directions: `z = U b`, and the states that they add up to (FORMAT 6.5, 7.5).

`U` is int8 and `b` has signs only, so everything is an integer. Products run in floating point where that is
exact: no sum of absolute values, and so no partial sum in any order, may pass 2**24 in float32 or 2**53 in
float64. A state needs U once, whatever the number of steps: `s = U @ (sum_t c_t b_t)`.

Shapes: K = masked weights, R = rank, D = directions, Q = queries.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille.zo.lattice import STATE_LIMIT
from permille.zo.layers import Basis
from permille.zo.philox import BLOCK_BITS, WORDS, philox4x32_10

TENSOR_ID = (1 << 32) - 1
"""Counter word 1 of the generator for `b`: no tensor has it (FORMAT 6.5)."""

_ROWS = 1 << 14
_DIRECTIONS = 4096
_FLOAT32_EXACT = 1 << 24


def signs(*, seed: int, steps: Sequence[int], queries: Sequence[int], rank: int) -> NDArray[np.int8]:
    """`b` of each direction, -1 or 1, int8 [d, rank]; steps and queries are d numbers each."""
    blocks = -(-rank // BLOCK_BITS)
    block_DB = np.tile(np.arange(blocks, dtype=np.uint64), (len(steps), 1))
    step_D1 = np.asarray(steps, dtype=np.uint64).reshape(-1, 1)
    query_D1 = np.asarray(queries, dtype=np.uint64).reshape(-1, 1)
    words = philox4x32_10((block_DB, TENSOR_ID, step_D1, query_D1), seed)
    packed = np.empty((len(steps), blocks, WORDS), dtype="<u4")
    for index, word in enumerate(words):
        packed[:, :, index] = word
    bits_DR = np.unpackbits(packed.view(np.uint8).reshape(len(steps), -1), axis=1, bitorder="little")
    signs_DR: NDArray[np.int8] = bits_DR[:, :rank].view(np.int8) * np.int8(2) - np.int8(1)
    return signs_DR


def product(basis: Basis, a_RQ: NDArray[np.int64], weights: slice = slice(None)) -> NDArray[np.int64]:
    """`U @ a`, exact, int64 [k, q].

    Args:
        weights: the rows that are wanted; all of them by default.

    Raises:
        InputError: the product could leave the exact range of FORMAT 7.3.
    """
    largest = max(int(a_RQ.max()), -int(a_RQ.min()))
    if basis.bound * largest > STATE_LIMIT:
        raise InputError(f"expected a product within 2**53, got up to {basis.bound * largest}")
    exact_in_32 = basis.bound * largest <= _FLOAT32_EXACT
    dtype: np.dtype[np.floating] = np.dtype(np.float32 if exact_in_32 else np.float64)
    u_KR, right_RQ = basis.u_KR[weights], a_RQ.astype(dtype)
    out_KQ = np.empty((len(u_KR), a_RQ.shape[1]), dtype=np.int64)
    for first in range(0, len(out_KQ), _ROWS):
        rows = slice(first, first + _ROWS)
        out_KQ[rows] = u_KR[rows].astype(dtype) @ right_RQ
    return out_KQ


def combined_signs(
    *, seed: int, rank: int, steps: NDArray[np.int64], queries: NDArray[np.int64], c_D: NDArray[np.int64]
) -> NDArray[np.int64]:
    """`sum_d c_d * b_d`, int64 [rank]; the sum of |c| is within FORMAT 7.3."""
    total_R = np.zeros(rank, dtype=np.int64)
    for first in range(0, len(c_D), _DIRECTIONS):
        part = slice(first, first + _DIRECTIONS)
        b_DR = signs(seed=seed, steps=steps[part].tolist(), queries=queries[part].tolist(), rank=rank)
        total_R += c_D[part] @ b_DR.astype(np.int64)
    return total_R
