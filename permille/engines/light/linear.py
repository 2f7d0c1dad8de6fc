"""A linear layer of a package: packed codes, and sparse values that replace some decoded weights.

    y = x W^T + b,    W = dequantize(codes),    W[mask] = values

Each thread decodes only one tile (some rows of the weight) at a time, into its scratch memory. For each
variant, the thread writes the variant's values into the tile, and multiplies the variant's tokens by it.

With 8-bit inputs, the tile stays in integers and is the same for all variants. A separate sparse product with
float32 inputs adds what the values of a variant change (ADR 20):

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
from permille.native.products import TokenProduct, sparse_product
from permille.native.weights import dequantize_rows, set_values
from permille.quantization.packed_rows import PackedRows, decoded_at

Array = NDArray[np.float32]

# A tile of about this many weights fits the caches.
_TILE_WEIGHTS = 3 << 19
# The fewest and most rows of such a tile. Products of fewer rows are slow.
_TILE_ROWS = (128, 512)
# The fewest rows of a tile after the tiles are divided among threads. Waking a thread for fewer rows costs
# more than it saves. So a small layer may have fewer tiles than there are threads.
_LEAST_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tools:
    """Matrix kernels and threads.

    Attributes:
        blas: the matrix products.
        threads: the threads.
        int8: round the inputs of linear layers to 8 bits.
    """

    blas: Blas
    threads: Threads
    int8: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """Inputs of a linear layer.

    Attributes:
        x_GMK: float32.
        q_GMP: `x_GMK` rounded to 8 bits (`permille.native.int8`), or None.
        scale_GM: the scales of `q_GMP`, or None.
    """

    x_GMK: Array
    q_GMP: NDArray[np.uint8] | None = None
    scale_GM: Array | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Correction:
    """The differences `value - decoded` at the mask, for each group, in compressed sparse rows."""

    row_start_N1: NDArray[np.int32]
    column_C: NDArray[np.int32]
    difference_GC: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerValues:
    """Trained numbers of one layer for groups of variants: values at the mask, or an adapter."""

    masked_GC: Array
    low_rank: LowRank | None


class LightLinear:
    """A quantized layer with masked weights or an adapter."""

    def __init__(
        self,
        weight: PackedRows,
        indices: NDArray[np.uint32],
        start: int,
        bias_N: Array | None,
        adapter: LightAdapter | None = None,
    ) -> None:
        """`indices` are flat and increase strictly. `start` is the offset of their values in the package."""
        self.rows, self.columns = weight.shape
        self.weight = weight
        self.bias_N = bias_N
        self.adapter = adapter
        self.span = slice(start, start + len(indices))
        self.indices = indices
        # Indices are flat and increasing, so the entries of a row are contiguous.
        rows = np.searchsorted(indices, np.arange(self.rows + 1, dtype=np.int64) * self.columns)
        self.row_start_N1 = rows.astype(np.int32)

    def token_product(self, value_C: Array) -> TokenProduct:
        """Prepare products of single tokens with the layer, for the values of one variant."""
        difference_C = value_C - decoded_at(self.weight, self.indices)
        entries = (self.row_start_N1, self._columns_of(self.indices))
        return TokenProduct(self.weight, entries, difference_C, self.bias_N)

    def tiles(self, threads: int) -> list[slice]:
        """Return ranges of output rows of equal size. The last range may be smaller.

        In a large layer, the number of ranges is, where possible, a multiple of the number of threads.
        """
        fewest, most = _TILE_ROWS
        count = -(-self.rows // min(max(_TILE_WEIGHTS // self.columns, fewest), most))
        # Round up to a multiple of the number of threads. Otherwise, most threads would wait while a few
        # compute the last tiles.
        count = -(-count // threads) * threads
        return blocks(self.rows, max(-(-self.rows // count), _LEAST_ROWS))

    def check_int8(self) -> None:
        """Check that the codes can be multiplied by 8-bit inputs.

        Raises:
            InputError: the codes are not int4 with a group size that is a multiple of 32.
        """
        if not has_int8(self.weight.scheme, self.weight.group_size):
            raise InputError(
                f"8-bit activations need an int4 package whose group size is a multiple of 32. This one is "
                f"{self.weight.scheme} with a group size of {self.weight.group_size}. Use the engine light."
            )

    def values(self, tools: Tools, x_GMK: Array, values_GK: Array) -> LayerValues:
        """Select this layer's part of the values of all groups.

        If the layer has an adapter, multiply its A by `x_GMK`, the input of the layer.
        """
        low_rank = None
        if self.adapter is not None:
            low_rank = self.adapter.of_variants(tools.blas, tools.threads, x_GMK, values_GK)
        return LayerValues(masked_GC=values_GK[:, self.span], low_rank=low_rank)

    def variants_tile(
        self, tools: Tools, inputs: Inputs, values: LayerValues, rows: slice, out_GMN: Array
    ) -> None:
        """Compute columns `rows` of the layer's output for each group of variants."""
        # BLAS writes directly to some columns of `out_GMN`. The 8-bit kernel can write only a contiguous
        # matrix, so its product is copied to these columns.
        if inputs.q_GMP is None:
            for group, write in self._outputs(tools, inputs.x_GMK, values, rows):
                write(out_GMN[group, :, rows])
            return
        for group, part_MR in self.products(tools, inputs, values, rows, "product"):
            out_GMN[group, :, rows] = part_MR

    def products(
        self, tools: Tools, inputs: Inputs, values: LayerValues, rows: slice, name: str
    ) -> Iterator[tuple[int, Array]]:
        """Yield each group and columns `rows` of its output, [M, R].

        The output is in the scratch memory called `name`, so use it before you take the next group.
        """
        threads = tools.threads
        tokens, width = inputs.x_GMK.shape[1], rows.stop - rows.start
        part_MR = threads.scratch(name, tokens * width).reshape(tokens, width)
        if inputs.q_GMP is None or inputs.scale_GM is None:
            for group, write in self._outputs(tools, inputs.x_GMK, values, rows):
                write(part_MR)
                yield group, part_MR
            return
        # Convert the codes once for all groups, because they do not depend on the values.
        codes = int8_rows(
            self.weight,
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

    def _changes(self, rows: slice, values_GC: Array) -> Correction | None:
        """Return what the values change in some rows, or None if the mask selects no weight of these rows."""
        first, last = (int(self.row_start_N1[row]) for row in (rows.start, rows.stop))
        if first == last:
            return None
        indices = self.indices[first:last]
        return Correction(
            row_start_N1=self.row_start_N1[rows.start : rows.stop + 1] - np.int32(first),
            column_C=self._columns_of(indices),
            # Subtract the decoded weight, because the product with the codes already includes it.
            difference_GC=values_GC[:, first:last] - decoded_at(self.weight, indices),
        )

    def _columns_of(self, indices: NDArray[np.uint32]) -> NDArray[np.int32]:
        return (indices % np.uint32(self.columns)).astype(np.int32)

    def _outputs(
        self, tools: Tools, x_GMK: Array, values: LayerValues, rows: slice
    ) -> Iterator[tuple[int, Callable[[Array], None]]]:
        """Yield each group and a function that writes the group's output for these rows.

        Call the function before you take the next group, which reuses its memory.
        """
        width = rows.stop - rows.start
        tile_RK = tools.threads.scratch("weight", width * self.columns).reshape(width, self.columns)
        dequantize_rows(self.weight, rows.start, rows.stop, tile_RK)
        first, last = (int(self.row_start_N1[row]) for row in (rows.start, rows.stop))

        def write(out_MR: Array, group: int) -> None:
            tools.blas.product(x_GMK[group], tile_RK, out_MR)
            if self.bias_N is not None:
                out_MR += self.bias_N[rows]
            if values.low_rank is not None:
                values.low_rank.add(tools.blas, group, rows, out_MR)

        for group, value_C in enumerate(values.masked_GC):
            # Every group overwrites the same places, so the tile is decoded only once.
            set_values(tile_RK, self.indices[first:last], value_C[first:last], rows.start * self.columns)
            yield group, partial(write, group=group)

    def fill(self, rows: slice, value_C: Array, out_RK: Array) -> None:
        """Write some rows of the weight, with the values of one variant set, to `out_RK`."""
        dequantize_rows(self.weight, rows.start, rows.stop, out_RK)
        first, last = (int(self.row_start_N1[row]) for row in (rows.start, rows.stop))
        set_values(out_RK, self.indices[first:last], value_C[first:last], rows.start * self.columns)
