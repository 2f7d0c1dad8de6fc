"""Schemes of 4 and 8 bits: quantize beside dequantize. numpy only.

A dense layer knows no mask: at a masked position a layer computes with the sparse value, whatever the codes
decode to there. What all schemes promise: the same codes on every machine, bounded memory beside input and
output, and

- a group without any weight other than zero decodes to zeros, and has scale 0 where it has one;
- of a sparse weight, which keeps codes of some weights alone, zeros decode to zeros (`sparse`);
- NaN and infinity are refused with the tensor's name.
"""

import numpy as np
from numpy.typing import NDArray

from permille.choices import choice_of
from permille.errors import InputError
from permille.quantization import gguf_blocks, integers, nf4
from permille.quantization.source import pack, unpack
from permille.quantization.sparse import check_pattern, kept_places, pack_places, places
from permille.quantization.types import (
    SPARSE_SCHEMES,
    Coded,
    QuantizedTensor,
    Scheme,
    SparseTensor,
    Sparsity,
)

_ROWS = 256


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


def quantize_sparse(
    w_NK: NDArray[np.float32],
    scheme: Scheme | str,
    group_size: int,
    sparsity: Sparsity,
    *,
    name: str = "weight",
) -> SparseTensor:
    """Quantize the weights [N, K] that are not zero; scales are of these alone.

    Raises:
        InputError: as `quantize`, a scheme without patterns, or a weight that has more than two of four for
            2:4.
    """
    if choice_of(Scheme, scheme, "a scheme") not in SPARSE_SCHEMES:
        raise InputError(f"A pattern of kept weights takes nf4 or int4, not {scheme}.")
    kept_NK = kept_places(w_NK, sparsity, name=name)
    return SparseTensor(
        pattern=pack_places(kept_NK, sparsity),
        kept=quantize(w_NK[kept_NK][None], scheme, group_size, name=name),
    )


def dequantize(quantized: Coded) -> NDArray[np.float32]:
    """The weight [N, K] float32 that the codes stand for.

    Raises:
        InputError: as many codes or scales as the shape does not ask for, or a pattern of another shape.
    """
    if isinstance(quantized, SparseTensor):
        return _scattered(quantized)
    match quantized.scheme:
        case Scheme.NF4:
            return nf4.dequantize(quantized)
        case Scheme.INT4 | Scheme.INT8:
            return integers.dequantize(quantized)
        case Scheme.SOURCE:
            return gguf_blocks.dequantize(quantized)


def whole_int4(tensor: SparseTensor) -> QuantizedTensor | None:
    """int4 of 2:4 with codes for the zeros too, bit for bit the same weights; None where groups of kept
    weights are no groups of a row.

    Raises:
        InputError: another scheme.
    """
    kept, (rows, columns) = tensor.kept, tensor.shape
    if kept.scheme is not Scheme.INT4:
        raise InputError(f"Only int4 codes can be whole, not {kept.scheme}.")
    if tensor.pattern.sparsity is Sparsity.BITMAP or columns // 2 % kept.group_size:
        return None
    code_NK = np.full(tensor.shape, 8, np.uint8)
    code_NK[places(tensor.pattern, 0, rows)] = unpack(kept.packed, kept.shape[1])
    return QuantizedTensor(
        scheme=Scheme.INT4,
        shape=tensor.shape,
        group_size=2 * kept.group_size,
        packed=pack(code_NK.reshape(-1)),
        scales=kept.scales.reshape(rows, -1),
    )


def _scattered(tensor: SparseTensor) -> NDArray[np.float32]:
    check_pattern(tensor.pattern, tensor.kept.shape[1])
    w_NK, kept_C, done = np.zeros(tensor.shape, np.float32), dequantize(tensor.kept)[0], 0
    for first in range(0, tensor.shape[0], _ROWS):
        kept_RK = places(tensor.pattern, first, min(first + _ROWS, tensor.shape[0]))
        count = int(np.count_nonzero(kept_RK))
        w_NK[first : first + _ROWS][kept_RK] = kept_C[done : done + count]
        done += count
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
