"""SqueezeLLM: a code book of 16 numbers for each row, nearest to the weights that matter most.

    minimise over books b and codes c:  sum_k F_k (w_k - b[c_k])^2        w' = b[c]

for each output row, `F` the Fisher scores of its weights (Kim et al., 2023, equation 4). The paper keeps the
most sensitive weights and outliers apart in float16; here a package's masked weights are apart anyway, and
the books know no mask, so that one dense layer serves every mask. Books are float16, as the paper's.

In one dimension clusters are ranges of the sorted weights, so the best book is a matter of 15 cuts. A dynamic
programme (Wang and Song, 2011) finds the best ones among some hundred places where cuts may be: every place
of a row of up to 120 weights; else the outermost ones, and others as dense as the fourth root of the weights'
density (Panter and Dite, 1951, ask for the third, which is not rounded alike everywhere). Then again around
the cuts that it has found, until it finds the same. That is exact for short rows; of longer ones tests hold
it within 2 % of the exact optimum. scikit-learn's k-means takes random starts and is no nearer; `kmeans1d`,
exact for rows of any length, knows no scores. All sums are float64 and in the order of the sorted weights:
the same bits on every machine.

# Legend: N, K = rows and columns; R = rows of a block; P = places of cuts, ascending, from 0 to K.
"""

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille.quantization.source import check_weight, decoded_rows, packed_rows
from permille.quantization.types import CODE_BOOK_SIZE, QuantizedTensor, Scheme

GROUP_SIZE = 0
"""The group size of this scheme. A row has one code book, whatever its length."""

_UNSCORED = 1e-6  # of its row's mean score counts for a weight that has none
_SPREAD, _OUTERMOST = 96, 12  # places of cuts in long rows
_AROUND: NDArray[np.int64] = np.array([-27, -9, -3, -1, 0, 1, 3, 9, 27])
_PASSES = 6
_BLOCK_ROWS = 8  # their costs fit into the cache

Cuts = NDArray[np.int64]


def quantize(
    w_NK: NDArray[np.float32], scores_NK: NDArray[np.float32] | None = None, *, name: str = "weight"
) -> QuantizedTensor:
    """Code books of the scores, and the nearest number's code for each weight, the lower of two.

    Args:
        scores_NK: Fisher scores; None: all weights count the same, and so in a row without any score.

    Raises:
        InputError: NaN or infinity, shapes that disagree, scores below 0, or a weight too large for float16.
    """
    check_weight(w_NK, name)
    if scores_NK is not None and (scores_NK.shape != w_NK.shape or scores_NK.dtype != np.float32):
        raise InputError(f"{name}: expected float32 scores {w_NK.shape}, got {scores_NK.shape}")
    rows, columns = w_NK.shape
    book_NB = np.empty((rows, CODE_BOOK_SIZE), np.float32)

    def code(chunk: slice) -> NDArray[np.uint8]:
        for first in range(chunk.start, chunk.stop, _BLOCK_ROWS):
            block = slice(first, min(first + _BLOCK_ROWS, chunk.stop))
            book_NB[block] = _books(w_NK[block], None if scores_NK is None else scores_NK[block], name)
        return _codes(w_NK[chunk], book_NB[chunk])

    packed = packed_rows(w_NK, code, name=name)
    return QuantizedTensor(
        scheme=Scheme.SQUEEZELLM, shape=(rows, columns), group_size=GROUP_SIZE, packed=packed, scales=book_NB
    )


def dequantize(quantized: QuantizedTensor) -> NDArray[np.float32]:
    """The numbers of the code books: [N, K]."""

    def decode(chunk: slice, codes_RK: NDArray[np.uint8]) -> NDArray[np.float32]:
        return np.take_along_axis(quantized.scales[chunk], codes_RK.astype(np.intp), axis=1)

    return decoded_rows(quantized, decode)


def _codes(w_RK: NDArray[np.float32], book_RB: NDArray[np.float32]) -> NDArray[np.uint8]:
    codes = np.zeros(w_RK.shape, np.uint8)
    for bound_R in ((book_RB[:, :-1] + book_RB[:, 1:]) / np.float32(2)).T:
        codes += w_RK > bound_R[:, None]
    return codes


