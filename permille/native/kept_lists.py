"""Many tokens times a sparse weight, without its zeros: lists of kept weights in place of a decoded tile.

A tile's kept weights are decoded once, with their columns, in strips of 128 columns whose inputs stay in the
first cache; tokens lie side by side, so a kept weight is one broadcast and some fused products. Where this
pays was measured (`pays`); elsewhere a decoded tile and a library's product are as fast or faster.

Shapes: N, K = out and in features; C = kept weights of the tile; R = its rows; M = tokens; J = masked
weights of the tile.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille.native.arrays import check_array, check_range, check_writable
from permille.native.library import Library, load
from permille.native.sparse import CodedRows, SparseRows
from permille.quantization.types import Sparsity

STRIP = 128
_BLOCK_TOKENS = {"avx512": 64, "avx2": 32}
_LEAST_TOKENS = 128
"""Least number of tokens. With fewer, decoding the lists takes as long as it saves."""

_MOST_KEPT = {"avx512": 0.52, "avx2": 0.45}
"""Share of kept weights from which a product that skips the others takes longer than one that does not."""

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptLists:
    """The kept weights of a tile, strip by strip, in a strip row by row.

    Attributes:
        value_C: what they decode to, or the sparse values that were set.
        column_C: uint8, within the strip.
        begin: int32 [strips * R + 1], where each row of a strip begins.
        shape: (R, K) of the tile.
    """

    library: Library
    value_C: Array
    column_C: NDArray[np.uint8]
    begin: NDArray[np.int32]
    shape: tuple[int, int]

    @property
    def scratch_floats(self) -> int:
        """Numbers that `lists_product` needs as memory."""
        return _BLOCK_TOKENS[self.library.path] * sum(self.shape)

    def places(self, index_J: NDArray[np.uint32], offset: int) -> NDArray[np.int32]:
        """Return the positions of weights in `value_C` by flat index.

        `offset` is the index of the tile's first weight.

        Raises:
            InputError: one of them is outside the tile or not kept.
        """
        check_array("indices", index_J, np.uint32, (None,))
        place_J = np.empty(len(index_J), np.int32)
        rows, columns = self.shape
        lists = (self.column_C, self.begin, place_J)
        bad = self.library.call("kept_places", index_J, len(index_J), offset, columns, rows, *lists)
        if bad >= 0:
            raise InputError(f"expected kept weights of the tile, got flat index {index_J[bad]}")
        return place_J


def pays(weight: CodedRows, tokens: int) -> bool:
    """Return whether a product that skips zeros is faster than a decoded tile.

    See docs/results/engine.md.
    """
    library = load()
    if not isinstance(weight, SparseRows) or library is None or library.path not in _MOST_KEPT:
        return False
    rows, columns = weight.shape
    structured = weight.pattern.sparsity is Sparsity.TWO_OF_FOUR
    few = structured or int(weight.start_N1[-1]) <= _MOST_KEPT[library.path] * rows * columns
    return few and tokens >= _LEAST_TOKENS and columns % STRIP == 0


def lists_floats(weight: SparseRows, first: int, last: int) -> int:
    """Float32 numbers that `kept_lists` needs as memory for these rows."""
    kept = int(weight.start_N1[last] - weight.start_N1[first])
    return kept + -(-kept // 4) + _begins(weight, last - first)


def kept_lists(weight: SparseRows, first: int, last: int, memory: Array) -> KeptLists:
    """Decode rows first..last into `memory`, which is valid as long as the result.

    Raises:
        InputError: rows outside the weight, too little memory, or a path that has no such kernel.
    """
    library, kept = load(), weight.kept
    check_range(first, last, weight.shape[0])
    check_array("memory", memory, np.float32, (lists_floats(weight, first, last),))
    check_writable("memory", memory)
    if library is None or library.path not in _MOST_KEPT or weight.shape[1] % STRIP:
        raise InputError(f"This kernel needs AVX2 and a width in strips of {STRIP}, not {weight.shape}.")
    count = int(weight.start_N1[last] - weight.start_N1[first])
    ends = len(memory) - _begins(weight, last - first)
    lists = KeptLists(
        library=library,
        value_C=memory[:count],
        column_C=memory[count:ends].view(np.uint8)[:count],
        begin=memory[ends:].view(np.int32),
        shape=(last - first, weight.shape[1]),
    )
    coded = (kept.packed, kept.scales, kept.codes, kept.group_size, kept.line)
    is_bitmap = int(weight.pattern.sparsity is Sparsity.BITMAP)
    where = (weight.pattern.packed, is_bitmap, weight.shape[1], weight.start_N1, first, last)
    scratch_K = np.empty(weight.shape[1] + 16, np.float32)
    library.call("kept_lists", *coded, *where, scratch_K, lists.value_C, lists.column_C, lists.begin)
    return lists


def lists_product(lists: KeptLists, x_MK: Array, out_MR: Array, scratch: Array) -> None:
    """`out = x W^T` for the rows of the lists, in float32; the rows of `out` may lie apart.

    Raises:
        InputError: other types or shapes.
    """
    rows, columns = lists.shape
    check_array("x", x_MK, np.float32, (None, columns))
    check_array("scratch", scratch, np.float32, (lists.scratch_floats,))
    check_writable("out", out_MR)
    if out_MR.dtype != np.float32 or out_MR.shape != (len(x_MK), rows) or out_MR.strides[1] != 4:
        raise InputError(f"expected out as float32 {(len(x_MK), rows)}, got {out_MR.dtype} {out_MR.shape}")
    of = (lists.value_C, lists.column_C, lists.begin, rows)
    lists.library.call(
        "lists_product", x_MK, len(x_MK), columns, *of, out_MR, out_MR.strides[0] // 4, scratch
    )


def _begins(weight: SparseRows, rows: int) -> int:
    return weight.shape[1] // STRIP * rows + 1
