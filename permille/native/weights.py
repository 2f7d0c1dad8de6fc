"""Four-bit weights to floats, values into tiles, widening: exact, with the library and without.

All functions take C-contiguous arrays, hold no lock while they run and use one thread; ranges of rows may be
handed to several. bfloat16 is held as uint16, float16 as uint16 or float16.

Shapes: N, K = out and in features; C = masked weights of the tensor; R = rows of a range.
"""

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille.native.arrays import check_array, check_writable
from permille.native.library import load
from permille.native.products import packed_product, sparse_product
from permille.native.rows import PackedRows, bf16_of, decode, dequantize_rows, dequantize_rows_bf16

__all__ = [
    "PackedRows",
    "bf16_of",
    "decoded_at",
    "dequantize_rows",
    "dequantize_rows_bf16",
    "packed_product",
    "set_values",
    "sparse_product",
    "widen_bf16",
    "widen_f16",
]


def decoded_at(
    weight: PackedRows, flat_index: NDArray[np.unsignedinteger | np.signedinteger]
) -> NDArray[np.float32]:
    """What the codes decode to at flat indices, float32 of their shape: `value - decoded_at` is what a
    sparse product adds where the codes were not replaced.

    Raises:
        InputError: an index outside the weight.
    """
    flat = flat_index.astype(np.int64)
    size = weight.shape[0] * weight.shape[1]
    if flat.size and (int(flat.min()) < 0 or int(flat.max()) >= size):
        raise InputError(f"expected flat indices below {size}, got {flat.min()}..{flat.max()}")
    return decode(weight, flat)


def set_values(
    out: NDArray[np.float32] | NDArray[np.uint16],
    flat_index: NDArray[np.int64] | NDArray[np.uint32],
    values: NDArray[np.float32],
    offset: int = 0,
) -> None:
    """`out.flat[flat_index - offset] = values`, or their bfloat16 where `out` is uint16.

    Args:
        out: a tile of any shape.
        flat_index, values: [C].
        offset: flat index of the tile's first element.

    Raises:
        InputError: other types or shapes, or an index outside the tile; then nothing is written.
    """
    if out.dtype not in (np.float32, np.uint16):
        raise InputError(f"expected a tile of float32 or uint16, got {out.dtype}")
    if flat_index.dtype not in (np.int64, np.uint32):
        raise InputError(f"expected indices of int64 or uint32, got {flat_index.dtype}")
    check_array("the tile", out, out.dtype.type, out.shape)
    check_writable("the tile", out)
    check_array("indices", flat_index, flat_index.dtype.type, (None,))
    check_array("values", values, np.float32, flat_index.shape)
    library = load()
    if library is None:
        at = flat_index.astype(np.int64) - offset
        outside = np.nonzero((at < 0) | (at >= out.size))[0]
        bad = int(outside[0]) if outside.size else -1
        if bad < 0:
            out.reshape(-1)[at] = values if out.dtype == np.float32 else bf16_of(values)
    else:
        kinds = (
            "f32" if out.dtype == np.float32 else "bf16",
            "i64" if flat_index.dtype == np.int64 else "u32",
        )
        arguments = (out, out.size, flat_index, values, len(values), offset)
        bad = library.call(f"set_values_{kinds[0]}_{kinds[1]}", *arguments)
    if bad >= 0:
        raise InputError(f"expected indices within {offset}..{offset + out.size}, got {flat_index[bad]}")


def widen_bf16(source: NDArray[np.uint16], out: NDArray[np.float32]) -> None:
    """bfloat16 to float32, exact, every bit pattern.

    Raises:
        InputError: other types, or shapes that differ.
    """
    check_array("source", source, np.uint16, source.shape)
    check_array("out", out, np.float32, source.shape)
    check_writable("out", out)
    library = load()
    if library is None:
        np.left_shift(source, np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)
    else:
        library.call("widen_bf16", source, source.size, out)


def widen_f16(source: NDArray[np.uint16] | NDArray[np.float16], out: NDArray[np.float32]) -> None:
    """float16 to float32, exact; a signalling NaN may become a quiet one.

    Raises:
        InputError: other types, or shapes that differ.
    """
    dtype = np.uint16 if source.dtype == np.uint16 else np.float16
    check_array("source", source, dtype, source.shape)
    check_array("out", out, np.float32, source.shape)
    check_writable("out", out)
    library = load()
    if library is None:
        out[...] = source.view(np.float16)
    else:
        library.call("widen_f16", source, source.size, out)
