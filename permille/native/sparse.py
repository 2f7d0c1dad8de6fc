"""A weight of which only the kept ones have codes, as the kernels take it, and as floats.

Decoding is exact, with the library and without (FORMAT 4.2). As in `weights`, functions take C-contiguous
arrays, hold no lock while they run and use one thread.

Shapes: N, K = out and in features; C = kept weights; R = rows of a range.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from permille.native.arrays import check_array, check_range, check_writable
from permille.native.library import Library, load
from permille.native.products import packed_product
from permille.native.weights import PackedRows, decoded_at, dequantize_rows
from permille.quantization.sparse import check_pattern, places, ranks, row_starts
from permille.quantization.types import Coded, Pattern, SparseTensor, Sparsity

_TILE_ROWS = 256
_KERNELS = ("avx512", "avx2")
# byte -> the places of its set bits, and as many zeros as it has others
_BITS = np.zeros((256, 8), np.uint8)
for _byte in range(256):
    _places = [bit for bit in range(8) if _byte >> bit & 1]
    _BITS[_byte, : len(_places)] = _places


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SparseRows:
    """A view of one weight [N, K]: everything is checked once, when it is made by `of`.

    Attributes:
        kept: the kept weights in flat order, as one row [1, C].
        start_N1: kept weights before each row, int64, and last all of them.
    """

    pattern: Pattern
    kept: PackedRows
    start_N1: NDArray[np.int64]

    @classmethod
    def of(cls, tensor: SparseTensor) -> "SparseRows":
        """Borrow the arrays of a sparse tensor; what is not contiguous is copied.

        Raises:
            InputError: codes, scales or a pattern that the shape does not ask for.
        """
        check_pattern(tensor.pattern, tensor.kept.shape[1])
        pattern = Pattern(
            sparsity=tensor.pattern.sparsity,
            shape=tensor.shape,
            packed=np.ascontiguousarray(tensor.pattern.packed),
        )
        return cls(pattern=pattern, kept=PackedRows.of(tensor.kept), start_N1=row_starts(pattern))

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.pattern.shape


CodedRows = PackedRows | SparseRows


def coded_rows(tensor: Coded) -> CodedRows:
    """A view of a quantized weight of either kind.

    Raises:
        InputError: as `PackedRows.of` and `SparseRows.of`.
    """
    return SparseRows.of(tensor) if isinstance(tensor, SparseTensor) else PackedRows.of(tensor)


def decode_tile(weight: CodedRows, first: int, last: int, out: NDArray[np.float32]) -> None:
    """Rows first..last to `out` float32 [R, K], bit for bit `permille.quantization.dequantize`.

    Raises:
        InputError: a range outside the weight, or an `out` that does not fit.
    """
    if isinstance(weight, SparseRows):
        dequantize_sparse_rows(weight, first, last, out)
    else:
        dequantize_rows(weight, first, last, out)


def decode_at(weight: CodedRows, flat_index: NDArray[np.unsignedinteger]) -> NDArray[np.float32]:
    """Return what the weight decodes to at rising flat indices.

    Raises:
        InputError: an index outside the weight.
    """
    if isinstance(weight, SparseRows):
        return sparse_decoded_at(weight, flat_index)
    return decoded_at(weight, flat_index)


def product_of_codes(
    weight: CodedRows, x_MK: NDArray[np.float32], out_MN: NDArray[np.float32], first: int, last: int
) -> None:
    """`out[:, first:last] = x W[first:last]^T` for few tokens, without a decoded weight where a kernel can.

    Raises:
        InputError: as `packed_product`.
    """
    if isinstance(weight, SparseRows):
        sparse_packed_product(weight, x_MK, out_MN, first, last)
    else:
        packed_product(weight, x_MK, out_MN, first, last)


def sparse_packed_product(
    weight: SparseRows, x_MK: NDArray[np.float32], out_MN: NDArray[np.float32], first: int, last: int
) -> None:
    """`out[:, first:last] = x W[first:last]^T`, as `permille.native.products.packed_product`: straight from
    the codes, token by token, without the zeros, where the path has the kernel (AVX2, AVX-512).

    Raises:
        InputError: other types or shapes, or rows outside the weight.
    """
    rows, columns = weight.shape
    check_range(first, last, rows)
    check_array("x", x_MK, np.float32, (None, columns))
    check_array("out", out_MN, np.float32, (len(x_MK), rows))
    check_writable("out", out_MN)
    library = load()
    if library is not None and library.path in _KERNELS:
        for x_K, out_N in zip(x_MK, out_MN, strict=True):
            _token_product(library, weight, (first, last), x_K, out_N)
        return
    tile_RK = np.empty((min(_TILE_ROWS, last - first), columns), np.float32)
    for start in range(first, last, _TILE_ROWS):
        stop = min(start + _TILE_ROWS, last)
        dequantize_sparse_rows(weight, start, stop, tile_RK[: stop - start])
        out_MN[:, start:stop] = x_MK @ tile_RK[: stop - start].T


def _token_product(
    library: Library,
    weight: SparseRows,
    rows: tuple[int, int],
    x_K: NDArray[np.float32],
    out_N: NDArray[np.float32],
) -> None:
    kept, columns = weight.kept, weight.shape[1]
    is_bitmap = weight.pattern.sparsity is Sparsity.BITMAP
    coded = (kept.packed, kept.scales, kept.codes, kept.group_size)
    scratch = np.empty(columns + 2 * kept.group_size + 32, np.float32)
    if not is_bitmap and columns // 2 % kept.group_size == 0:
        library.call(
            "two_of_four_product", *coded, columns, weight.pattern.packed, *rows, x_K, out_N, scratch
        )
        return
    where = (weight.pattern.packed, int(is_bitmap), columns, weight.start_N1)
    library.call("kept_product", *coded, kept.line, *where, *rows, x_K, out_N, _BITS, scratch)


def dequantize_sparse_rows(weight: SparseRows, first: int, last: int, out: NDArray[np.float32]) -> None:
    """Rows first..last to `out` float32 [R, K], bit for bit `permille.quantization.dequantize`.

    Raises:
        InputError: a range outside the weight, or an `out` that does not fit.
    """
    rows, columns = weight.shape
    check_range(first, last, rows)
    check_array("out", out, np.float32, (last - first, columns))
    check_writable("out", out)
    library, kept = load(), weight.kept
    if library is None:
        out[...] = 0
        kept_RK = places(weight.pattern, first, last)
        out[kept_RK] = decoded_at(kept, np.arange(weight.start_N1[first], weight.start_N1[last]))
        return
    is_bitmap = int(weight.pattern.sparsity is Sparsity.BITMAP)
    coded = (kept.packed, kept.scales, kept.codes, kept.group_size, kept.line)
    where = (weight.pattern.packed, is_bitmap, columns, weight.start_N1)
    library.call("sparse_dequantize", *coded, *where, first, last, np.empty(columns + 16, np.float32), out)


def sparse_decoded_at(weight: SparseRows, flat_index: NDArray[np.integer]) -> NDArray[np.float32]:
    """Return what the weight decodes to at rising flat indices; zero where nothing is kept.

    Raises:
        InputError: an index outside the weight.
    """
    rank_J, is_kept_J = ranks(weight.pattern, flat_index)
    found_J = np.zeros(flat_index.shape, np.float32)
    found_J[is_kept_J] = decoded_at(weight.kept, rank_J[is_kept_J])
    return found_J
