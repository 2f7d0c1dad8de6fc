"""Evidence for a mask, as plain dicts for JSON, without NaN, infinity or arrays.

- `curve`: the share of the total score that the best weights hold, for several fractions of all weights.
  Figure 2 of "Zeroth-order fine-tuning of LLMs with extreme sparsity" shows such a curve.
- `coverage`: the share of the total score that the weights of a mask hold, also by tensor. With scores of
  another text, it shows whether the mask of a corpus also covers the gradients of a task (figure 3).

If the total score is 0, the share is the fraction of the weights, because nothing is known. Sums are
float64, in the order of the tensors.
"""

import math
from collections.abc import Iterator, Mapping
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError

Tensors = Mapping[str, NDArray[np.float32]]
Indices = Mapping[str, NDArray[np.uint32]]

# Bins over all positive float32 numbers. A bin is 1.1% wide: the bins fit into memory, and are fine enough
# for a chart.
_BINS_PER_OCTAVE = 64
_CHUNK = 1 << 20


class CurvePoint(TypedDict):
    """A point of the curve: the share of the score in the best `fraction` of the weights."""

    fraction: float
    coverage: float


class TensorRow(TypedDict):
    """A tensor in the report. `coverage` is the share of the tensor's score that the mask holds."""

    name: str
    shape: list[int]
    count: int
    density: float
    score: float
    coverage: float


class CoverageReport(TypedDict):
    """Report on a mask's coverage, by which an operator can judge the mask."""

    k: int
    numel: int
    coverage: float
    curve: list[CurvePoint]
    tensors: list[TensorRow]


def mask_report(scores: Tensors, mask: Indices) -> CoverageReport:
    """Return the curve of the scores, and the coverage of a mask in total and by tensor.

    Raises:
        InputError: mask and scores have different tensors, or an index is outside of its tensor.
    """
    rows, held = [], 0.0
    for row, on_mask in _rows(scores, mask):
        rows.append(row)
        held += on_mask
    numel = sum(math.prod(row["shape"]) for row in rows)
    k = sum(row["count"] for row in rows)
    share = _share(held, sum(row["score"] for row in rows), k, numel)
    return CoverageReport(k=k, numel=numel, coverage=share, curve=curve(scores), tensors=rows)


def curve(scores: Tensors, points: int = 61) -> list[CurvePoint]:
    """Return the share of the score in the best weights, at fractions spaced evenly in their logarithm.

    Fractions go from 1e-6 (or one weight) to 1. The best weights are chosen from all tensors together. Scores
    are counted in bins that are 1.1% wide, so they need not be sorted. Within a bin, every score counts as
    the mean of the bin, so the result is exact only at the edges of bins.

    Raises:
        InputError: a score is NaN, infinite or negative.
    """
    numbers, sums = _histogram(scores)
    numel, total = int(numbers.sum()), float(sums.sum())
    best_first = np.concatenate([[0], np.cumsum(numbers[::-1])])
    held = np.concatenate([[0.0], np.cumsum(sums[::-1])])
    # A fraction below one weight means nothing.
    smallest = max(1e-6, 1 / numel)
    fractions = np.geomspace(smallest, 1, points)
    # `geomspace` may miss its ends by a rounding error.
    fractions[0], fractions[-1] = smallest, 1
    if total == 0:
        return [CurvePoint(fraction=float(at), coverage=float(at)) for at in fractions]
    shares = np.interp(fractions * numel, best_first, held / total)
    return [
        CurvePoint(fraction=float(at), coverage=float(min(1, y)))
        for at, y in zip(fractions, shares, strict=True)
    ]


def _histogram(scores: Tensors) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the number and the sum of the scores in each bin, from small to large. Bin 0 has scores of 0."""
    # Positive float32 numbers lie between 2**-149 and 2**128.
    bins = (149 + 129) * _BINS_PER_OCTAVE + 1
    numbers, sums = np.zeros(bins, np.int64), np.zeros(bins, np.float64)
    for name in scores:
        flat = scores[name].reshape(-1)
        for start in range(0, flat.size, _CHUNK):
            chunk = np.asarray(flat[start : start + _CHUNK], np.float64)
            if not (np.isfinite(chunk) & (chunk >= 0)).all():
                raise InputError(f"{name} has a score that is not a finite number of at least 0.")
            # `where` leaves out zeros, whose logarithm would be -inf, with a warning.
            octave = np.log2(chunk, out=np.full_like(chunk, -150.0), where=chunk > 0)
            index = np.where(chunk > 0, 1 + np.floor((octave + 149) * _BINS_PER_OCTAVE), 0).astype(np.int64)
            numbers += np.bincount(index, minlength=bins)
            sums += np.bincount(index, weights=chunk, minlength=bins)
    return numbers, sums


def _rows(scores: Tensors, mask: Indices) -> Iterator[tuple[TensorRow, float]]:
    """Yield the row of each tensor, and the score that the mask holds in it. Each tensor is read once."""
    if set(scores) != set(mask):
        other = sorted(set(scores) ^ set(mask))[:3]
        raise InputError(f"Mask and scores must have the same tensors. They differ in {', '.join(other)}.")
    for name in scores:
        tensor, chosen = scores[name], mask[name]
        flat, count = tensor.reshape(-1), int(chosen.size)
        if count and int(chosen.max()) >= flat.size:
            raise InputError(f"{name}: expected indices below {flat.size}, got {chosen.max()}")
        held, total = _sum(flat[chosen]), _sum(flat)
        row = TensorRow(
            name=name,
            shape=list(tensor.shape),
            count=count,
            density=count / flat.size,
            score=total,
            coverage=_share(held, total, count, flat.size),
        )
        yield row, held


def _sum(flat: NDArray[np.float32]) -> float:
    return float(flat.sum(dtype=np.float64))


def _share(part: float, whole: float, count: int, numel: int) -> float:
    # The two float64 sums add in different orders, so `part` can exceed `whole` by a rounding error.
    return min(1.0, part / whole) if whole > 0 else count / numel
