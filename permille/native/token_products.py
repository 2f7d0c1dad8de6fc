"""Product of a token with a linear layer: codes, sparse values and bias in one call.

Without a kernel for it (no library, path "scalar", groups that it does not take) the three
are done one after the other.

Shapes: N, K = out and in features, C = entries of the sparse matrix Z, R = rows of a range.
"""

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille.native.arrays import check_array, check_range, check_writable
from permille.native.library import Argument, Held, load
from permille.native.products import is_aligned, packed_product, product_floats, sparse_product
from permille.native.weights import PackedRows


class TokenProduct:
    """`out = (W + Z) x + b` of one token: codes, what sparse values change of them, a bias; in one call."""

    def __init__(
        self,
        weight: PackedRows,
        entries: tuple[NDArray[np.int32], NDArray[np.int32]],
        difference_C: NDArray[np.float32],
        bias_N: NDArray[np.float32] | None,
    ) -> None:
        """`entries`: row starts and columns of Z, as `compressed_rows` makes them.

        Raises:
            InputError: other types or shapes.
        """
        rows, columns = weight.shape
        check_array("row starts", entries[0], np.int32, (rows + 1,))
        check_array("columns", entries[1], np.int32, (None,))
        check_array("differences", difference_C, np.float32, entries[1].shape)
        if entries[0][0] != 0 or entries[0][-1] != len(entries[1]):
            raise InputError(f"expected row starts from 0 to {len(entries[1])}, got {entries[0][[0, -1]]}")
        if bias_N is not None:
            check_array("bias", bias_N, np.float32, (rows,))
        self._weight, self._entries, self._difference_C, self._bias_N = weight, entries, difference_C, bias_N
        self._arguments: tuple[Argument, ...] | None = None
        if is_aligned(weight):
            arrays = (Held(weight.packed), Held(weight.scales), Held(weight.codes), Held(weight.minima))
            coded = (*arrays, int(weight.form))
            bias = Held(np.empty(1, np.float32) if bias_N is None else bias_N)
            sparse = (Held(entries[0]), Held(entries[1]), Held(difference_C), bias, int(bias_N is not None))
            self._arguments = (*coded, weight.group_size, columns, *sparse)

    def run(self, x_1K: NDArray[np.float32], out_1N: NDArray[np.float32], first: int, last: int) -> None:
        """Rows first..last of `out`, so that threads may share one product.

        Raises:
            InputError: other types or shapes, or rows outside the weight.
        """
        rows, columns = self._weight.shape
        check_range(first, last, rows)
        check_array("x", x_1K, np.float32, (1, columns))
        check_array("out", out_1N, np.float32, (1, rows))
        check_writable("out", out_1N)
        library = load()
        if library is not None and library.path != "scalar" and self._arguments is not None:
            scratch = np.empty(product_floats(1, columns), np.float32)
            library.call("token_product", *self._arguments, first, last, x_1K, out_1N, scratch)
            return
        packed_product(self._weight, x_1K, out_1N, first, last)
        row_start_N1, column_C = self._entries
        own = slice(int(row_start_N1[first]), int(row_start_N1[last]))
        starts = row_start_N1[first : last + 1] - row_start_N1[first]
        change_11R = np.zeros((1, 1, last - first), np.float32)
        sparse_product(x_1K, starts, column_C[own], self._difference_C[None, own], change_11R)
        if self._bias_N is not None:
            change_11R += self._bias_N[first:last]
        out_1N[:, first:last] += change_11R[0]
