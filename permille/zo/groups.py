"""Directions that do not overlap: in each step every weight is in one of Q groups, with a sign (FORMAT 6.6).

Direction i is the signs of group i, and 0 elsewhere, so the directions of a step are orthogonal, and to
project on all of them, or to add all of them to a state, is one pass over the weights, whatever Q is. That is
for steps whose change is known (a gradient's): the log holds what Q integers can express of it.

One word of the generator a weight. The numpy here is the definition; where the native kernels are built, they
do it, held to the same golden vectors.

Shapes: K = masked weights, Q = groups, T = steps, B = generator blocks of four weights.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from permille.native.arrays import check_array
from permille.native.library import load
from permille.zo.directions import BlockLayout
from permille.zo.header import LogHeader
from permille.zo.philox import WORDS, philox4x32_10

QUERY_WORD = (1 << 32) - 1
"""Counter word 3 of the generator: no query of a log has this number."""

_SPAN = 1 << 16  # weights of a task
_COEFFICIENTS = 1 << 15  # of some steps: they stay in the second cache
_GROUP_BITS = np.uint64(31)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Grouping:
    """Assignment of the weights to groups in one step.

    Attributes:
        group_K: int32, 0 to Q - 1.
        sign_K: int8, -1 or 1.
    """

    group_K: NDArray[np.int32]
    sign_K: NDArray[np.int8]
    queries: int

    def project(self, change_K: NDArray[np.floating]) -> NDArray[np.float64]:
        """Project a change on each direction: `<change, z_i> / <z_i, z_i>`, float64 [Q].

        An empty group has 0.

        `sum_i found_i * z_i` is the orthogonal projection of the change on the step's directions.
        """
        sums_Q = np.bincount(self.group_K, weights=self.sign_K * change_K, minlength=self.queries)
        sizes_Q = np.bincount(self.group_K, minlength=self.queries)
        found_Q: NDArray[np.float64] = sums_Q / np.maximum(sizes_Q, 1)
        return found_Q


def grouping(header: LogHeader, step: int) -> Grouping:
    """Group and sign of each weight in a step."""
    library = load()
    if library is not None:
        group_K = np.empty(header.k, dtype=np.int32)
        sign_K = np.empty(header.k, dtype=np.int8)
        counts_T = np.array(header.counts, dtype=np.int64)
        numbers = (header.seed, step, header.queries)
        library.call("groups", *numbers, counts_T, len(counts_T), group_K, sign_K)
        return Grouping(group_K=group_K, sign_K=sign_K, queries=header.queries)
    layout = _layout(header.counts)
    words = philox4x32_10((layout.block_B, layout.tensor_B, step, QUERY_WORD), header.seed)
    word_K = layout.without_padding(np.stack(words, axis=1).reshape(-1))
    low_K = word_K & np.uint64((1 << 31) - 1)
    group_K = ((low_K * np.uint64(header.queries)) >> _GROUP_BITS).astype(np.int32)
    sign_K = (2 * (word_K >> _GROUP_BITS).astype(np.int8) - 1).astype(np.int8)
    return Grouping(group_K=group_K, sign_K=sign_K, queries=header.queries)


def group_sums(
    header: LogHeader, coefficients_TQ: NDArray[np.int64], *, start: int = 0, threads: int = 1
) -> NDArray[np.int64]:
    """`sum over steps t and groups i of c[t, i] * z[t, i]` as int64 [k].

    The same bits for any number of threads; that no sum leaves 2**53 is checked by whoever calls.
    """
    rows_TQ = np.ascontiguousarray(coefficients_TQ)
    check_array("coefficients", rows_TQ, np.int64, (None, header.queries))
    sums_K = np.zeros(header.k, dtype=np.int64)
    library = load()
    if library is None:
        for step, c_Q in enumerate(rows_TQ, start):
            found = grouping(header, step)
            sums_K += c_Q[found.group_K] * found.sign_K
        return sums_K
    abreast = max(2, _COEFFICIENTS // header.queries)

    def add(span: tuple[int, int, slice]) -> None:
        tensor, first, weights = span
        span_K = sums_K[weights]
        place = (header.seed, tensor, first, len(span_K))
        for step in range(0, len(rows_TQ), abreast):
            part_TQ = rows_TQ[step : step + abreast]
            library.call("group_sums", *place, start + step, part_TQ, *part_TQ.shape, span_K)

    with ThreadPoolExecutor(max_workers=threads) as pool:
        list(pool.map(add, _spans(header.counts)))
    return sums_K


def _spans(counts: tuple[int, ...]) -> list[tuple[int, int, slice]]:
    """(tensor, first rank, where in flat order) of at most 65,536 weights each."""
    spans, at = [], 0
    for tensor, count in enumerate(counts):
        for first in range(0, count, _SPAN):
            spans.append((tensor, first, slice(at + first, at + min(first + _SPAN, count))))
        at += count
    return spans


@lru_cache(maxsize=8)
def _layout(counts: tuple[int, ...]) -> BlockLayout:
    return BlockLayout(counts, WORDS)
