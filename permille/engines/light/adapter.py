"""A low-rank adapter beside a linear layer: `y = W x + b + scale B (A x)` (FORMAT 4.10).

`low = scale A x` is computed once for all tiles of a layer, from inputs in float32. Each tile of rows
then adds its part of `B low`. In the reverse pass, `d` is the gradient at the output, and `e` is
`scale d B`:

    d_B = d^T low,   d_A = e^T x,   d_x += e A

# Legend: N, K = out and in features; R rank; C the adapter's numbers; G groups of variants; M tokens.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from permille.engines.light.blas import Blas
from permille.engines.light.threads import Threads, blocks

Array = NDArray[np.float32]

# How many tokens, or how many rows or columns of a matrix, a task covers.
_PART = 256


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LowRank:
    """`scale A x` of some groups of variants, and their B."""

    low_GMR: Array
    b_GNR: Array

    def add(self, blas: Blas, group: int, rows: slice, out_MN: Array) -> None:
        """Add `B low` to `out` for some rows of B, which are the columns of `out`."""
        blas.add_transposed(self.low_GMR[group], self.b_GNR[group, rows], out_MN)


class LightAdapter:
    """The adapter of one linear layer."""

    def __init__(
        self, rows: slice, columns: int, rank: int, scale: float, start: int, frozen_RK: Array | None
    ) -> None:
        """Compute where the numbers of A and B are in the values of the package.

        Args:
            rows: the rows of the stored matrix that belong to this layer.
            columns: K.
            rank: R.
            scale: the factor of the adapter.
            start: the offset of the adapter's numbers in the values of the package.
            frozen_RK: A if it is frozen, else None.
        """
        self._rows, self._columns = rows.stop - rows.start, columns
        self._rank, self._scale = rank, np.float32(scale)
        self._frozen_RK = frozen_RK
        # FORMAT 4.10: the values are A, then B. A frozen A is not among the values.
        middle = start + (0 if frozen_RK is not None else rank * self._columns)
        self._span_a = slice(start, middle)
        self._span_b = slice(middle + rank * rows.start, middle + rank * rows.stop)

    def of_variants(self, blas: Blas, threads: Threads, x_GMK: Array, values_GK: Array) -> LowRank:
        """Return `scale A x` and B of each group of variants."""
        low_GMR = np.empty((*x_GMK.shape[:2], self._rank), np.float32)

        def part(task: tuple[int, slice]) -> None:
            group, rows = task
            blas.product(x_GMK[group, rows], self._a(values_GK[group]), low_GMR[group, rows])

        groups, tokens = x_GMK.shape[:2]
        threads.each(part, [(group, rows) for group in range(groups) for rows in blocks(tokens, _PART)])
        # Scale `low` and not the output, because `low` has fewer columns.
        low_GMR *= self._scale
        return LowRank(low_GMR=low_GMR, b_GNR=self._b(values_GK))

    def add_gradient(
        self, threads: Threads, x_MK: Array, d_out_MN: Array, value_K: Array, gradient_K: Array
    ) -> None:
        """Add `d_B` to the gradient, and also `d_A` if A is trained."""
        low_MR = x_MK @ self._a(value_K).T
        low_MR *= self._scale
        d_b_NR = self._b(gradient_K[None])[0]

        def of_b(rows: slice) -> None:
            # Each task owns its rows, so the order of the sums is fixed. `d_b_NR` is a view of the gradient,
            # so adding to the view changes the gradient.
            d_b_NR[rows] += d_out_MN[:, rows].T @ low_MR

        threads.each(of_b, blocks(self._rows, _PART))
        if self._frozen_RK is not None:
            return
        e_MR, d_a_RK = self._sent_back(d_out_MN, value_K), self._a(gradient_K)

        def of_a(columns: slice) -> None:
            d_a_RK[:, columns] += e_MR.T @ x_MK[:, columns]

        threads.each(of_a, blocks(self._columns, _PART))

    def add_back(self, blas: Blas, d_out_MN: Array, value_K: Array, d_x_MK: Array) -> None:
        """Add `e A` to `d_x`."""
        blas.add_product(self._sent_back(d_out_MN, value_K), self._a(value_K), d_x_MK)

    def _sent_back(self, d_out_MN: Array, value_K: Array) -> Array:
        e_MR: Array = d_out_MN @ self._b(value_K[None])[0]
        e_MR *= self._scale
        return e_MR

    def _a(self, value_K: Array) -> Array:
        """Return A, [R, K], a view."""
        if self._frozen_RK is not None:
            return self._frozen_RK
        return value_K[self._span_a].reshape(self._rank, self._columns)

    def _b(self, values_GK: Array) -> Array:
        """Return B, [G, N, R], a view."""
        return values_GK[:, self._span_b].reshape(len(values_GK), self._rows, self._rank)
