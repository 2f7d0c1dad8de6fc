"""Checks and helpers that all schemes share: validation, packing of codes, and chunks of rows."""

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille.quantization.types import QuantizedTensor, Scheme, packed_size, scales_shape

# The number of weights that are handled at once. It keeps the temporary arrays below some tens of MB.
CHUNK_WEIGHTS = 1 << 20


def check_weight(w_NK: NDArray[np.float32], name: str) -> None:
    """Check that a weight is a float32 matrix. `check_finite` checks its numbers, chunk by chunk.

    Raises:
        InputError: the weight is not a float32 matrix, or is empty.
    """
    if w_NK.ndim != 2 or w_NK.dtype != np.float32 or w_NK.size == 0:
        raise InputError(f"{name}: expected a float32 matrix, got {w_NK.dtype} of shape {w_NK.shape}")


def check_finite(chunk: NDArray[np.float32], first: int, name: str) -> None:
    """Check that a chunk of weights is finite. `first` is the flat index of its first weight.

    Raises:
        InputError: a weight is NaN or infinite.
    """
    finite = np.isfinite(chunk)
    if not finite.all():
        # `argmin` gives the first False of a boolean array.
        at = int(np.argmin(finite.reshape(-1)))
        value = chunk.reshape(-1)[at]
        raise InputError(f"{name} has the weight {value} at flat index {first + at}. Weights must be finite.")


def check_quantized(quantized: QuantizedTensor) -> None:
    """Check the sizes of packed codes and scales against the shape.

    Raises:
        InputError: a size does not fit.
    """
    packed, scales, minima = quantized.packed, quantized.scales, quantized.minima
    expected = scales_shape(quantized.scheme, quantized.shape, quantized.group_size)
    size = packed_size(quantized.bits, quantized.shape)
    if packed.dtype != np.uint8 or packed.shape != (size,):
        raise InputError(f"expected {size} packed bytes, got {packed.dtype} {packed.shape}")
    if scales.dtype != np.float32 or scales.shape != expected:
        raise InputError(f"expected float32 scales {expected}, got {scales.dtype} {scales.shape}")
    # FORMAT 4.2: only Q4_1 has minima.
    has_minima = quantized.scheme is Scheme.SOURCE and quantized.bits == 4
    if minima is not None and (not has_minima or (minima.dtype, minima.shape) != (scales.dtype, expected)):
        raise InputError(f"expected no minima or float32 {expected}, got {minima.dtype} {minima.shape}")


def unpack(packed: NDArray[np.uint8], number: int) -> NDArray[np.uint8]:
    """Return the first `number` codes. Each byte holds two.

    >>> unpack(np.array([0x12, 0x30], np.uint8), 3).tolist()
    [1, 2, 3]
    """
    codes: NDArray[np.uint8] = np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)[:number]
    return codes


def row_chunks(rows: int, columns: int) -> list[tuple[int, int]]:
    """Cut rows into ranges of an even number of rows, so that no byte belongs to two ranges."""
    step = max(2, CHUNK_WEIGHTS // columns // 2 * 2)
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def pack(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack two codes into each byte, the first in the high nibble. Pad an odd number of codes with 0.

    >>> pack(np.array([1, 2, 3], np.uint8)).tolist()
    [18, 48]
    """
    if codes.size % 2:
        codes = np.append(codes, np.uint8(0))
    high: NDArray[np.uint8] = codes[0::2] << np.uint8(4)
    return high | codes[1::2]
