"""Directions, their sums, perturbed values and the lattice's update in C: bit for bit `permille.zo`'s numpy.

`permille.zo` checks what it is asked for and owns the definitions; it calls these where `load` finds a
library. Here only types and sizes are checked, because behind a pointer nothing is.

Shapes: K = masked weights of all tensors, T = tensors, Q = queries, B = generator blocks, D = directions.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille.native.arrays import check_array, check_writable
from permille.native.library import Library

Direction = NDArray[np.int8] | NDArray[np.int32]

_LARGEST = (1 << 60) - 1
_BLOCK_BITS = 128


def direction_into(
    library: Library, out_K: NDArray[np.int8], *, seed: int, step: int, query: int, counts: Sequence[int]
) -> None:
    """The direction of one query: `counts[t]` signs for tensor t.

    Raises:
        InputError: `out_K` is not int8 [sum of counts].
    """
    counts_T = np.array(counts, dtype=np.int64)
    if counts_T.ndim != 1 or (counts_T < 0).any():
        raise InputError(f"expected counts from 0, got {counts_T.min(initial=0)}")
    check_array("out", out_K, np.int8, (int(counts_T.sum()),))
    check_writable("out", out_K)
    library.call("direction", _signed(seed), step, query, counts_T, len(counts_T), out_K)


def bit_sums(
    library: Library,
    seed: int,
    blocks: tuple[NDArray[np.uint64], NDArray[np.uint64]],
    directions: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
) -> NDArray[np.int64]:
    """`sum_d c[d] * bit(step[d], query[d], position)`, int64 [B * 128] in the generator's order.

    One thread; spans of blocks may be given to several. The sum of |c| is below 2**63.

    Args:
        blocks: counter words 0 and 1 (block, tensor) of B blocks.
        directions: step, query and coefficient of D directions.

    Raises:
        InputError: other types or shapes, or a coefficient of 2**60 and more.
    """
    (block_B, tensor_B), (step_D, query_D, c_D) = blocks, directions
    check_array("blocks", block_B, np.uint64, (None,))
    check_array("tensors", tensor_B, np.uint64, block_B.shape)
    check_array("coefficients", c_D, np.int64, (None,))
    check_array("steps", step_D, np.int64, c_D.shape)
    check_array("queries", query_D, np.int64, c_D.shape)
    low, high = int(c_D.min(initial=0)), int(c_D.max(initial=0))
    if low < -_LARGEST or high > _LARGEST:
        raise InputError(f"expected coefficients within {_LARGEST}, got {low} to {high}")
    sums = np.zeros(len(block_B) * _BLOCK_BITS, dtype=np.int64)
    library.call(
        "bit_sums", _signed(seed), block_B, tensor_B, len(block_B), step_D, query_D, c_D, len(c_D), sums
    )
    return sums


def groups_into(
    library: Library,
    out: tuple[NDArray[np.int32], NDArray[np.int8]],
    *,
    seed: int,
    step: int,
    queries: int,
    counts: Sequence[int],
) -> None:
    """Group and sign of each weight in a step: `counts[t]` of them for tensor t.

    Raises:
        InputError: `out` is not int32 and int8 [sum of counts].
    """
    counts_T = np.array(counts, dtype=np.int64)
    for name, array, dtype in (("groups", out[0], np.int32), ("signs", out[1], np.int8)):
        check_array(name, array, dtype, (int(counts_T.sum()),))
        check_writable(name, array)
    library.call("groups", _signed(seed), step, queries, counts_T, len(counts_T), *out)


def add_group_sums(
    library: Library,
    s_C: NDArray[np.int64],
    c_TQ: NDArray[np.int64],
    *,
    seed: int,
    start: int,
    tensor: int,
    first: int,
) -> None:
    """`s += sum over steps of c[step, group] * sign` for a tensor's weights from rank `first` on.

    Raises:
        InputError: other types or shapes, or a first rank that is no multiple of four.
    """
    check_array("the state", s_C, np.int64, (None,))
    check_writable("the state", s_C)
    check_array("coefficients", c_TQ, np.int64, (None, None))
    if first % 4:
        raise InputError(f"expected a first rank that is a multiple of 4, got {first}")
    library.call("group_sums", _signed(seed), tensor, first, len(s_C), start, c_TQ, *c_TQ.shape, s_C)


def add_scaled(library: Library, s_K: NDArray[np.int64], c: int, z_K: Direction) -> None:
    """`s += c * z` in place; that no sum leaves the exact range is checked by whoever calls (FORMAT 7.3).

    Raises:
        InputError: other types or shapes.
    """
    check_array("the state", s_K, np.int64, (None,))
    check_writable("the state", s_K)
    suffix = _suffix(z_K, s_K.shape)
    library.call(f"add_scaled_{suffix}", s_K, c, z_K, len(z_K))


def perturbed_into(
    library: Library,
    out_K: NDArray[np.float32],
    w_base_K: NDArray[np.float32],
    s_K: NDArray[np.int64],
    step_unit_exponent: int,
    z_K: Direction,
    scale: float,
) -> None:
    """`fp32(float64(w_base) + 2**e * s + scale * z)`.

    Raises:
        InputError: other types or shapes.
    """
    shape = w_base_K.shape
    _check_state(w_base_K, s_K)
    suffix = _suffix(z_K, shape)
    check_array("out", out_K, np.float32, shape)
    check_writable("out", out_K)
    unit, factor = _doubles(step_unit_exponent, scale)
    library.call(f"perturbed_{suffix}", w_base_K, s_K, unit, factor, z_K, len(z_K), out_K)


def perturbed_pairs_into(
    library: Library,
    out_VK: NDArray[np.float32],
    w_base_K: NDArray[np.float32],
    s_K: NDArray[np.int64],
    step_unit_exponent: int,
    z_QK: Direction,
    scale: float,
) -> None:
    """All queries in one pass: rows 2q and 2q + 1 of `out_VK` [2Q, K] are `+scale * z_q` and `-scale * z_q`.

    Raises:
        InputError: other types or shapes.
    """
    _check_state(w_base_K, s_K)
    suffix = _suffix(z_QK, (None, len(w_base_K)))
    check_array("out", out_VK, np.float32, (2 * len(z_QK), len(w_base_K)))
    check_writable("out", out_VK)
    unit, factor = _doubles(step_unit_exponent, scale)
    sizes = (len(z_QK), len(w_base_K))
    library.call(f"perturbed_pairs_{suffix}", w_base_K, s_K, unit, factor, z_QK, *sizes, out_VK)


def _check_state(w_base_K: NDArray[np.float32], s_K: NDArray[np.int64]) -> None:
    check_array("base weights", w_base_K, np.float32, (None,))
    check_array("the state", s_K, np.int64, w_base_K.shape)


def _suffix(z: Direction, shape: tuple[int | None, ...]) -> str:
    check_array("z", z, np.int32 if z.dtype == np.int32 else np.int8, shape)
    return "i32" if z.dtype == np.int32 else "i8"


def _doubles(step_unit_exponent: int, scale: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    return np.array(math.ldexp(1.0, step_unit_exponent)), np.array(scale, dtype=np.float64)


def _signed(seed: int) -> int:
    """The 64 bits of the seed as ctypes passes them."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed
