"""Products that unpack no weight to memory: the sparse part of a layer, few tokens against codes.

Shapes: M = tokens, N, K = out and in features, C = entries of the sparse matrix, Q = its variants.
"""

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille.native.arrays import check_array, check_range, check_writable
from permille.native.library import Library, load
from permille.native.weights import PackedRows, dequantize_rows

_MAX_TOKENS = 16
"""Above this many tokens, dequantizing a tile and a library's matrix product are faster."""

_BLOCK = 8
_FALLBACK_ROWS = 256
WIDE = 128
"""Features in a block of the widest kernel."""
_RUN = 32


def sparse_product(
    x_MK: NDArray[np.float32],
    row_start_N1: NDArray[np.int32],
    column_C: NDArray[np.int32],
    z_QC: NDArray[np.float32],
    out_QMN: NDArray[np.float32],
) -> None:
    """`out[q] += x Z_q^T` for Q sparse matrices [N, K] with the same pattern, in float32.

    An output's entries are added in their order without fused operations, the sum then to `out`: the same
    bits on every path of the library, for every M, and wherever a token stands in the batch. Without the
    library sums may differ in the last bits.

    Args:
        row_start_N1, column_C: compressed rows (`compressed_rows`); that columns are below K and row starts
            do not fall is checked by whoever makes them, not at each product.

    Raises:
        InputError: other types or shapes, or starts that do not begin at 0 and end at C.
    """
    check_array("x", x_MK, np.float32, (None, None))
    tokens, columns = x_MK.shape
    check_array("row starts", row_start_N1, np.int32, (None,))
    check_array("columns", column_C, np.int32, (None,))
    check_array("z", z_QC, np.float32, (None, len(column_C)))
    rows, queries = len(row_start_N1) - 1, len(z_QC)
    check_array("out", out_QMN, np.float32, (queries, tokens, rows))
    check_writable("out", out_QMN)
    if rows < 0 or row_start_N1[0] != 0 or row_start_N1[-1] != len(column_C):
        raise InputError(
            f"expected row starts from 0 to {len(column_C)}, got {row_start_N1[[0, -1][: rows + 1]]}"
        )
    library = load()
    if library is None:
        _numpy_sparse_product(x_MK, row_start_N1, column_C, z_QC, out_QMN)
        return
    scratch = np.empty(columns * _BLOCK, np.float32)
    library.call(
        "sparse_product", x_MK, tokens, columns, row_start_N1, rows, column_C, z_QC, queries, out_QMN, scratch
    )


def compressed_rows(
    flat_index: NDArray[np.unsignedinteger] | NDArray[np.signedinteger], shape: tuple[int, int]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Row starts [N + 1] and columns [C] of strictly increasing flat indices into [N, K], both int32.

    Raises:
        InputError: indices that do not increase or lie outside, or 2**31 and more of them.
    """
    rows, columns = shape
    flat = flat_index.astype(np.int64)
    if flat.ndim != 1 or flat.size >= 1 << 31 or columns >= 1 << 31 or not (np.diff(flat) > 0).all():
        raise InputError(f"expected fewer than 2**31 increasing flat indices, got {flat.shape}")
    if flat.size and not (flat[0] >= 0 and flat[-1] < rows * columns):
        raise InputError(f"expected flat indices below {rows * columns}, got {flat[0]}..{flat[-1]}")
    starts = np.searchsorted(flat, np.arange(rows + 1, dtype=np.int64) * columns)
    return starts.astype(np.int32), (flat % max(columns, 1)).astype(np.int32)


def packed_product(
    weight: PackedRows,
    x_MK: NDArray[np.float32],
    out_MN: NDArray[np.float32],
    first: int = 0,
    last: int | None = None,
) -> None:
    """`out[:, first:last] = x W[first:last]^T` for at most 16 tokens, straight from the codes, in float32.

    Sums differ from those of a dequantized product in the last bits. In the kernel a token's are the same for
    every M; elsewhere (a fallback: no library, path "scalar", rows that are not whole runs of 32 codes under
    one scale, or groups not of 32, 64 or a multiple of 128) it is BLAS's, whose bits may depend on M.

    Args:
        first, last: rows of the weight, so that threads may share one product; None is N.

    Raises:
        InputError: other types or shapes, more than 16 tokens, or rows outside the weight.
    """
    rows, columns = weight.shape
    last = rows if last is None else last
    check_range(first, last, rows)
    check_array("x", x_MK, np.float32, (None, columns))
    check_array("out", out_MN, np.float32, (len(x_MK), rows))
    check_writable("out", out_MN)
    if len(x_MK) > _MAX_TOKENS:
        raise InputError(f"expected at most {_MAX_TOKENS} tokens, got {len(x_MK)}")
    library = load()
    if library is not None and library.path != "scalar" and is_aligned(weight):
        _from_codes(library, weight, x_MK, out_MN, first, last)
        return
    tile_RK = np.empty((min(_FALLBACK_ROWS, last - first), columns), np.float32)
    for start in range(first, last, _FALLBACK_ROWS):
        stop = min(start + _FALLBACK_ROWS, last)
        dequantize_rows(weight, start, stop, tile_RK[: stop - start])
        out_MN[:, start:stop] = x_MK @ tile_RK[: stop - start].T


def product_floats(tokens: int, columns: int) -> int:
    """Float32 numbers of memory that the kernel needs: the tokens, and the sums of one of them by groups."""
    return tokens * -(-columns // WIDE) * WIDE + columns // _RUN


def is_aligned(weight: PackedRows) -> bool:
    """Rows of whole runs of 32 codes, each under one scale; 128 codes are whole groups or within one."""
    columns, group = weight.shape[1], weight.group_size
    whole = columns % group == 0 or weight.line == columns
    return whole and columns % _RUN == 0 and (group in (32, 64) or group % WIDE == 0)


def _from_codes(
    library: Library,
    weight: PackedRows,
    x_MK: NDArray[np.float32],
    out_MN: NDArray[np.float32],
    first: int,
    last: int,
) -> None:
    rows, columns = weight.shape
    scratch = np.empty(product_floats(len(x_MK), columns), np.float32)
    coded = (weight.packed, weight.scales, weight.codes, weight.minima, weight.form, weight.group_size)
    library.call("packed_product", *coded, columns, first, last, x_MK, len(x_MK), out_MN, rows, scratch)


def _numpy_sparse_product(
    x_MK: NDArray[np.float32],
    row_start_N1: NDArray[np.int32],
    column_C: NDArray[np.int32],
    z_QC: NDArray[np.float32],
    out_QMN: NDArray[np.float32],
) -> None:
    """Entry by entry of the rows: all first entries of the rows, then all second ones."""
    lengths = np.diff(row_start_N1)
    for depth in range(int(lengths.max(initial=0))):
        row = np.nonzero(lengths > depth)[0]
        entry = row_start_N1[row] + depth
        taken_MR = x_MK[:, column_C[entry]]
        for q, z_C in enumerate(z_QC):
            out_QMN[q][:, row] += taken_MR * z_C[entry]
