"""Products that never write an unpacked weight to memory.

`sparse_product` adds to a layer's output what sparse values change. `TokenProduct` multiplies one token by
the codes of a whole layer. For several tokens, it is faster to dequantize a tile of the weight and to call
BLAS, as `permille.engines.light.linear` does.

Shapes: M = tokens, N, K = out and in features, C = entries of a sparse matrix, Q = sparse matrices with
entries in the same places, R = rows of a range.
"""

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille.native.arrays import check_array, check_output, check_range
from permille.native.library import Argument, Held, load
from permille.native.weights import dequantize_rows
from permille.quantization.packed_rows import PackedRows

# The number of tokens that the kernel of `sparse_product` processes together.
_BLOCK = 8
# The number of rows that numpy decodes at a time, so that the whole weight is never in memory.
_FALLBACK_ROWS = 256
_WIDE = 128  # features in a block of the widest kernel
_RUN = 32


def sparse_product(
    x_MK: NDArray[np.float32],
    row_start_N1: NDArray[np.int32],
    column_C: NDArray[np.int32],
    z_QC: NDArray[np.float32],
    out_QMN: NDArray[np.float32],
) -> None:
    """Add `x Z_q^T` to `out[q]` for Q sparse matrices [N, K] with entries in the same places, in float32.

    An output is a sum over the entries of a row. The kernels add in the order of these entries, without fused
    operations. So every code path gives the same bits, for every M. Without the library, sums may differ in
    the last bits.

    Args:
        row_start_N1: the number of entries before each row, and after the last row, the number of all
            entries.
        column_C: the column of each entry, row by row. Neither the columns nor the starts between the first
            and the last are checked.

    Raises:
        InputError: an array has another type or shape, or the starts do not run from 0 to C.
    """
    check_array("x", x_MK, np.float32, (None, None))
    tokens, columns = x_MK.shape
    check_array("row starts", row_start_N1, np.int32, (None,))
    check_array("columns", column_C, np.int32, (None,))
    check_array("z", z_QC, np.float32, (None, len(column_C)))
    rows, queries = len(row_start_N1) - 1, len(z_QC)
    check_output("out", out_QMN, np.float32, (queries, tokens, rows))
    _check_starts(row_start_N1, column_C)
    library = load()
    if library is None:
        _numpy_sparse_product(x_MK, row_start_N1, column_C, z_QC, out_QMN)
        return
    # In this memory, the kernel puts eight tokens side by side, so that it reads a feature of all eight as
    # one vector.
    scratch = np.empty(columns * _BLOCK, np.float32)
    library.call(
        "sparse_product", x_MK, tokens, columns, row_start_N1, rows, column_C, z_QC, queries, out_QMN, scratch
    )


