"""Scheme `source`: the unchanged codes of a GGUF file, in groups of 32 along a row (FORMAT 4.2).

    Q8_0    w' = d * q          q from -128 to 127
    Q4_0    w' = d * (q - 8)    q from 0 to 15
    Q4_1    w' = d * q + m      q from 0 to 15

`d` and `m` are float16 of either sign, so `d * q` is exact in float32 and a weight is rounded at most once.
A block of a file holds `d`, then `m` (Q4_1 only), then the codes. In a block of four-bit codes, the low
halves of the 16 bytes are codes 0 to 15, and the high halves are codes 16 to 31. In a package, two
neighbouring codes share a byte instead, as in all schemes of four bits.

Shapes: N = rows, K = columns, G = K / 32, R = bytes of a row, B = blocks, S = 32 weights of a block,
P = bytes of a block or of its codes, H = float16 numbers at the start of a block (`d`, and `m` for Q4_1).
"""

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille.quantization.source import pack, unpack
from permille.quantization.types import QuantizedTensor, Scheme

GROUP_SIZE = 32
_HALF = GROUP_SIZE // 2
_NAMES = {34: "Q8_0", 18: "Q4_0", 20: "Q4_1"}  # by the size of a block in bytes
TYPES = tuple(_NAMES.values())
"""The types of a GGUF file whose codes are kept."""


def type_name(tensor: QuantizedTensor) -> str:
    """Return the name of the GGUF type of a tensor's codes."""
    if tensor.bits == 8:
        return "Q8_0"
    return "Q4_0" if tensor.minima is None else "Q4_1"


def codes_of(block_NR: NDArray[np.uint8], columns: int) -> QuantizedTensor:
    """Split the blocks of a matrix into codes and scales.

    Args:
        block_NR: whole blocks of one of `TYPES`, row by row.
        columns: the number of weights in a row.

    Raises:
        InputError: the blocks have another size, or a scale is not finite.
    """
    rows, size = block_NR.shape
    # The number of bytes in a block tells its type.
    kind = _NAMES.get(size * GROUP_SIZE // columns) if columns % GROUP_SIZE == 0 else None
    if kind is None:
        raise InputError(f"Rows of {columns} weights in {size} bytes fit none of {', '.join(TYPES)}.")
    block_BP = block_NR.reshape(rows * columns // GROUP_SIZE, -1)
    # Q4_1 stores a minimum after the scale.
    heads = 2 if kind == "Q4_1" else 1
    half_BH = np.ascontiguousarray(block_BP[:, : 2 * heads]).view("<f2").astype(np.float32)
    if not np.isfinite(half_BH).all():
        raise InputError("The blocks have scales that are not finite.")
    code_BP = np.ascontiguousarray(block_BP[:, 2 * heads :])
    if kind != "Q8_0":
        # Two codes in a byte are 16 apart in the file, and neighbours in a package.
        code_BP = pack(np.concatenate([code_BP & 15, code_BP >> 4], axis=1).reshape(-1))
    shape = (rows, columns // GROUP_SIZE)
    return QuantizedTensor(
        scheme=Scheme.SOURCE,
        shape=(rows, columns),
        group_size=GROUP_SIZE,
        packed=code_BP.reshape(-1),
        scales=np.ascontiguousarray(half_BH[:, 0]).reshape(shape),
        minima=np.ascontiguousarray(half_BH[:, 1]).reshape(shape) if heads == 2 else None,
    )


def blocks_of(tensor: QuantizedTensor) -> NDArray[np.uint8]:
    """Join codes and scales to blocks, uint8 [N, R]. This inverts `codes_of`, bit for bit."""
    heads = [tensor.scales] if tensor.minima is None else [tensor.scales, tensor.minima]
    half_BH = np.stack([head.reshape(-1) for head in heads], axis=1).astype("<f2")
    code_BP = tensor.packed.reshape(len(half_BH), -1)
    if tensor.bits == 4:
        code_BS = unpack(tensor.packed, tensor.packed.size * 2).reshape(len(half_BH), GROUP_SIZE)
        code_BP = code_BS[:, :_HALF] | code_BS[:, _HALF:] << np.uint8(4)
    return np.concatenate([half_BH.view(np.uint8), code_BP], axis=1).reshape(tensor.shape[0], -1)
