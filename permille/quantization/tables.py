"""Quantization of embedding and head to GGUF's Q8_0, with the rounding of llama.cpp.

Shapes: N = rows, K = columns, B = blocks of S = 32 weights, R = bytes of a block.
"""

import numpy as np

from permille.errors import InputError
from permille.tensors import Q8_0, Q8_0_BYTES, Q8_0_WEIGHTS, RawTensor

_CHUNK_ROWS = 1 << 12


def code_table(table: RawTensor) -> RawTensor:
    """Quantize a matrix to Q8_0.

        scale = max|w| / 127        # of each block of 32 weights
        code = round(w / scale)     # halves away from zero

    As in llama.cpp, codes are computed with the float32 scale, and the scale is stored as float16.
    A matrix is returned unchanged if it is already Q8_0, or if its row length is not a multiple of 32.

    Raises:
        InputError: a scale is beyond the range of float16, or a number is not finite.
    """
    rows, columns = table.shape
    if table.dtype == Q8_0 or columns % Q8_0_WEIGHTS:
        return table
    out_NR = np.empty((rows, columns // Q8_0_WEIGHTS * Q8_0_BYTES), np.uint8)
    row_bytes = table.data.size // rows
    for first in range(0, rows, _CHUNK_ROWS):
        count = min(_CHUNK_ROWS, rows - first)
        part = RawTensor(
            name=table.name,
            dtype=table.dtype,
            shape=(count, columns),
            data=table.data[first * row_bytes : (first + count) * row_bytes],
        )
        w_BS = part.float32().reshape(-1, Q8_0_WEIGHTS)
        if not np.isfinite(w_BS).all():
            raise InputError(
                f"{table.name!r} has numbers that are not finite. The model is damaged: download it again."
            )
        with np.errstate(all="ignore"):
            scale_B1 = np.abs(w_BS).max(axis=1, keepdims=True) / np.float32(127)
            # FORMAT 4.3: multiply by the reciprocal, as llama.cpp does. A division would change some codes.
            inverse_B1 = np.where(scale_B1 == 0, np.float32(0), np.float32(1) / scale_B1)
            # A decoder multiplies by this rounded scale, so decoded weights are slightly off. llama.cpp
            # accepts that, and so do we.
            half_B1 = scale_B1.astype("<f2")
            if not np.isfinite(half_B1).all():
                raise InputError(
                    f"{table.name!r} has numbers that 8 bits cannot hold. Build with --embeddings source."
                )
            scaled_BS = w_BS * inverse_B1
            size_BS = np.abs(scaled_BS)
            whole_BS = np.floor(size_BS)
            # Round halves away from zero, as C's `roundf` does. numpy's `rint` rounds them to even.
            code_BS = np.sign(scaled_BS) * (whole_BS + np.floor(2 * (size_BS - whole_BS)))
        block_BR = np.concatenate([half_B1.view(np.uint8), code_BS.astype(np.int8).view(np.uint8)], axis=1)
        out_NR[first : first + count] = block_BR.reshape(count, -1)
    return RawTensor(name=table.name, dtype=Q8_0, shape=table.shape, data=out_NR.reshape(-1))
