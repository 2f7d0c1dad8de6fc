"""Weights of which many are zero: codes for the others alone, and a pattern that says where these stand.

The kept weights are quantized as one row, in flat order, by the scheme of any weight: a scale serves
`group_size` kept weights, and zeros have no part in it. Two patterns:

- 2:4, two kept of each four along a row. 0 to 5 stand for the places (0, 1), (0, 3), (0, 2), (1, 2), (1, 3),
  (2, 3): with this order a kernel chooses the inputs by four comparisons. A byte is p + 6 q + 36 r of three
  rows one below the other, 2.67 bits a group where 2.58 are the least. Of a group with fewer weights than
  two, zeros at the first free places are kept.
- bitmap, one bit a weight, rows in whole bytes: any zeros, also those of 4:8.

# Legend: N, K = rows and columns; G = K / 4; C = kept weights; J = flat indices that are asked for.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille.quantization.types import Pattern, Sparsity, pattern_shape

BITMAP_ZEROS = 0.25
"""From this share of zeros on a bitmap pays; below 0.22 it is larger than the codes that it saves."""

Places = NDArray[np.bool_]

# pattern -> the four bits of its places, the first place the lowest bit.
_PLACES: NDArray[np.uint8] = np.array([0b0011, 0b1001, 0b0101, 0b0110, 0b1010, 0b1100], np.uint8)
_PATTERN_OF: NDArray[np.uint8] = np.full(16, 255, np.uint8)
_PATTERN_OF[_PLACES] = np.arange(6)
_ROWS = 256


def find_sparsity(weights: Iterable[NDArray[np.float32]]) -> Sparsity | None:
    """The pattern that fits all of a model's weights [N, K]: 2:4, a bitmap where enough is zero, or none."""
    is_structured, zeros, total = True, 0, 0
    for w_NK in weights:
        zeros += w_NK.size - int(np.count_nonzero(w_NK))
        total += w_NK.size
        is_structured = is_structured and w_NK.shape[1] % 4 == 0 and int(_per_group(w_NK != 0).max()) <= 2
    if is_structured:
        return Sparsity.TWO_OF_FOUR
    return Sparsity.BITMAP if zeros >= BITMAP_ZEROS * total else None


def kept_places(w_NK: NDArray[np.float32], sparsity: Sparsity, *, name: str) -> Places:
    """Return which weights get codes: all but zeros, and of 2:4 two of each four; at least one of a bitmap.

    Raises:
        InputError: 2:4 is asked of a weight that has three of four, or a width that is no multiple of 4.
    """
    kept_NK: Places = w_NK != 0
    if sparsity is Sparsity.BITMAP:
        kept_NK[0, 0] |= not kept_NK.any()
        return kept_NK
    if w_NK.shape[1] % 4:
        raise InputError(f"{name}: expected a width in groups of four for 2:4, got {w_NK.shape[1]}")
    count_NG = _per_group(kept_NK)
    if (most := int(count_NG.max())) > 2:
        raise InputError(f"{name}: expected at most 2 of 4 weights other than zero, got {most}")
    for place in range(4):
        column_NG = kept_NK[:, place::4]
        adds_NG = ~column_NG & (count_NG < 2)
        column_NG |= adds_NG
        count_NG += adds_NG
    return kept_NK


def pack_places(kept_NK: Places, sparsity: Sparsity) -> Pattern:
    """The pattern of the kept places."""
    pack = _pack_bits if sparsity is Sparsity.BITMAP else _pack_groups
    return Pattern(sparsity=sparsity, shape=(kept_NK.shape[0], kept_NK.shape[1]), packed=pack(kept_NK))


def _pack_bits(kept_NK: Places) -> NDArray[np.uint8]:
    return np.packbits(kept_NK, axis=1, bitorder="little")


def _pack_groups(kept_NK: Places) -> NDArray[np.uint8]:
    bit_NG4 = kept_NK.reshape(len(kept_NK), -1, 4).astype(np.uint8) << np.arange(4, dtype=np.uint8)
    pattern_NG = _PATTERN_OF[bit_NG4.sum(axis=2)]
    rows = len(pattern_NG)
    padded = np.concatenate([pattern_NG, np.zeros((-rows % 3, pattern_NG.shape[1]), np.uint8)])
    packed = padded[0::3] + np.uint8(6) * padded[1::3] + np.uint8(36) * padded[2::3]
    return packed.astype(np.uint8, copy=False)


