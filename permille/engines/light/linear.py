"""A linear layer of a package: packed codes, and sparse values that replace what the codes decode to.

    y = x W^T + b,    W = dequantize(codes),    W[mask] = values

The weight exists a tile of rows at a time, in the scratch memory of the thread that needs it: the tile is
dequantized once, and for each variant its values are set and the variant's tokens multiplied.

With inputs of 8 bits the tile stays integers, the same for all variants, and what a variant's values change
is a sparse product of its own, with the inputs in float32 (ADR 20):

    y = round8(x) dequantize(codes)^T + x (W - dequantize(codes))^T + b

# Legend: N, K = out and in features; C masked weights; G groups of variants; M tokens; R rows of a tile.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from permille.engines.light.adapter import LightAdapter, LowRank
from permille.engines.light.blas import Blas
from permille.engines.light.threads import Threads, blocks
from permille.errors import InputError
from permille.native.int8 import has_int8, int8_product, int8_rows, scratch_floats
from permille.native.products import TokenProduct, compressed_rows, sparse_product
from permille.native.weights import dequantize_rows, set_values
from permille.quantization.packed_rows import PackedRows, decoded_at

Array = NDArray[np.float32]

# A tile of about this many weights stays in the caches; fewer rows make the product slow.
_TILE_WEIGHTS = 3 << 19
_TILE_ROWS = (128, 512)
# Of a small layer no more threads get a part than are worth waking.
_LEAST_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tools:
    """Matrix kernels and threads.

    Attributes:
        int8: losses see the inputs of linear layers in 8 bits.
    """

    blas: Blas
    threads: Threads
    int8: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """Operands of a linear layer.

    Attributes:
        x_GMK: float32.
        q_GMP, scale_GM: the same in 8 bits (`permille.native.int8`), or None.
    """

    x_GMK: Array
    q_GMP: NDArray[np.uint8] | None = None
    scale_GM: Array | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Correction:
    """Change of the decoded weight by sparse values: `value - decoded`, in compressed rows a group."""

    row_start_N1: NDArray[np.int32]
    column_C: NDArray[np.int32]
    difference_GC: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerValues:
    """Trained numbers of groups of variants in one layer: values at its mask, or of its adapter."""

    masked_GC: Array
    low_rank: LowRank | None


class LightLinear:
    """A quantized layer, with masked weights or an adapter."""

    def __init__(
        self,
        weight: PackedRows,
        indices: NDArray[np.uint32],
        start: int,
        bias_N: Array | None,
        adapter: LightAdapter | None = None,
    ) -> None:
        """`indices` are flat and strictly increasing; `start` is their offset in the package's values."""
        self.rows, self.columns = weight.shape
        self.weight = weight
        self.bias_N = bias_N
        self.adapter = adapter
        self.span = slice(start, start + len(indices))
        self.indices = indices
        rows = np.searchsorted(indices, np.arange(self.rows + 1, dtype=np.int64) * self.columns)
        self.row_start_N1 = rows.astype(np.int32)

    def token_product(self, value_C: Array) -> TokenProduct:
        """The layer with the values of one variant, for one token after the other."""
        entries = compressed_rows(self.indices, self.weight.shape)
        difference_C = value_C - decoded_at(self.weight, self.indices)
        return TokenProduct(self.weight, entries, difference_C, self.bias_N)

    def tiles(self, threads: int) -> list[slice]:
        """Ranges of output rows, all but the last of one size, as many for each thread."""
        fewest, most = _TILE_ROWS
        count = -(-self.rows // min(max(_TILE_WEIGHTS // self.columns, fewest), most))
        count = -(-count // threads) * threads
        return blocks(self.rows, max(-(-self.rows // count), _LEAST_ROWS))

    def int8_weight(self) -> PackedRows:
        """The codes, for inputs of 8 bits.

        Raises:
            InputError: they are no integers of four bits, whose scales belong to whole runs.
        """
        if not has_int8(self.weight.scheme, self.weight.group_size):
            raise InputError(f"expected a package of int4 for int8 activations, got {self.weight.scheme}")
        return self.weight

    def values(self, tools: Tools, x_GMK: Array, values_GK: Array) -> LayerValues:
        """This layer's part of the values of the groups whose inputs are x."""
        low_rank = None
        if self.adapter is not None:
            low_rank = self.adapter.of_variants(tools.blas, tools.threads, x_GMK, values_GK)
        return LayerValues(masked_GC=values_GK[:, self.span], low_rank=low_rank)

    def variants_tile(
        self, tools: Tools, inputs: Inputs, values: LayerValues, rows: slice, out_GMN: Array
    ) -> None:
        """Columns `rows` of the layer's output, for each group of variants."""
        if inputs.q_GMP is None:
            for group, multiply in self._multiplied(tools, inputs.x_GMK, values.masked_GC, rows):
                part_MR = out_GMN[group, :, rows]
                multiply(part_MR)
                if values.low_rank is not None:
                    values.low_rank.add(tools.blas, group, rows, part_MR)
            return
        for group, part_MR in self.products(tools, inputs, values, rows, "product"):
            out_GMN[group, :, rows] = part_MR

    def products(
        self, tools: Tools, inputs: Inputs, values: LayerValues, rows: slice, name: str
    ) -> Iterator[tuple[int, Array]]:
        """(group, columns `rows` of its output [M, R]) in scratch memory of this name: the same each time, so
        use it before the next."""
        threads = tools.threads
        tokens, width = inputs.x_GMK.shape[1], rows.stop - rows.start
        part_MR = threads.scratch(name, tokens * width).reshape(tokens, width)
        if inputs.q_GMP is None or inputs.scale_GM is None:
            for group, multiply in self._multiplied(tools, inputs.x_GMK, values.masked_GC, rows):
                multiply(part_MR)
                if values.low_rank is not None:
                    values.low_rank.add(tools.blas, group, rows, part_MR)
                yield group, part_MR
            return
        codes = int8_rows(
            self.int8_weight(),
            rows.start,
            rows.stop,
            threads.scratch("weight", scratch_floats(width, self.columns)),
        )
        changes = self._changes(rows, values.masked_GC)
        for group in range(len(values.masked_GC)):
            int8_product(codes, inputs.q_GMP[group], inputs.scale_GM[group], part_MR)
            if self.bias_N is not None:
                part_MR += self.bias_N[rows]
            if changes is not None:
                difference_1C = changes.difference_GC[group : group + 1]
                sparse_product(
                    inputs.x_GMK[group], changes.row_start_N1, changes.column_C, difference_1C, part_MR[None]
                )
            if values.low_rank is not None:
                values.low_rank.add(tools.blas, group, rows, part_MR)
            yield group, part_MR

    def _changes(self, rows: slice, values_GC: Array) -> "Correction | None":
        """Return the change of some rows of the weight by the values, or None without a mask there."""
        first, last = (int(self.row_start_N1[row]) for row in (rows.start, rows.stop))
        if first == last:
            return None
        indices = self.indices[first:last]
        return Correction(
            row_start_N1=self.row_start_N1[rows.start : rows.stop + 1] - np.int32(first),
            column_C=(indices % np.uint32(self.columns)).astype(np.int32),
            difference_GC=values_GC[:, first:last] - decoded_at(self.weight, indices),
        )

    def _multiplied(
        self, tools: Tools, x_GMK: Array, values_GC: Array, rows: slice
    ) -> Iterator[tuple[int, Callable[[Array], None]]]:
        """(group, what writes `x W^T + b` for these rows to an array [M, R]): use it before the next."""
        for group, weight_RK in self.weights(tools.threads, rows, values_GC):
            yield group, partial(self.multiply, tools.blas, x_GMK[group], weight_RK, rows)

    def weights(self, threads: Threads, rows: slice, values_GC: Array) -> Iterator[tuple[int, Array]]:
        """(group, tile [R, K] with its values): the same memory each time, so use it before the next."""
        width = rows.stop - rows.start
        tile_RK = threads.scratch("weight", width * self.columns).reshape(width, self.columns)
        dequantize_rows(self.weight, rows.start, rows.stop, tile_RK)
        first, last = (int(self.row_start_N1[row]) for row in (rows.start, rows.stop))
        for group, value_C in enumerate(values_GC):
            set_values(tile_RK, self.indices[first:last], value_C[first:last], rows.start * self.columns)
            yield group, tile_RK

    def fill(self, rows: slice, value_C: Array, out_RK: Array) -> None:
        """Some rows of the weight with the values of one variant, into memory of the caller's."""
        dequantize_rows(self.weight, rows.start, rows.stop, out_RK)
        first, last = (int(self.row_start_N1[row]) for row in (rows.start, rows.stop))
        set_values(out_RK, self.indices[first:last], value_C[first:last], rows.start * self.columns)

    def multiply(self, blas: Blas, x_MK: Array, weight_RK: Array, rows: slice, out_MR: Array) -> None:
        """`x W^T + b` for the rows of a tile."""
        blas.product(x_MK, weight_RK, out_MR)
        if self.bias_N is not None:
            out_MR += self.bias_N[rows]