def _books(
    w_RK: NDArray[np.float32], scores_RK: NDArray[np.float32] | None, name: str
) -> NDArray[np.float32]:
    """Ascending, exact in float16: [R, 16]."""
    order = np.argsort(w_RK, axis=1, kind="stable")
    w_sorted = np.take_along_axis(w_RK, order, axis=1).astype(np.float64)
    mass_RK = np.ones_like(w_sorted)
    if scores_RK is not None:
        mass_RK = np.take_along_axis(scores_RK, order, axis=1).astype(np.float64)
        if not np.all((mass_RK >= 0) & (mass_RK < np.inf)):
            raise InputError(f"{name}: expected finite scores from 0, got others")
        mean_R = mass_RK.mean(axis=1, keepdims=True)
        mass_RK = np.where(mean_R > 0, np.maximum(mass_RK, _UNSCORED * mean_R), 1.0)
    sums = _Sums(w_sorted, mass_RK)
    cuts, is_all = _first_places(w_sorted, mass_RK)
    cuts = sums.best(cuts)
    for _ in range(0 if is_all else _PASSES):
        before, around = cuts, (cuts[:, 1:-1, None] + _AROUND).reshape(len(cuts), -1)
        cuts = sums.best(_places(around, w_RK.shape[1]))
        if np.array_equal(cuts, before):
            break
    with np.errstate(over="ignore"):
        book_RB = sums.means(cuts).astype(np.float16).astype(np.float32)
    if not np.isfinite(book_RB).all():
        raise InputError(f"{name}: expected weights within float16 for squeezellm, got {w_RK.max()}")
    return book_RB


class _Sums:
    """Cost and mean of ranges of a row's sorted weights, from prefix sums."""

    def __init__(self, w_RK: NDArray[np.float64], mass_RK: NDArray[np.float64]) -> None:
        self._w_RK = w_RK
        # Mass, first and second moment before each place: [3, R, K + 1].
        moments = np.stack([mass_RK, mass_RK * w_RK, mass_RK * w_RK * w_RK])
        self._moments = np.concatenate([np.zeros((3, len(w_RK), 1)), np.cumsum(moments, axis=2)], axis=2)

    def means(self, cuts: Cuts) -> NDArray[np.float64]:
        """Of each range between cuts; of an empty one the weight at its place."""
        mass, first, _ = np.diff(self._at(cuts), axis=2)
        at = np.minimum(cuts[:, :-1], self._w_RK.shape[1] - 1)
        found: NDArray[np.float64] = np.take_along_axis(self._w_RK, at, axis=1)
        np.divide(first, mass, out=found, where=mass > 0)
        return found

    def best(self, places: Cuts) -> Cuts:
        """The cuts, with both ends, that cost least among places [R, P]: a dynamic programme over ranges."""
        at = self._at(places)
        mass, first, second = at[:, :, :, None] - at[:, :, None, :]  # [R, end, begin]
        with np.errstate(divide="ignore", invalid="ignore"):
            cost = second - first * first / mass
        number = places.shape[1]
        cost[mass == 0] = 0
        cost[:, *np.triu_indices(number, 1)] = np.inf  # a range that ends before it begins
        least, chosen = cost[:, :, 0], []
        for _ in range(CODE_BOOK_SIZE - 1):
            total = least[:, None, :] + cost
            chosen.append(total.argmin(axis=2))
            least = np.take_along_axis(total, chosen[-1][:, :, None], axis=2)[:, :, 0]
        path = [np.full((len(places), 1), number - 1)]
        for begin in reversed(chosen):
            path.append(np.take_along_axis(begin, path[-1], axis=1))
        path.append(np.zeros((len(places), 1), np.int64))
        cuts: Cuts = np.take_along_axis(places, np.concatenate(path[::-1], axis=1), axis=1)
        return cuts

    def _at(self, places: Cuts) -> NDArray[np.float64]:
        found: NDArray[np.float64] = np.take_along_axis(self._moments, places[None], axis=2)
        return found


def _first_places(w_RK: NDArray[np.float64], mass_RK: NDArray[np.float64]) -> tuple[Cuts, bool]:
    """Return where cuts may be at first, and whether that is everywhere."""
    rows, columns = w_RK.shape
    if columns <= _SPREAD + 2 * _OUTERMOST:
        return np.broadcast_to(np.arange(columns + 1), (rows, columns + 1)), True
    gap_RK = np.diff(w_RK, axis=1, append=w_RK[:, -1:])
    spread_RK = np.cumsum(np.sqrt(np.sqrt(mass_RK * gap_RK * gap_RK * gap_RK)), axis=1)
    share_RK = spread_RK / np.maximum(spread_RK[:, -1:], np.finfo(np.float64).tiny)
    wanted = np.arange(1, _SPREAD) / _SPREAD
    spread = np.stack([np.searchsorted(share_K, wanted, side="right") for share_K in share_RK])
    outermost = np.arange(1, _OUTERMOST + 1)
    both = np.broadcast_to(np.concatenate([outermost, columns - outermost]), (rows, 2 * _OUTERMOST))
    return _places(np.concatenate([spread, both], axis=1), columns), False


def _places(inner: Cuts, columns: int) -> Cuts:
    """Ascending, within a row, and both ends."""
    ends = np.broadcast_to([0, columns], (len(inner), 2))
    return np.sort(np.concatenate([inner.clip(0, columns), ends], axis=1), axis=1)
