"""A quantized weight as the kernels take it, as floats, with values set into it; halves widened to floats.

All of it is exact, with the library and without (FORMAT 4.2). All functions take C-contiguous arrays, hold no
lock while they run and use one thread; ranges of rows may be handed to several. bfloat16 is held as uint16,
float16 as uint16 or float16.

Shapes: N, K = out and in features; C = masked weights of the tensor; R = rows of a range.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille.native.arrays import check_array, check_output, check_range
from permille.native.library import load
from permille.quantization.nf4 import NF4_CODES
from permille.quantization.source import check_quantized
from permille.quantization.types import QuantizedTensor, Scheme
from permille.tensors import Q8_0, Q8_0_BYTES, Q8_0_WEIGHTS, RawTensor

_INT4_CODES = np.arange(-8, 8, dtype=np.float32)
_UNSIGNED_CODES = np.arange(16, dtype=np.float32)


class Form(IntEnum):
    """Meaning of a code before its scale, with the numbers of `src/weights.inc`."""

    SHARED = 0  # one of 16 numbers, the same for all rows
    BYTES = 1  # itself, an integer in a byte
    SHIFTED = 2  # as SHARED, and its group's minimum is added


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedRows:
    """A view of one weight [N, K]: sizes, types and contiguity are checked once, when it is made by `of`.

    Attributes:
        packed: uint8, as in `QuantizedTensor`; may be a read-only map of the package's file.
        scales: float32, one a group.
        codes: float32 [16]; of bytes nothing.
        minima: float32, one a group where the form is SHIFTED, else none.
        line: weights after which groups begin anew: a row, of nf4 the whole matrix.
    """

    packed: NDArray[np.uint8]
    scales: NDArray[np.float32]
    codes: NDArray[np.float32]
    minima: NDArray[np.float32]
    form: Form
    scheme: Scheme
    group_size: int
    line: int
    shape: tuple[int, int]

    @classmethod
    def of(cls, quantized: QuantizedTensor) -> "PackedRows":
        """Borrow the arrays of a quantized tensor; what is not contiguous is copied.

        Raises:
            InputError: as many codes or scales as the shape does not ask for.
        """
        check_quantized(quantized)
        scales, group_size = np.ascontiguousarray(quantized.scales), quantized.group_size
        rows, columns = quantized.shape
        codes, form, line, minima = np.empty(0, np.float32), Form.BYTES, columns, np.empty(0, np.float32)
        match quantized.scheme:
            case Scheme.NF4:
                codes, form, line = NF4_CODES, Form.SHARED, rows * columns
            case Scheme.INT4:
                codes, form = _INT4_CODES, Form.SHARED
            case Scheme.SOURCE if quantized.minima is not None:
                codes, form, minima = _UNSIGNED_CODES, Form.SHIFTED, np.ascontiguousarray(quantized.minima)
            case Scheme.SOURCE if quantized.bits == 4:
                codes, form = _INT4_CODES, Form.SHARED
            case Scheme.INT8 | Scheme.SOURCE:
                pass
            case other:
                assert_never(other)
        return cls(
            packed=np.ascontiguousarray(quantized.packed),
            scales=scales,
            codes=codes,
            minima=minima,
            form=form,
            scheme=quantized.scheme,
            group_size=group_size,
            line=line,
            shape=quantized.shape,
        )


def dequantize_rows(weight: PackedRows, first: int, last: int, out: NDArray[np.float32]) -> None:
    """Rows first..last to `out` float32 [last - first, K], bit for bit `permille.quantization.dequantize`.

    Raises:
        InputError: a range outside the weight, or an `out` that does not fit.
    """
    columns = weight.shape[1]
    check_range(first, last, weight.shape[0])
    check_output("out", out, np.float32, (last - first, columns))
    library = load()
    if library is None:
        out[...] = decode_rows(weight, first, last)
        return
    coded = (weight.packed, weight.scales, weight.codes, weight.minima, weight.form)
    groups = (weight.group_size, weight.line)
    library.call("dequantize", *coded, *groups, first * columns, last * columns, out)


def decoded_at(
    weight: PackedRows, flat_index: NDArray[np.unsignedinteger | np.signedinteger]
) -> NDArray[np.float32]:
    """Return what the codes decode to at flat indices, float32 of their shape: `value - decoded_at` is what a
    sparse product adds where the codes were not replaced.

    Raises:
        InputError: an index outside the weight.
    """
    flat = flat_index.astype(np.int64)
    size = weight.shape[0] * weight.shape[1]
    if flat.size and (int(flat.min()) < 0 or int(flat.max()) >= size):
        raise InputError(f"expected flat indices below {size}, got {flat.min()}..{flat.max()}")
    return _decode(weight, flat)


def set_values(
    out: NDArray[np.float32], flat_index: NDArray[np.uint32], values: NDArray[np.float32], offset: int = 0
) -> None:
    """`out.flat[flat_index - offset] = values`.

    Args:
        out: a tile of any shape.
        flat_index, values: [C].
        offset: flat index of the tile's first element.

    Raises:
        InputError: other types or shapes, or an index outside the tile; then nothing is written.
    """
    check_output("the tile", out, np.float32, out.shape)
    check_array("indices", flat_index, np.uint32, (None,))
    check_array("values", values, np.float32, flat_index.shape)
    library = load()
    if library is None:
        at = flat_index.astype(np.int64) - offset
        outside = np.nonzero((at < 0) | (at >= out.size))[0]
        bad = int(outside[0]) if outside.size else -1
        if bad < 0:
            out.reshape(-1)[at] = values
    else:
        bad = library.call("set_values", out, out.size, flat_index, values, len(values), offset)
    if bad >= 0:
        raise InputError(f"expected indices within {offset}..{offset + out.size}, got {flat_index[bad]}")


def widen_bf16(source: NDArray[np.uint16], out: NDArray[np.float32]) -> None:
    """bfloat16 to float32, exact, every bit pattern.

    Raises:
        InputError: other types, or shapes that differ.
    """
    check_array("source", source, np.uint16, source.shape)
    check_output("out", out, np.float32, source.shape)
    library = load()
    if library is None:
        np.left_shift(source, np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)
    else:
        library.call("widen_bf16", source, source.size, out)


def widen_q8_0(source_NR: NDArray[np.uint8], out_NK: NDArray[np.float32]) -> None:
    """Decode rows of Q8_0 to float32, exactly: `scale * code`.

    Raises:
        InputError: other types, or shapes that do not fit.
    """
    rows, columns = out_NK.shape
    check_array("source", source_NR, np.uint8, (rows, columns // Q8_0_WEIGHTS * Q8_0_BYTES))
    check_output("out", out_NK, np.float32, (rows, columns // Q8_0_WEIGHTS * Q8_0_WEIGHTS))
    library = load()
    if library is None:
        found = RawTensor(name="", dtype=Q8_0, shape=out_NK.shape, data=source_NR.reshape(-1))
        np.copyto(out_NK, found.float32())
    else:
        library.call("widen_q8_0", source_NR, out_NK.size // Q8_0_WEIGHTS, out_NK)


def widen_f16(source: NDArray[np.uint16] | NDArray[np.float16], out: NDArray[np.float32]) -> None:
    """float16 to float32, exact; a signalling NaN may become a quiet one.

    Raises:
        InputError: other types, or shapes that differ.
    """
    dtype = np.uint16 if source.dtype == np.uint16 else np.float16
    check_array("source", source, dtype, source.shape)
    check_output("out", out, np.float32, source.shape)
    library = load()
    if library is None:
        out[...] = source.view(np.float16)
    else:
        library.call("widen_f16", source, source.size, out)


def _decode(weight: PackedRows, flat: NDArray[np.int64]) -> NDArray[np.float32]:
    """The weights at flat indices, in any shape: one float32 product each, of SHIFTED and a sum."""
    line, column = np.divmod(flat, weight.line)
    groups = -(-weight.line // weight.group_size)
    group = line * groups + column // weight.group_size
    w: NDArray[np.float32]
    if weight.form is Form.BYTES:
        w = weight.packed[flat].view(np.int8).astype(np.float32)
    else:
        codes = (weight.packed[flat >> 1] >> np.where(flat & 1, 0, 4).astype(np.uint8)) & np.uint8(15)
        w = weight.codes[codes]
    w *= weight.scales.reshape(-1)[group]
    if weight.form is Form.SHIFTED:
        w += weight.minima.reshape(-1)[group]
    return w


def decode_rows(weight: PackedRows, first: int, last: int) -> NDArray[np.float32]:
    """Rows first..last, [R, K]."""
    columns = weight.shape[1]
    start, stop = first * columns, last * columns
    w_RK: NDArray[np.float32]
    if weight.form is Form.BYTES:
        w_RK = weight.packed[start:stop].view(np.int8).reshape(-1, columns).astype(np.float32)
    else:
        packed = weight.packed[start // 2 : (stop + 1) // 2]
        codes = np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)[start % 2 :][: stop - start]
        code_RK = codes.reshape(last - first, columns)
        w_RK = weight.codes[code_RK]
    if weight.line == columns:
        scale_RG = weight.scales.reshape(weight.shape[0], -1)[first:last]
        w_RK *= np.repeat(scale_RG, weight.group_size, axis=1)[:, :columns]
        if weight.form is Form.SHIFTED:
            w_RK += np.repeat(weight.minima[first:last], weight.group_size, axis=1)
    else:
        group = weight.group_size
        scales = np.repeat(weight.scales[start // group : -(-stop // group)], group)
        w_RK *= scales[start % group :][: stop - start].reshape(w_RK.shape)
    return w_RK
