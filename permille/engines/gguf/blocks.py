"""Encoding of weights as bytes of a GGUF type, with scales that preserve personal values.

A block has 32 weights of a row, which share a float16 scale `d`. A weight w is stored as a code q and is
decoded to w':

    Q8_0   w' = d * q          q from -127 to 127
    Q4_0   w' = d * (q - 8)    q from 0 to 15
    Q4_1   w' = d * q + m      q from 0 to 15, `m` a float16; for scheme `source` only

Our int4 codes, in groups of 32 or 128, are the codes of Q4_0, and our int8 codes are those of Q8_0. Only
their scales are rounded. A personal value is a float32 within a block, and is often several times as large as
the other weights of the block. If it were rounded to a multiple of the block's scale, most of the personal
change would be lost. So the block gets a scale that fits the value: with `d = v / n` for a whole number `n`,
the value `v` is stored as exactly as a float16 scale allows. The other weights are rounded to the new scale.
Of several candidates for the scale, the one with the smallest error is chosen:

    error = sum of the other weights' squared errors + WEIGHT * sum of the masked values' squared errors

For scheme `source`, a block is changed only if a value differs from its decoded code. So an export of
untrained values has the bytes of the source. At a density of 0.001, training changes three blocks in a
hundred.

# Legend: N, K = rows and columns; B = blocks of 32; S = 32; C = candidates for a block's scale;
P = bytes of a block's codes; R = bytes of a row. A grid is the scale and the minimum of a block (`grid_B2`).
"""

from collections.abc import Iterator
from dataclasses import replace
from enum import StrEnum
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from permille.errors import InputError
from permille.quantization import dequantize
from permille.quantization.gguf_blocks import blocks_of, type_name
from permille.quantization.source import pack, unpack
from permille.quantization.types import QuantizedTensor, Scheme

BLOCK = 32
WEIGHT = np.float32(300)
"""The squared error of a masked weight counts this many times as much as that of another weight. The mask has
some 30 % of the Fisher information in 0.1 % of the weights, so a masked weight matters 300 times as much."""
# The number of blocks whose candidates are in memory at once. A block may have over a hundred candidates.
_CHUNK_BLOCKS = 1 << 13
# The largest finite float16.
_LARGEST_HALF = 65504.0
_MASKED = 4
"""Candidates are made for this many of a block's largest masked values. The error counts all masked
values."""


class BlockType(StrEnum):
    """Storage types of the weights of linear layers. Only F32 stores every weight exactly.

    SOURCE keeps the type of each tensor in a package of scheme `source`.
    """

    F32 = "f32"
    F16 = "f16"
    Q8_0 = "q8_0"
    Q4_0 = "q4_0"
    Q4_1 = "q4_1"
    SOURCE = "source"


ENCODED = (BlockType.F32, BlockType.F16, BlockType.Q8_0, BlockType.Q4_0)
"""Types that `encode` writes. `encode_source` also writes Q4_1."""
OWN_CODES = {BlockType.Q8_0: Scheme.INT8, BlockType.Q4_0: Scheme.INT4}
"""The scheme whose codes a type stores unchanged."""


def fits(kind: BlockType, columns: int) -> BlockType:
    """Return the type for rows of `columns` weights: F16 instead of Q8_0 or Q4_0 if blocks do not fill a row.

    >>> fits(BlockType.Q8_0, 100).value
    'f16'
    """
    return BlockType.F16 if kind in (BlockType.Q8_0, BlockType.Q4_0) and columns % BLOCK else kind


def row_bytes(kind: BlockType, columns: int) -> int:
    """Return the bytes of a row.

    >>> row_bytes(BlockType.Q8_0, 64)  # two blocks of a scale and 32 codes
    68
    """
    weights, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind.name]]
    return columns // weights * size


