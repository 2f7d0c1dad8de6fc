"""Symmetric integers, int4 and int8: one float32 scale for each group of weights along a row.

    scale = absmax(group) / M        code = clip(rint(w / scale), -M, M)        w' = code * scale

with M = 7 or 127. All computations are in float32, and rint rounds half to even. An int4 code c is stored as
c + 8. Here, c is from -7 to 7. In scheme int4, the code -8 comes only from `permille.quantization.rounding`,
which calibrates on text. If K is not a multiple of the group size, the last group of a row is shorter. If the
scale of a group underflows to 0, all weights of the group become 0.

int8 is the weight-only form of LLM.int8 (Dettmers et al., 2022) and of torchao's `Int8WeightOnlyConfig`,
which have one scale for each row. Groups of 128 cost a quarter of a bit more per weight. They halve the
squared error of rows of thousands of weights, because a large weight coarsens only its own group.

Shapes: N = rows, K = columns, G = ceil(K / group_size), R = rows of a chunk.
"""

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille.quantization.source import check_finite, check_weight, pack, row_chunks
from permille.quantization.types import QuantizedTensor, Scheme, bits_of, packed_size

GROUP_SIZES = {Scheme.INT4: (32, 128), Scheme.INT8: (128,)}
_MOST = {Scheme.INT4: 7, Scheme.INT8: 127}


def quantize(
    w_NK: NDArray[np.float32],
    scheme: Scheme,
    group_size: int,
    *,
    name: str = "weight",
) -> QuantizedTensor:
    """Quantize a weight to INT4 or INT8.

    Raises:
        InputError: a weight is not finite, or the scheme has no such group size.
    """
    if group_size not in GROUP_SIZES[scheme]:
        wanted = " or ".join(map(str, GROUP_SIZES[scheme]))
        raise InputError(f"expected a group size of {wanted} for {scheme}, got {group_size}")
    check_weight(w_NK, name)
    rows, columns = w_NK.shape
    scale_NG = np.empty((rows, -(-columns // group_size)), np.float32)
    bits = bits_of(scheme)
    packed = np.empty(packed_size(bits, (rows, columns)), np.uint8)
    # Work in chunks of rows, because temporaries as large as the largest weight may not fit into memory.
    for start, stop in row_chunks(rows, columns):
        w_RK = w_NK[start:stop]
        check_finite(w_RK, start * columns, name)
        scale_NG[start:stop] = _scales(w_RK, _MOST[scheme], group_size)
        codes = _codes(w_RK, scale_NG[start:stop], _MOST[scheme], group_size).reshape(-1)
        data = codes.view(np.uint8) if bits == 8 else pack((codes + np.int8(8)).view(np.uint8))
        first = start * columns * bits // 8
        packed[first : first + data.size] = data
    return QuantizedTensor(
        scheme=scheme, shape=(rows, columns), group_size=group_size, packed=packed, scales=scale_NG
    )


def _scales(w_RK: NDArray[np.float32], most: int, group_size: int) -> NDArray[np.float32]:
    starts = np.arange(0, w_RK.shape[1], group_size)
    absmax_RG: NDArray[np.float32] = np.maximum.reduceat(np.abs(w_RK), starts, axis=1)
    scale_RG: NDArray[np.float32] = absmax_RG / np.float32(most)
    return scale_RG


def _codes(
    w_RK: NDArray[np.float32], scale_RG: NDArray[np.float32], most: int, group_size: int
) -> NDArray[np.int8]:
    scale_RK = np.repeat(scale_RG, group_size, axis=1)[:, : w_RK.shape[1]]
    # Groups of zeros have scale 0 and keep the code 0.
    code_RK = np.divide(w_RK, scale_RK, out=np.zeros_like(w_RK), where=scale_RK > 0)
    # The range is symmetric, so -8 and -128 stay unused.
    np.clip(np.rint(code_RK, out=code_RK), -most, most, out=code_RK)
    return code_RK.astype(np.int8)