def places(pattern: Pattern, first: int, last: int) -> Places:
    """Return which weights of rows first..last are kept, [last - first, K]."""
    columns = pattern.shape[1]
    if pattern.sparsity is Sparsity.BITMAP:
        bits = np.unpackbits(pattern.packed[first:last], axis=1, count=columns, bitorder="little")
        return bits.astype(np.bool_)
    row = np.arange(first, last)
    digit_NG = pattern.packed[row // 3] // (6 ** (row % 3)).astype(np.uint8)[:, None] % np.uint8(6)
    bits_NG4 = _PLACES[digit_NG][:, :, None] >> np.arange(4, dtype=np.uint8) & 1
    found: Places = bits_NG4.reshape(last - first, columns).astype(np.bool_)
    return found


def row_starts(pattern: Pattern) -> NDArray[np.int64]:
    """Kept weights before each row, and all of them: [N + 1]."""
    rows, columns = pattern.shape
    if pattern.sparsity is Sparsity.TWO_OF_FOUR:
        return np.arange(rows + 1, dtype=np.int64) * (columns // 2)
    counts_N = np.bitwise_count(pattern.packed).sum(axis=1, dtype=np.int64)
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts_N)])


def ranks(pattern: Pattern, flat_J: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return for rising flat indices the kept weights before each, and whether it is kept."""
    columns = pattern.shape[1]
    starts, flat_J = row_starts(pattern), flat_J.astype(np.int64)
    rank_J, kept_J = np.empty(flat_J.shape, np.int64), np.empty(flat_J.shape, np.bool_)
    for first in range(0, pattern.shape[0], _ROWS):
        last = min(first + _ROWS, pattern.shape[0])
        begin, end = np.searchsorted(flat_J, [first * columns, last * columns])
        if begin == end:
            continue
        at = flat_J[begin:end] - first * columns
        kept = places(pattern, first, last).reshape(-1)
        rank_J[begin:end] = starts[first] + np.cumsum(kept)[at] - kept[at]
        kept_J[begin:end] = kept[at]
    return rank_J, kept_J


def has_padding(pattern: Pattern) -> bool:
    """Return whether padding bits or rows of the pattern are not zero."""
    rows, columns = pattern.shape
    if pattern.sparsity is Sparsity.BITMAP:
        return bool(columns % 8) and bool((pattern.packed[:, -1] >> np.uint8(columns % 8)).any())
    return bool(rows % 3) and int(pattern.packed[-1].max()) >= 6 ** (rows % 3)


def check_pattern(pattern: Pattern, kept: int) -> None:
    """Hold a pattern against its shape and the number of kept weights, for who may have it from anywhere.

    Raises:
        InputError: any of them disagrees.
    """
    expected, columns = pattern_shape(pattern.sparsity, pattern.shape), pattern.shape[1]
    if pattern.packed.dtype != np.uint8 or pattern.packed.shape != expected:
        raise InputError(f"expected uint8 patterns {expected}, got {pattern.packed.shape}")
    is_whole = pattern.sparsity is Sparsity.BITMAP or columns % 4 == 0
    if not is_whole or has_other_numbers(pattern) or has_padding(pattern):
        raise InputError(f"These are no patterns {pattern.sparsity} of {pattern.shape}.")
    if kept != int(row_starts(pattern)[-1]):
        raise InputError(f"There are {kept} codes, and another number of places in the pattern.")


def has_other_numbers(pattern: Pattern) -> bool:
    """Return whether a byte of 2:4 is not a code of three patterns."""
    return pattern.sparsity is Sparsity.TWO_OF_FOUR and int(pattern.packed.max()) >= 6**3


def _per_group(kept_NK: Places) -> NDArray[np.uint8]:
    """Kept weights of each four along a row."""
    counts: NDArray[np.uint8] = kept_NK.reshape(len(kept_NK), -1, 4).sum(axis=2, dtype=np.uint8)
    return counts
