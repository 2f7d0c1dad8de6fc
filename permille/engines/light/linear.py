"""A linear layer of a package: packed codes, and sparse values that replace what the codes decode to.

    y = x W^T + b,    W = dequantize(codes),    W[mask] = values

The weight exists a tile of rows at a time, in the scratch memory of the thread that needs it: the tile is
dequantized once, and for each variant its values are set and the variant's tokens multiplied.

# Legend: N, K = out and in features; C masked weights; G groups of variants; M tokens; R rows of a tile; Q
# directions.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from permille.engines.light.blas import Blas
from permille.engines.light.crew import Crew, blocks
from permille.native.products import compressed_rows
from permille.native.weights import PackedRows, decoded_at, dequantize_rows, set_values, sparse_product

Array = NDArray[np.float32]

# A tile of about this many weights stays in the caches; fewer rows make the product slow.
_TILE_WEIGHTS = 3 << 19
_TILE_ROWS = (128, 512)
# Of a small layer no more threads get a part than are worth waking.
_LEAST_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tools:
    """What multiplies, and the threads."""

    blas: Blas
    crew: Crew


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Correction:
    """What sparse values change of the decoded weight: `value - decoded` in compressed rows."""

    row_start_N1: NDArray[np.int32]
    column_C: NDArray[np.int32]
    difference_1C: Array


class LightLinear:
    """One quantized layer."""

    def __init__(
        self,
        weight: PackedRows,
        indices: NDArray[np.uint32],
        start: int,
        bias_N: Array | None,
        *,
        cached: bool,
    ) -> None:
        """`indices` are flat and strictly increasing; `start` is their offset in the package's values."""
        self.rows, self.columns = weight.shape
        self.weight = weight
        self.bias_N = bias_N
        self.span = slice(start, start + len(indices))
        self.indices = indices
        rows = np.searchsorted(indices, np.arange(self.rows + 1, dtype=np.int64) * self.columns)
        self.row_start_N1 = rows.astype(np.int32)
        self._cache_NK = np.empty(weight.shape, np.float32) if cached else None
        if self._cache_NK is not None:
            dequantize_rows(weight, 0, self.rows, self._cache_NK)

    @property
    def multiplies_codes(self) -> bool:
        """Whether a product with few tokens goes straight from the codes."""
        return self._cache_NK is None

    def correction(self, value_C: Array) -> "Correction":
        """What the values of one variant add to a product with the codes alone."""
        row_start_N1, column_C = compressed_rows(self.indices, self.weight.shape)
        difference_C = value_C - decoded_at(self.weight, self.indices)
        return Correction(row_start_N1=row_start_N1, column_C=column_C, difference_1C=difference_C[None])

    def tiles(self, threads: int) -> list[slice]:
        """Ranges of output rows, all but the last of one size, as many for each thread."""
        fewest, most = _TILE_ROWS
        count = -(-self.rows // min(max(_TILE_WEIGHTS // self.columns, fewest), most))
        count = -(-count // threads) * threads
        return blocks(self.rows, max(-(-self.rows // count), _LEAST_ROWS))

    def variants_tile(
        self, tools: Tools, x_GMK: Array, values_GC: Array, rows: slice, out_GMN: Array
    ) -> None:
        """Columns `rows` of the layer's output, for each group of variants."""
        for group, weight_RK in self.weights(tools.crew, rows, values_GC):
            self.multiply(tools.blas, x_GMK[group], weight_RK, rows, out_GMN[group, :, rows])

    def tangent_tile(
        self, tools: Tools, x_QMK: Array, value_C: Array, z_QC: Array, rows: slice, name: str
    ) -> Array:
        """The primal and, after it, the tangents `W x' + (z on the mask) x`: [1 + Q, M, R] in scratch memory
        of this name."""
        count, tokens = x_QMK.shape[:2]
        width = rows.stop - rows.start
        part_QMR = tools.crew.scratch(name, count * tokens * width).reshape(count, tokens, width)
        _, weight_RK = next(self.weights(tools.crew, rows, value_C[None]))
        tools.blas.product(x_QMK.reshape(-1, self.columns), weight_RK, part_QMR.reshape(-1, width))
        if self.bias_N is not None:
            part_QMR[0] += self.bias_N[rows]
        first, last = (int(self.row_start_N1[row]) for row in (rows.start, rows.stop))
        if last > first:
            sparse_product(
                x_QMK[0],
                self.row_start_N1[rows.start : rows.stop + 1] - np.int32(first),
                (self.indices[first:last] % np.uint32(self.columns)).astype(np.int32),
                np.ascontiguousarray(z_QC[:, first:last]),
                part_QMR[1:],
            )
        return part_QMR

    def weights(self, crew: Crew, rows: slice, values_GC: Array) -> Iterator[tuple[int, Array]]:
        """(group, tile [R, K] with its values): the same memory each time, so use it before the next."""
        width = rows.stop - rows.start
        if self._cache_NK is None:
            tile_RK = crew.scratch("weight", width * self.columns).reshape(width, self.columns)
            dequantize_rows(self.weight, rows.start, rows.stop, tile_RK)
        else:
            tile_RK = self._cache_NK[rows]
        first, last = (int(self.row_start_N1[row]) for row in (rows.start, rows.stop))
        for group, value_C in enumerate(values_GC):
            if last > first:
                part = self.indices[first:last]
                set_values(tile_RK, part, value_C[first:last], rows.start * self.columns)
            yield group, tile_RK

    def multiply(self, blas: Blas, x_MK: Array, weight_RK: Array, rows: slice, out_MR: Array) -> None:
        """`x W^T + b` for the rows of a tile."""
        blas.product(x_MK, weight_RK, out_MR)
        if self.bias_N is not None:
            out_MR += self.bias_N[rows]
