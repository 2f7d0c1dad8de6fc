"""NF4: codes for 16 quantiles of a normal distribution, in blocks of 64 weights (QLoRA, section 3).

A block has one scale, the largest absolute value of its weights (absmax). Codes and absmax have the bits of
bitsandbytes' reference (`functional.quantize_4bit`, no double quantization), so the loaders of bitsandbytes
read them. There are two differences, which do not change the decoded weights. The absmax of an all-zero tail
block is 0, where the reference stores 1e-38. The nibble after an odd number of codes is 0, not 7.

Shapes: N = rows and K = columns of the weight, B = ceil(N * K / 64) flat blocks.
"""

import numpy as np
from numpy.typing import NDArray

from permille.quantization.source import CHUNK_WEIGHTS, check_finite, check_weight, pack
from permille.quantization.types import QuantizedTensor, Scheme

BLOCK_SIZE = 64

# The table of bitsandbytes, from its source. Its formula needs scipy, and gives these digits only in float32.
NF4_CODES: NDArray[np.float32] = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    dtype=np.float32,
)
# Computed in float32, as in the reference. A weight exactly between two codes takes the lower one.
_BOUNDS: NDArray[np.float32] = (NF4_CODES[:-1] + NF4_CODES[1:]) / np.float32(2)
# The reference's guard against a division by zero.
_SMALLEST_ABSMAX = np.float32(1e-38)


def quantize(w_NK: NDArray[np.float32], *, name: str = "weight") -> QuantizedTensor:
    """Quantize each `w / absmax(block)` to the nearest of NF4_CODES. A tie goes to the lower one.

    Raises:
        InputError: a weight is not finite, or the array is not a float32 matrix.
    """
    check_weight(w_NK, name)
    w = w_NK.reshape(-1)
    packed = np.empty((w.size + 1) // 2, np.uint8)
    # The last block may be shorter.
    absmax_B = np.empty(-(-w.size // BLOCK_SIZE), np.float32)
    # A chunk is a whole number of blocks, so the size of a chunk does not change the result.
    for start in range(0, w.size, CHUNK_WEIGHTS):
        stop = min(start + CHUNK_WEIGHTS, w.size)
        check_finite(w[start:stop], start, name)
        absmax = _absmax(w[start:stop])
        codes = _codes(w[start:stop], absmax)
        packed[start // 2 : (stop + 1) // 2] = pack(codes)
        absmax_B[start // BLOCK_SIZE : start // BLOCK_SIZE + absmax.size] = absmax
    rows, columns = w_NK.shape
    return QuantizedTensor(
        scheme=Scheme.NF4, shape=(rows, columns), group_size=BLOCK_SIZE, packed=packed, scales=absmax_B
    )


def _absmax(w: NDArray[np.float32]) -> NDArray[np.float32]:
    found: NDArray[np.float32] = np.maximum.reduceat(np.abs(w), np.arange(0, w.size, BLOCK_SIZE))
    return found


def _codes(w: NDArray[np.float32], absmax: NDArray[np.float32]) -> NDArray[np.uint8]:
    divisor = np.maximum(absmax, _SMALLEST_ABSMAX)
    scaled = w * np.repeat(np.float32(1) / divisor, BLOCK_SIZE)[: w.size]
    tail = w.size % BLOCK_SIZE
    if tail:  # the reference divides in the tail, and multiplies by the reciprocal elsewhere
        scaled[-tail:] = w[-tail:] / divisor[-1]
    np.clip(scaled, -1, 1, out=scaled)
    return np.searchsorted(_BOUNDS, scaled, side="left").astype(np.uint8)
