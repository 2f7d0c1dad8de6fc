"""Symmetric int4: one float32 scale for each group of 32 or 128 weights along a row.

    scale = absmax(group) / 7        code = clip(rint(w / scale), -8, 7)        w' = code * scale

All in float32, rint half to even; stored as code + 8. No code here leaves -7..7: only codes that were
calibrated (`rounding`) may be -8. The last group of a row is shorter where K is no multiple of the group
size. A scale that underflows to 0 makes a zero group.

# Legend: N, K = rows and columns; G = ceil(K / group_size); S = group_size; R = rows of a chunk.
"""

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille.quantization.source import CHUNK_WEIGHTS, check_finite, check_quantized, check_weight, pack
from permille.quantization.types import QuantizedTensor, Scheme

GROUP_SIZES = (32, 128)


def quantize(
    w_NK: NDArray[np.float32],
    group_size: int,
    *,
    name: str = "weight",
) -> QuantizedTensor:
    """
    Raises:
        InputError: NaN or infinity, shapes that disagree, or a group size other than 32 and 128.
    """
    if group_size not in GROUP_SIZES:
        raise InputError(f"expected a group size of 32 or 128 for int4, got {group_size}")
    check_weight(w_NK, name)
    rows, columns = w_NK.shape
    packed = np.empty((w_NK.size + 1) // 2, np.uint8)
    scale_NG = np.empty((rows, -(-columns // group_size)), np.float32)
    for start, stop in _row_chunks(rows, columns):
        w_RK = w_NK[start:stop]
        check_finite(w_RK, start * columns, name)
        scale_RG = _scales(w_RK, group_size)
        scale_NG[start:stop] = scale_RG
        first = start * columns // 2
        codes = pack(_codes(w_RK, scale_RG, group_size).reshape(-1))
        packed[first : first + codes.size] = codes
    return QuantizedTensor(
        scheme=Scheme.INT4, shape=(rows, columns), group_size=group_size, packed=packed, scales=scale_NG
    )


def dequantize(quantized: QuantizedTensor) -> NDArray[np.float32]:
    """code * scale, one float32 product a weight: [N, K]."""
    check_quantized(quantized)
    rows, columns = quantized.shape
    w_NK = np.empty((rows, columns), np.float32)
    for start, stop in _row_chunks(rows, columns):
        first, last = start * columns, stop * columns
        packed = quantized.packed[first // 2 : (last + 1) // 2]
        codes = np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)[: last - first]
        value_RK = (codes.astype(np.float32) - np.float32(8)).reshape(stop - start, columns)
        scale_RK = np.repeat(quantized.scales[start:stop], quantized.group_size, axis=1)[:, :columns]
        np.multiply(value_RK, scale_RK, out=w_NK[start:stop])
    return w_NK


def _row_chunks(rows: int, columns: int) -> list[tuple[int, int]]:
    """Ranges of an even number of rows, so that no byte is shared by two chunks."""
    step = max(2, CHUNK_WEIGHTS // columns // 2 * 2)
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def _scales(w_RK: NDArray[np.float32], group_size: int) -> NDArray[np.float32]:
    starts = np.arange(0, w_RK.shape[1], group_size)
    absmax_RG: NDArray[np.float32] = np.maximum.reduceat(np.abs(w_RK), starts, axis=1)
    scale_RG: NDArray[np.float32] = absmax_RG / np.float32(7)
    return scale_RG


def _codes(w_RK: NDArray[np.float32], scale_RG: NDArray[np.float32], group_size: int) -> NDArray[np.uint8]:
    scale_RK = np.repeat(scale_RG, group_size, axis=1)[:, : w_RK.shape[1]]
    code_RK = np.divide(w_RK, scale_RK, out=np.zeros_like(w_RK), where=scale_RK > 0)
    np.clip(np.rint(code_RK, out=code_RK), -8, 7, out=code_RK)
    return (code_RK + np.float32(8)).astype(np.uint8)