class TokenProduct:
    """The product `out = (W + Z) x + b` of one token: codes, sparse values and bias in one call.

    The kernel takes groups of 32, 64 or a multiple of 128 codes, and rows that are whole runs of 32 (see
    `_is_aligned`). For other weights, on the path "scalar", or without the library, numpy dequantizes the
    rows and multiplies them.
    """

    def __init__(
        self,
        weight: PackedRows,
        entries: tuple[NDArray[np.int32], NDArray[np.int32]],
        difference_C: NDArray[np.float32],
        bias_N: NDArray[np.float32] | None,
    ) -> None:
        """Check the arrays once, for all tokens of a text.

        Args:
            weight: W, [N, K].
            entries: row starts and columns of Z, as for `sparse_product`.
            difference_C: the entries of Z, value minus decoded weight.
            bias_N: b, or None.

        Raises:
            InputError: an array has another type or shape.
        """
        rows, columns = weight.shape
        check_array("row starts", entries[0], np.int32, (rows + 1,))
        check_array("columns", entries[1], np.int32, (None,))
        check_array("differences", difference_C, np.float32, entries[1].shape)
        _check_starts(*entries)
        if bias_N is not None:
            check_array("bias", bias_N, np.float32, (rows,))
        self._weight, self._entries, self._difference_C, self._bias_N = weight, entries, difference_C, bias_N
        self._arguments: tuple[Argument, ...] | None = None
        if _is_aligned(weight):
            arrays = (Held(weight.packed), Held(weight.scales), Held(weight.codes), Held(weight.minima))
            coded = (*arrays, int(weight.form))
            bias = Held(np.empty(1, np.float32) if bias_N is None else bias_N)
            sparse = (Held(entries[0]), Held(entries[1]), Held(difference_C), bias, int(bias_N is not None))
            self._arguments = (*coded, weight.group_size, columns, *sparse)

    def run(self, x_1K: NDArray[np.float32], out_1N: NDArray[np.float32], first: int, last: int) -> None:
        """Compute rows `first` to `last` of `out`, so that threads can share one product.

        Raises:
            InputError: an array has another type or shape, or the rows lie outside the weight.
        """
        rows, columns = self._weight.shape
        check_range(first, last, rows)
        check_array("x", x_1K, np.float32, (1, columns))
        check_output("out", out_1N, np.float32, (1, rows))
        library = load()
        if library is None or library.path == "scalar" or self._arguments is None:
            self._run_numpy(x_1K, out_1N, first, last)
            return
        # In this memory, the kernel stores the token in an order of its own. For codes with minima (Q4_1), it
        # also stores the sum of the token's features in each group.
        scratch = np.empty(-(-columns // _WIDE) * _WIDE + columns // _RUN, np.float32)
        library.call("token_product", *self._arguments, first, last, x_1K, out_1N, scratch)

    def _run_numpy(
        self, x_1K: NDArray[np.float32], out_1N: NDArray[np.float32], first: int, last: int
    ) -> None:
        tile_RK = np.empty((min(_FALLBACK_ROWS, last - first), x_1K.shape[1]), np.float32)
        for start in range(first, last, _FALLBACK_ROWS):
            stop = min(start + _FALLBACK_ROWS, last)
            dequantize_rows(self._weight, start, stop, tile_RK[: stop - start])
            out_1N[:, start:stop] = x_1K @ tile_RK[: stop - start].T
        row_start_N1, column_C = self._entries
        own = slice(int(row_start_N1[first]), int(row_start_N1[last]))
        starts = row_start_N1[first : last + 1] - row_start_N1[first]
        change_11R = np.zeros((1, 1, last - first), np.float32)
        sparse_product(x_1K, starts, column_C[own], self._difference_C[None, own], change_11R)
        if self._bias_N is not None:
            change_11R += self._bias_N[first:last]
        out_1N[:, first:last] += change_11R[0]


def _check_starts(row_start_N1: NDArray[np.int32], column_C: NDArray[np.int32]) -> None:
    if not len(row_start_N1) or row_start_N1[0] != 0 or row_start_N1[-1] != len(column_C):
        raise InputError(
            f"expected row starts from 0 to {len(column_C)}, got {row_start_N1[:1]} to {row_start_N1[-1:]}"
        )


def _is_aligned(weight: PackedRows) -> bool:
    """Return whether the kernel accepts the groups.

    Each run of 32 codes must have a single scale, and no group may reach across the end of a row.
    """
    columns, group = weight.shape[1], weight.group_size
    # Groups of NF4 run along the flat matrix. They end with each row only if the group size divides its
    # length.
    whole = columns % group == 0 or weight.line == columns
    return whole and columns % _RUN == 0 and (group in (32, 64) or group % _WIDE == 0)


def _numpy_sparse_product(
    x_MK: NDArray[np.float32],
    row_start_N1: NDArray[np.int32],
    column_C: NDArray[np.int32],
    z_QC: NDArray[np.float32],
    out_QMN: NDArray[np.float32],
) -> None:
    # Add the first entry of every row, then the second, and so on. The kernel adds the entries of a row in
    # the same order.
    lengths = np.diff(row_start_N1)
    for depth in range(int(lengths.max(initial=0))):
        row = np.nonzero(lengths > depth)[0]
        entry = row_start_N1[row] + depth
        taken_MR = x_MK[:, column_C[entry]]
        for q, z_C in enumerate(z_QC):
            out_QMN[q][:, row] += taken_MR * z_C[entry]
