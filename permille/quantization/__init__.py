"""Schemes of 4 and 8 bits: quantize beside dequantize. numpy only.

A dense layer knows no mask: at a masked position a layer computes with the sparse value, whatever the codes
decode to there. What all schemes promise: the same codes on every machine, bounded memory beside input and
output, and

- a group without any weight other than zero decodes to zeros, and has scale 0 where it has one;
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
    """Quantize one weight [N, K].

    Raises:
        InputError: NaN or infinity, a scheme that does not exist, or a group size that it lacks.
    """
    match choice_of(Scheme, scheme, "a scheme"):
        case Scheme.NF4:
            if group_size != nf4.BLOCK_SIZE:
                raise InputError(f"nf4 takes groups of {nf4.BLOCK_SIZE} alone, not {group_size}.")
            return nf4.quantize(w_NK, name=name)
        case Scheme.INT4 | Scheme.INT8:
            return integers.quantize(w_NK, Scheme(scheme), group_size, name=name)
        case Scheme.SOURCE:
            raise InputError(f"{name}: scheme source keeps the codes of a GGUF file. Add the model from one.")


def dequantize(quantized: QuantizedTensor) -> NDArray[np.float32]:
    """The weight [N, K] float32 that the codes stand for.

    Raises:
        InputError: as many codes or scales as the shape does not ask for.
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
    """Return the weights that share a scale unless another number is asked for. For example, 64 of NF4."""
    return _DEFAULT_GROUP_SIZES[choice_of(Scheme, scheme, "a scheme")]
