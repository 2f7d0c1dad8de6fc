"""Kernels that decode rows of a weight, set values in them, and convert 16-bit floats and Q8_0 to float32.

All results are exact, with and without the library (FORMAT 4.2). Arrays must be C-contiguous. Kernels
release the interpreter's lock and use one thread, so several threads can share the rows. bfloat16 is
held as uint16, float16 as uint16 or float16.

Shapes: N, K = out and in features; C = masked weights of the tensor; R = rows of a range.
"""

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille.native.arrays import check_array, check_output, check_range
from permille.native.library import load
from permille.quantization.packed_rows import PackedRows, decode_rows
from permille.tensors import Q8_0, Q8_0_BYTES, Q8_0_WEIGHTS, RawTensor


def dequantize_rows(weight: PackedRows, first: int, last: int, out: NDArray[np.float32]) -> None:
    """Decode rows to `out`, float32 [last - first, K], bit by bit as `permille.quantization.dequantize` does.

    Raises:
        InputError: the range is outside of the weight, or `out` does not fit.
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


def set_values(
    out: NDArray[np.float32], flat_index: NDArray[np.uint32], values: NDArray[np.float32], offset: int = 0
) -> None:
    """Set `out.flat[flat_index - offset] = values`.

    Args:
        out: a tile of any shape.
        flat_index, values: [C].
        offset: the flat index of the tile's first element.

    Raises:
        InputError: an array has another type or shape, or an index is outside of the tile. In both cases,
            nothing is written.
    """
    check_output("the tile", out, np.float32, out.shape)
    check_array("indices", flat_index, np.uint32, (None,))
    check_array("values", values, np.float32, flat_index.shape)
    library = load()
    if library is None:
        # Like the kernel, check all indices before the first value is written.
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
    """Convert bfloat16 to float32, exactly for every bit pattern.

    Raises:
        InputError: an array has another type or shape.
    """
    check_array("source", source, np.uint16, source.shape)
    check_output("out", out, np.float32, source.shape)
    library = load()
    if library is None:
        # bfloat16 is the upper half of a float32.
        np.left_shift(source, np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)
    else:
        library.call("widen_bf16", source, source.size, out)


def widen_q8_0(source_NR: NDArray[np.uint8], out_NK: NDArray[np.float32]) -> None:
    """Decode rows of Q8_0 to float32, exactly: `scale * code`.

    Raises:
        InputError: an array has another type or shape.
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
    """Convert float16 to float32, exactly. A signalling NaN may become a quiet one.

    Raises:
        InputError: an array has another type or shape.
    """
    dtype = np.uint16 if source.dtype == np.uint16 else np.float16
    check_array("source", source, dtype, source.shape)
    check_output("out", out, np.float32, source.shape)
    library = load()
    if library is None:
        out[...] = source.view(np.float16)
    else:
        library.call("widen_f16", source, source.size, out)
