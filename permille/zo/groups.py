"""Directions that do not overlap: each step puts every weight into one of Q groups, with a sign (FORMAT 6.6).

Direction i has the signs of group i and is 0 elsewhere, so the directions of a step are orthogonal.
Projecting on all of them, or adding all of them to a state, is one pass over the weights for any Q. If the
change of a step is known, as for a gradient step, the log stores the part of the change that Q integers can
express.

Each weight takes one word of the generator. The numpy code here is the definition; the native kernels
are tested against the same golden vectors.

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
"""Counter word 3 of the generator. No query has this number, so groups have random bits of their own."""

_SPAN = 1 << 16  # weights per task
# The most coefficients of all steps in one pass over the weights. So many fit into the L2 cache.
_COEFFICIENTS = 1 << 15
# The top bit of a word is the sign. The other 31 bits choose the group.
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

        With the result p, `sum_i p_i * z_i` is the orthogonal projection of the change. The result of an
        empty group is 0.
        """
        sums_Q = np.bincount(self.group_K, weights=self.sign_K * change_K, minlength=self.queries)
        # `<z_i, z_i>` is the size of the group, since all its elements are signs.
        sizes_Q = np.bincount(self.group_K, minlength=self.queries)
        found_Q: NDArray[np.float64] = sums_Q / np.maximum(sizes_Q, 1)
        return found_Q


def grouping(header: LogHeader, step: int) -> Grouping:
    """Return group and sign of each weight in a step."""
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
    # FORMAT 6.6: a product and a shift choose the group, not a remainder. The bias is below Q / 2**31.
    group_K = ((low_K * np.uint64(header.queries)) >> _GROUP_BITS).astype(np.int32)
    sign_K = (2 * (word_K >> _GROUP_BITS).astype(np.int8) - 1).astype(np.int8)
    return Grouping(group_K=group_K, sign_K=sign_K, queries=header.queries)


def group_sums(
    header: LogHeader, coefficients_TQ: NDArray[np.int64], *, start: int = 0, threads: int = 1
) -> NDArray[np.int64]:
    """Return `sum over steps t and groups i of c[t, i] * z[t, i]` as int64 [K].

    The number of threads does not change the bits. The caller checks that no sum exceeds 2**53.
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
    # Add several steps in one pass over the weights, so that the pass reads the sums from memory only once.
    abreast = max(2, _COEFFICIENTS // header.queries)

    def add(span: tuple[int, int, slice]) -> None:
        tensor, first, weights = span
        span_K = sums_K[weights]
        place = (header.seed, tensor, first, len(span_K))
        for step in range(0, len(rows_TQ), abreast):
            part_TQ = rows_TQ[step : step + abreast]
            library.call("group_sums", *place, start + step, part_TQ, *part_TQ.shape, span_K)

    # Spans do not overlap, so tasks need no lock, and their order does not matter.
    with ThreadPoolExecutor(max_workers=threads) as pool:
        list(pool.map(add, _spans(header.counts)))
    return sums_K


def _spans(counts: tuple[int, ...]) -> list[tuple[int, int, slice]]:
    """Cut the weights into spans of at most 65,536: (tensor, first rank, range in flat order)."""
    spans, at = [], 0
    for tensor, count in enumerate(counts):
        for first in range(0, count, _SPAN):
            spans.append((tensor, first, slice(at + first, at + min(first + _SPAN, count))))
        at += count
    return spans


@lru_cache(maxsize=8)
def _layout(counts: tuple[int, ...]) -> BlockLayout:
    # FORMAT 6.6: a weight takes one word, so a block serves four weights.
    return BlockLayout(counts, WORDS)
