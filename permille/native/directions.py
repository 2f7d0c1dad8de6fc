"""Directions, perturbed values and the lattice's update in C: bit for bit what `permille.zo` does in numpy.

`permille.zo` checks what it is asked for and owns the definitions; it calls these where `load` finds a
library. Here only types and sizes are checked, because behind a pointer nothing is.

Shapes: K = masked weights of all tensors, T = tensors, Q = queries.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille.native.arrays import check_array, check_writable
from permille.native.library import Library

Direction = NDArray[np.int8] | NDArray[np.int32]

_BITS = (1, 4, 16, 64)


def direction_into(
    library: Library,
    out_K: NDArray[np.int8],
    *,
    seed: int,
    step: int,
    query: int,
    counts: Sequence[int],
    bits: int,
) -> None:
    """The direction of one query: `counts[t]` coefficients of n = `bits` bits for tensor t.

    Raises:
        InputError: `out_K` is not int8 [sum of counts], or a number of bits other than 1, 4, 16 and 64.
    """
    counts_T = _counts(counts, bits)
    check_array("out", out_K, np.int8, (int(counts_T.sum()),))
    check_writable("out", out_K)
    library.call("direction", _signed(seed), step, query, counts_T, len(counts_T), bits, out_K)


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


def _counts(counts: Sequence[int], bits: int) -> NDArray[np.int64]:
    counts_T = np.array(counts, dtype=np.int64)
    if bits not in _BITS or counts_T.ndim != 1 or (counts_T < 0).any():
        raise InputError(
            f"expected counts from 0 and {_BITS} bits, got {bits} bits and {counts_T.min(initial=0)}"
        )
    return counts_T


def _doubles(step_unit_exponent: int, scale: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    return np.array(math.ldexp(1.0, step_unit_exponent)), np.array(scale, dtype=np.float64)


def _signed(seed: int) -> int:
    """The 64 bits of the seed as ctypes passes them."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed
