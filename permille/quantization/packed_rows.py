"""A quantized weight in one form for all schemes, and its decoder in numpy.

All schemes decode in the same way. A code is looked up in a table, or taken as an integer. The number is
multiplied by the scale of its group, and the group's minimum is added if there is one. The numpy code here is
the definition (FORMAT 4.2). The kernels of `permille.native.weights` give the same bits.

Shapes: N = out features, K = in features, R = rows of a range.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille.quantization.nf4 import NF4_CODES
from permille.quantization.source import check_quantized, unpack
from permille.quantization.types import QuantizedTensor, Scheme

_INT4_CODES = np.arange(-8, 8, dtype=np.float32)
_UNSIGNED_CODES = np.arange(16, dtype=np.float32)


class Form(IntEnum):
    """Meaning of a code before it is scaled. The numbers are those of `native/src/weights.inc`."""

    SHARED = 0  # an index into a table of 16 numbers
    BYTES = 1  # an integer in a byte
    SHIFTED = 2  # as SHARED, but the minimum of the group is added after the scale


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedRows:
    """A view of one weight [N, K]. `of` checks sizes, types and contiguity once.

    Attributes:
        packed: uint8, as in `QuantizedTensor`. It may be a read-only map of the package's file.
        scales: float32, one for each group.
        codes: the table of SHARED and SHIFTED, float32 [16]. Empty for BYTES.
        minima: float32, one for each group of SHIFTED, else empty.
        line: the number of weights in a line. A new group begins with each line. A line is a row, or for nf4,
            the whole matrix.
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
        """Borrow the arrays of a quantized tensor. Arrays that are not contiguous are copied.

        Raises:
            InputError: the number of codes or scales does not match the shape.
        """
        check_quantized(quantized)
        scales, group_size = np.ascontiguousarray(quantized.scales), quantized.group_size
        rows, columns = quantized.shape
        codes, form, line, minima = np.empty(0, np.float32), Form.BYTES, columns, np.empty(0, np.float32)
        match quantized.scheme:
            case Scheme.NF4:
                # Blocks of NF4 run across rows (FORMAT 4.2).
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


def decode_rows(weight: PackedRows, first: int, last: int) -> NDArray[np.float32]:
    """Decode the rows from `first` up to, but not including, `last`: float32 [R, K]."""
    columns = weight.shape[1]
    start, stop = first * columns, last * columns
    w_RK: NDArray[np.float32]
    if weight.form is Form.BYTES:
        w_RK = weight.packed[start:stop].view(np.int8).reshape(-1, columns).astype(np.float32)
    else:
        # A row may begin in the middle of a byte.
        codes = unpack(weight.packed[start // 2 : (stop + 1) // 2], start % 2 + stop - start)[start % 2 :]
        w_RK = weight.codes[codes.reshape(-1, columns)]
    if weight.line == columns:
        scale_RG = weight.scales.reshape(weight.shape[0], -1)[first:last]
        # FORMAT 4.2: this product is exact for SOURCE, so only the sum below is rounded.
        w_RK *= np.repeat(scale_RG, weight.group_size, axis=1)[:, :columns]
        if weight.form is Form.SHIFTED:
            w_RK += np.repeat(weight.minima[first:last], weight.group_size, axis=1)
    else:
        group = weight.group_size
        # Groups of nf4 run across rows, so a row may begin in the middle of a group.
        scales = np.repeat(weight.scales[start // group : -(-stop // group)], group)
        w_RK *= scales[start % group :][: stop - start].reshape(w_RK.shape)
    return w_RK


def decoded_at(
    weight: PackedRows, flat_index: NDArray[np.unsignedinteger | np.signedinteger]
) -> NDArray[np.float32]:
    """Decode the weights at flat indices, float32 of the indices' shape.

    A layer with trained sparse values needs them at the masked positions. It multiplies its input by all
    decoded weights, then adds the product of the input and `value - decoded`.

    Raises:
        InputError: an index is outside of the weight.
    """
    flat = flat_index.astype(np.int64)
    size = weight.shape[0] * weight.shape[1]
    if flat.size and (int(flat.min()) < 0 or int(flat.max()) >= size):
        raise InputError(f"expected flat indices below {size}, got {flat.min()}..{flat.max()}")
    line, column = np.divmod(flat, weight.line)
    # A new group begins with each line, and the last group of a line may be shorter.
    group = line * -(-weight.line // weight.group_size) + column // weight.group_size
    w: NDArray[np.float32]
    if weight.form is Form.BYTES:
        w = weight.packed[flat].view(np.int8).astype(np.float32)
    else:
        # The first code of a byte is in its high half.
        codes = (weight.packed[flat >> 1] >> np.where(flat & 1, 0, 4).astype(np.uint8)) & np.uint8(15)
        w = weight.codes[codes]
    w *= weight.scales.reshape(-1)[group]
    if weight.form is Form.SHIFTED:
        w += weight.minima.reshape(-1)[group]
    return w
