"""Quantization of weights to 4 and 8 bits, and its inverse, in numpy alone.

    coded = quantize(w_NK, "nf4", 64)
    decoded_NK = dequantize(coded)

Quantization ignores masks. At a masked position, a layer computes with the trained sparse value, not with the
code. All schemes give the same codes on every machine. They need little memory besides input and output.
Also:

- a group of zeros gets scale 0, and decodes to zeros;
- NaN and infinity are refused with the tensor's name.
"""

import numpy as np
from numpy.typing import NDArray

from permille.choices import choice_of
from permille.errors import InputError
from permille.quantization import gguf_blocks, integers, nf4
from permille.quantization.packed_rows import PackedRows, decode_rows
from permille.quantization.source import row_chunks
from permille.quantization.types import QuantizedTensor, Scheme


def quantize(
    w_NK: NDArray[np.float32],
    scheme: Scheme | str,
    group_size: int,
    *,
    name: str = "weight",
) -> QuantizedTensor:
    """Quantize a weight [N, K].

    >>> quantize(np.ones((1, 64), np.float32), "nf4", 64).scales.tolist()
    [1.0]

    Raises:
        InputError: a weight is not finite, the scheme does not exist, or the scheme has no such group size.
    """
    match choice_of(Scheme, scheme, "a scheme"):
        case Scheme.NF4:
            if group_size != nf4.BLOCK_SIZE:
                raise InputError(f"nf4 takes only groups of {nf4.BLOCK_SIZE}, not {group_size}.")
            return nf4.quantize(w_NK, name=name)
        case Scheme.INT4 | Scheme.INT8:
            return integers.quantize(w_NK, Scheme(scheme), group_size, name=name)
        case Scheme.SOURCE:
            raise InputError(
                f"{name}: the scheme source keeps the codes of a GGUF file. Add the model from such a file, "
                "or choose another scheme."
            )


def dequantize(quantized: QuantizedTensor) -> NDArray[np.float32]:
    """Decode a weight to float32 [N, K].

    Raises:
        InputError: the number of codes or scales does not fit the shape.
    """
    weight = PackedRows.of(quantized)
    w_NK = np.empty(quantized.shape, np.float32)
    for start, stop in row_chunks(*quantized.shape):
        w_NK[start:stop] = decode_rows(weight, start, stop)
    return w_NK


_DEFAULT_GROUP_SIZES = {
    Scheme.NF4: nf4.BLOCK_SIZE,
    Scheme.INT4: 32,
    Scheme.INT8: 128,  # ADR 13
    Scheme.SOURCE: gguf_blocks.GROUP_SIZE,
}


def default_group_size(scheme: Scheme | str) -> int:
    """Return the group size that a scheme uses by default.

    >>> default_group_size("nf4")
    64
    """
    return _DEFAULT_GROUP_SIZES[choice_of(Scheme, scheme, "a scheme")]