def encode(
    kind: BlockType,
    weight_NK: NDArray[np.float32],
    *,
    mask_k: NDArray[np.uint32] | None = None,
    codes: QuantizedTensor | None = None,
    name: str,
) -> NDArray[np.uint8]:
    """Encode a matrix: uint8 [N, row_bytes].

    Args:
        kind: the type.
        weight_NK: the weights, with the masked values set.
        mask_k: the flat indices of the masked weights.
        codes: the package's codes, if their scheme is the one in `OWN_CODES`. Blocks without a masked weight
            then keep these codes. None rounds all weights to new codes.
        name: the tensor, for messages.

    Raises:
        InputError: a weight is beyond float16, which all types but F32 need, or the codes have another
            scheme.
    """
    rows, columns = weight_NK.shape
    if kind is BlockType.F32:
        return np.ascontiguousarray(weight_NK, "<f4").view(np.uint8)
    if float(np.abs(weight_NK).max(initial=0.0)) > _LARGEST_HALF:
        raise InputError(f"{name} has numbers that float16 cannot hold. Choose the type f32.")
    if kind is BlockType.F16:
        return np.ascontiguousarray(weight_NK, "<f2").view(np.uint8)
    weight_BS = np.ascontiguousarray(weight_NK).reshape(-1, BLOCK)
    scale_B, code_BS = _rounded(kind, weight_BS) if codes is None else _as_coded(kind, codes, weight_BS)
    if mask_k is not None and len(mask_k):
        grid_B2 = np.stack([scale_B, np.zeros_like(scale_B)], axis=1)
        _aim_at_masked(kind, weight_BS, mask_k, grid_B2, code_BS)
        scale_B = grid_B2[:, 0]
    half_B2 = scale_B.astype("<f2").reshape(-1, 1).view(np.uint8)
    packed_BP: NDArray[Any] = code_BS.view(np.uint8)
    if kind is BlockType.Q4_0:
        # In the order of a GGUF file, code i shares a byte with code i + 16.
        nibble_BS = (code_BS + 8).astype(np.uint8)
        packed_BP = nibble_BS[:, : BLOCK // 2] | nibble_BS[:, BLOCK // 2 :] << 4
    return np.concatenate([half_B2, packed_BP], axis=1).reshape(rows, row_bytes(kind, columns))


def encode_source(
    codes: QuantizedTensor, weight_NK: NDArray[np.float32], mask_k: NDArray[np.uint32], *, name: str
) -> NDArray[np.uint8]:
    """Encode a matrix of scheme `source`. Blocks keep their bytes unless a masked weight was changed.

    Args:
        codes: the codes of the package.
        weight_NK, mask_k, name: as for `encode`.

    Raises:
        InputError: a weight is beyond the range of float16.
    """
    if float(np.abs(weight_NK).max(initial=0.0)) > _LARGEST_HALF:
        raise InputError(f"{name} has numbers that float16 cannot hold. Choose the type f32.")
    kind = BlockType(type_name(codes).lower())
    flat = weight_NK.reshape(-1)
    changed_k = mask_k[flat[mask_k] != dequantize(codes).reshape(-1)[mask_k]]
    if not len(changed_k):
        return blocks_of(codes)
    # Q4_0 stores codes plus 8. Here they are signed.
    low = np.int8(8 if kind is BlockType.Q4_0 else 0)
    unpacked = codes.packed if codes.bits == 8 else unpack(codes.packed, flat.size)
    code_BS = unpacked.view(np.int8).reshape(-1, BLOCK) - low
    minimum_NG = np.zeros_like(codes.scales) if codes.minima is None else codes.minima
    grid_B2 = np.stack([codes.scales.reshape(-1), minimum_NG.reshape(-1)], axis=1)
    _aim_at_masked(kind, flat.reshape(-1, BLOCK), changed_k, grid_B2, code_BS)
    code = (code_BS + low).view(np.uint8).reshape(-1)
    return blocks_of(
        replace(
            codes,
            packed=code if codes.bits == 8 else pack(code),
            scales=grid_B2[:, 0].reshape(codes.scales.shape),
            minima=None if codes.minima is None else grid_B2[:, 1].reshape(codes.scales.shape),
        )
    )


def _limits(kind: BlockType) -> tuple[int, int]:
    return {BlockType.Q8_0: (-127, 127), BlockType.Q4_0: (-8, 7), BlockType.Q4_1: (0, 15)}[kind]


def _half(number: NDArray[np.float32]) -> NDArray[np.float32]:
    return number.astype(np.float16).astype(np.float32)


def _codes(kind: BlockType, weight: NDArray[np.float32], scale: NDArray[np.float32]) -> NDArray[np.float32]:
    code = np.divide(
        weight,
        scale,
        out=np.zeros(np.broadcast_shapes(weight.shape, scale.shape), np.float32),
        where=scale != 0,
    )
    return np.clip(np.rint(code, out=code), *_limits(kind), out=code)


def _rounded(kind: BlockType, weight_BS: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
    """Take the scale of the largest weight, and round to the nearest codes."""
    absmax_B = np.abs(weight_BS).max(axis=1)
    scale_B = _half(absmax_B / np.float32(_limits(kind)[1]))
    return scale_B, _codes(kind, weight_BS, scale_B[:, None]).astype(np.int8)


def _as_coded(
    kind: BlockType, codes: QuantizedTensor, weight_BS: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
    """Take the codes as they are, and round their scales to float16."""
    if codes.scheme is not OWN_CODES[kind]:
        raise InputError(f"expected {OWN_CODES[kind]} codes for {kind}, got {codes.scheme}")
    columns = codes.shape[1]
    if codes.scheme is Scheme.INT8:
        # Copy the codes, because some blocks get other codes, and those of the package are read-only.
        code_BS = codes.packed.view(np.int8).reshape(weight_BS.shape).copy()
    else:
        code_BS = unpack(codes.packed, weight_BS.size).astype(np.int8).reshape(weight_BS.shape) - 8
    # The four blocks of a group of 128 have the same scale.
    scale_NB = np.repeat(codes.scales, codes.group_size // BLOCK, axis=1)[:, : columns // BLOCK]
    return _half(scale_NB.reshape(-1)), code_BS


def _aim_at_masked(
    kind: BlockType,
    weight_BS: NDArray[np.float32],
    mask_k: NDArray[np.uint32],
    grid_B2: NDArray[np.float32],
    code_BS: NDArray[np.int8],
) -> None:
    """Choose new scales, minima (Q4_1) and codes for the blocks with masked weights, in place."""
    touched = np.unique(mask_k // BLOCK)
    for first in range(0, len(touched), _CHUNK_BLOCKS):
        block = touched[first : first + _CHUNK_BLOCKS]
        # Mask indices increase, so those within a range of blocks are a slice of the array.
        low, high = np.searchsorted(mask_k, [block[0] * BLOCK, block[-1] * BLOCK + BLOCK])
        masked_BS = np.zeros((len(block), BLOCK), bool)
        own_k = mask_k[low:high]
        masked_BS[np.searchsorted(block, own_k // BLOCK), own_k % BLOCK] = True
        grid_B2[block], code_BS[block] = _best(kind, weight_BS[block], masked_BS, grid_B2[block])


def _best(
    kind: BlockType,
    weight_BS: NDArray[np.float32],
    masked_BS: NDArray[np.bool_],
    grid_B2: NDArray[np.float32],
) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
    if kind is BlockType.Q4_1:
        candidate_BC2 = _grids_with_minimum(weight_BS, masked_BS, grid_B2)
    else:
        scale_BC = _candidates(kind, weight_BS, masked_BS, grid_B2[:, 0])
        candidate_BC2 = np.stack([scale_BC, np.zeros_like(scale_BC)], axis=2)
    importance_BS = np.where(masked_BS, WEIGHT, np.float32(1))
    least_B = np.full(len(weight_BS), np.inf, np.float32)
    best_B2 = candidate_BC2[:, 0].copy()
    best_BS = np.zeros(weight_BS.shape, np.int8)
    for grid in np.moveaxis(candidate_BC2, 1, 0):
        scale_B1, above_BS = grid[:, :1], weight_BS - grid[:, 1:]
        code_BS = _codes(kind, above_BS, scale_B1)
        error_B = (importance_BS * (above_BS - code_BS * scale_B1) ** 2).sum(axis=1)
        # Compare strictly, so that the block's own scale and minimum win a tie. They come first.
        better = error_B < least_B
        least_B[better], best_B2[better], best_BS[better] = error_B[better], grid[better], code_BS[better]
    return best_B2, best_BS


def _candidates(
    kind: BlockType,
    weight_BS: NDArray[np.float32],
    masked_BS: NDArray[np.bool_],
    scale_B: NDArray[np.float32],
) -> NDArray[np.float32]:
    """Return candidate scales in float16, [B, C].

    The candidates are the block's own scale, the scale for its largest weight, and `v / n` for the masked
    values v. For Q4_0, n is every integer from -8 to 7 except 0. For Q8_0, v is taken without its sign. Then
    n is the largest integer for which all weights of the block stay in range, and the three integers below
    it.
    """
    largest_B = np.abs(weight_BS).max(axis=1) / np.float32(_limits(kind)[1])
    found = [scale_B, largest_B]
    for value_B in _aimed_at(weight_BS, masked_BS, np.zeros_like(scale_B)):
        if kind is BlockType.Q4_0:
            found += [value_B / np.float32(n) for n in range(-8, 8) if n]
        else:
            # With a larger n, the scale would be too small for the block's largest weight.
            whole_B = np.floor(
                np.divide(np.abs(value_B), largest_B, out=np.zeros_like(value_B), where=largest_B > 0)
            )
            found += [np.abs(value_B) / np.maximum(whole_B - below, 1) for below in range(4)]
    return _half(np.stack(found, axis=1))


def _grids_with_minimum(
    weight_BS: NDArray[np.float32], masked_BS: NDArray[np.bool_], grid_B2: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return candidates for scale and minimum of Q4_1 in float16, [B, C, 2].

    The candidates are the block's own pair, the pair for the range of its weights, and some pairs for each
    masked value v. The scale of a pair for v is that of one of the first two pairs, or `r / n` for n from 1
    to 15. Here, r is the distance from v to an end of the range. The minimum is v minus a whole number of
    steps of the scale.
    """
    low_B, high_B = weight_BS.min(axis=1), weight_BS.max(axis=1)
    range_B = _half((high_B - low_B) / np.float32(15))
    found = [grid_B2, np.stack([range_B, _half(low_B)], axis=1)]
    for value_B in _aimed_at(weight_BS, masked_BS, low_B):
        steps = [np.float32(n) for n in range(1, 16)]
        scales = [grid_B2[:, 0], range_B]
        scales += [_half(distance_B / n) for distance_B in (value_B - low_B, high_B - value_B) for n in steps]
        for scale_B in scales:
            below_B = np.divide(value_B - low_B, scale_B, out=np.zeros_like(low_B), where=scale_B > 0)
            minimum_B = _half(value_B - np.clip(np.rint(below_B), 0, 15) * scale_B)
            found.append(np.stack([scale_B, minimum_B], axis=1))
    return np.stack(found, axis=1)


def _aimed_at(
    weight_BS: NDArray[np.float32], masked_BS: NDArray[np.bool_], otherwise_B: NDArray[np.float32]
) -> Iterator[NDArray[np.float32]]:
    """Yield the largest masked value of each block, then the second largest, and so on, float32 [B].

    A block that has no further masked value gets its number of `otherwise_B` instead.
    """
    row = np.arange(len(weight_BS))
    # The keys of masked values are at most 0, so all other weights come after them.
    order = np.argsort(np.where(masked_BS, -np.abs(weight_BS), np.float32(1)), axis=1)[:, :_MASKED]
    for place_B in order[:, : int(min(_MASKED, masked_BS.sum(axis=1).max()))].T:
        yield np.where(masked_BS[row, place_B], weight_BS[row, place_B], otherwise_B)
