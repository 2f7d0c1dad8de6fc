"""Masks: the weights of each tensor to train, as a function of scores and seed alone.

    mask = select_mask(scores, "fisher", 0.001)

The mask of a tensor has the `count(density, numel)` weights with the largest scores. If scores are equal, the
lowest index is taken. NaN has no rank and is refused. Scores are ranked by their bits, in two counting passes
of 16 bits each. So the threshold is exact and does not depend on a sorting algorithm. Selecting takes a few
MB of memory in addition to the scores, which may be a mapped file.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal

import numpy as np
from numpy.typing import NDArray

from permille.choices import MaskMethod, choice_of
from permille.errors import InputError
from permille.zo.philox import philox4x32_10

Mask = dict[str, NDArray[np.uint32]]

_CHUNK = 1 << 20
_LARGEST_TENSOR = 1 << 32
# Words 2 and 3 of the generator's counter. In directions, these words are the step and the query, and never
# both have the largest value. So no direction uses this stream.
_MASK_STREAM = (0xFFFFFFFF, 0xFFFFFFFF)


def count(density: float | str | Decimal, numel: int) -> int:
    """Return round(density * numel), halves up, in decimal arithmetic, and at least 1.

    A float stands for its shortest decimal form, so 0.001 is exactly one in a thousand:

        >>> count(0.001, 2500)
        3

    Raises:
        InputError: the density is outside of (0, 1].
    """
    # `str` gives the shortest decimal form, which is what the user typed.
    exact = Decimal(str(density))
    if not exact.is_finite() or not 0 < exact <= 1:
        raise InputError(f"The density must be above 0 and at most 1, got {density}.")
    return max(1, int((exact * numel).to_integral_value(rounding=ROUND_HALF_UP)))


def select_mask(
    tensors: Mapping[str, NDArray[np.float32]],
    method: MaskMethod | str,
    density: float | str | Decimal,
    seed: int = 0,
    *,
    weights: Mapping[str, NDArray[np.float32]] | None = None,
) -> Mask:
    """Select weights by tensor, in the order of `tensors`.

    For example, the larger half of four scores:

        >>> scores = {"w": np.array([[0.5, 0.1], [0.0, 0.9]], np.float32)}
        >>> select_mask(scores, MaskMethod.FISHER, 0.5)["w"].tolist()
        [0, 3]

    Args:
        tensors: [N, K] float32 by name, in tensor_id order: scores for `fisher`, weights for `magnitude` and
            `random` (which uses the shapes only). Tensors are read one by one, so the mapping may be lazy.
        method: the method.
        density: the share of weights to select.
        seed: 0 to 2**64 - 1, for `random` only.
        weights: the weights of a pruned model by name. Zeros are never chosen. If a tensor has fewer nonzero
            weights than wanted, all of these are chosen.

    Returns:
        Flat row-major indices, uint32, strictly increasing.

    Raises:
        InputError: scores are NaN, infinite or negative, the density is outside of (0, 1], or the method does
            not exist.
    """
    method = choice_of(MaskMethod, method, "a method of choosing a mask")
    mask: Mask = {}
    for tensor_id, name in enumerate(tensors):
        tensor, own = tensors[name], None if weights is None else weights[name]
        if not 0 < tensor.size <= _LARGEST_TENSOR:
            raise InputError(f"{name}: expected 1 to 2**32 weights, got {tensor.size}")
        wanted = count(density, tensor.size)
        if method is MaskMethod.RANDOM:
            mask[name] = _random_mask(tensor.size, own, wanted, seed, tensor_id)
        else:
            mask[name] = _largest(_Ranked(name=name, tensor=tensor, method=method, weights=own), wanted)
    return mask


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ranked:
    """Ranks of a tensor's weights, by score or by size. Zeros in `weights`, if given, rank lowest."""

    name: str
    tensor: NDArray[np.float32]
    method: MaskMethod
    weights: NDArray[np.float32] | None

    def chunks(self) -> Iterator[tuple[int, NDArray[np.uint32]]]:
        """Yield chunks (first index, ranks). Zeros in `weights` have rank 0. Other ranks rise with scores.

        The bits of non-negative float32 numbers are ordered as the numbers are.
        """
        flat = self.tensor.reshape(-1)
        kept = None if self.weights is None else self.weights.reshape(-1) != 0
        for start in range(0, flat.size, _CHUNK):
            chunk = np.array(flat[start : start + _CHUNK], dtype=np.float32)
            if self.method is MaskMethod.MAGNITUDE:
                np.abs(chunk, out=chunk)
            good = np.isfinite(chunk) & (chunk >= 0)
            if not good.all():
                bad = chunk[np.argmin(good)]
                raise InputError(f"{self.name} has the score {bad}. Scores must be finite and at least 0.")
            rank = (chunk + np.float32(0)).view(np.uint32) + np.uint32(1)  # + 0 turns -0 into 0
            yield start, rank if kept is None else rank * kept[start : start + rank.size]


def _largest(ranked: _Ranked, wanted: int) -> NDArray[np.uint32]:
    """Select the weights with the largest ranks. Of the weights at the threshold, take the first ones."""
    threshold, ties = _threshold(ranked, wanted)
    if threshold == 0:  # there are fewer nonzero weights than wanted
        ties = 0
    found: list[NDArray[np.int64]] = []
    for start, rank in ranked.chunks():
        above = np.flatnonzero(rank > threshold)
        equal = np.flatnonzero(rank == threshold)[:ties]
        ties -= equal.size
        found.append(start + np.union1d(above, equal))
    return np.concatenate(found).astype(np.uint32)


def _threshold(ranked: _Ranked, wanted: int) -> tuple[int, int]:
    """Return the `wanted`-th largest rank, and how many weights of exactly that rank to take."""
    # The first pass counts all ranks by their upper 16 bits, and finds the bin of the threshold. The second
    # pass counts the ranks of this bin by their lower 16 bits.
    high = np.zeros(1 << 16, np.int64)
    for _, rank in ranked.chunks():
        high += np.bincount(rank >> np.uint32(16), minlength=high.size)
    top, wanted = _bin_of(high, wanted)
    low = np.zeros(1 << 16, np.int64)
    for _, rank in ranked.chunks():
        within = rank[rank >> np.uint32(16) == top]
        low += np.bincount(within & np.uint32(0xFFFF), minlength=low.size)
    bottom, wanted = _bin_of(low, wanted)
    return top << 16 | bottom, wanted


def _bin_of(histogram: NDArray[np.int64], wanted: int) -> tuple[int, int]:
    """Return the bin that holds the `wanted`-th largest rank, and how many ranks of that bin to take."""
    # Count from the top, because the largest scores are wanted.
    at_least = np.cumsum(histogram[::-1])
    position = int(np.searchsorted(at_least, wanted))
    above = int(at_least[position - 1]) if position else 0
    return histogram.size - 1 - position, wanted - above


def _random_mask(
    size: int, weights: NDArray[np.float32] | None, wanted: int, seed: int, tensor_id: int
) -> NDArray[np.uint32]:
    """Draw among the nonzero weights. `wanted` is a share of all weights, zeros included."""
    kept = None if weights is None else np.flatnonzero(weights)
    if kept is None or kept.size == size:
        return _random_indices(size, wanted, seed, tensor_id)
    if not kept.size:
        return np.empty(0, np.uint32)
    chosen = _random_indices(kept.size, min(wanted, kept.size), seed, tensor_id)
    return kept[chosen].astype(np.uint32)


def _random_indices(numel: int, wanted: int, seed: int, tensor_id: int) -> NDArray[np.uint32]:
    """Draw `wanted` distinct indices: the first distinct numbers in the tensor's random stream.

    Each set of indices is equally likely. If more than half of the tensor is wanted, draw the indices to
    leave out, which is less work.
    """
    if not 0 <= seed < 1 << 64:
        raise InputError(f"expected a seed from 0 to 2**64 - 1, got {seed}")
    drawn = min(wanted, numel - wanted)
    chosen = _first_distinct(numel, drawn, seed, tensor_id)
    if wanted == drawn:
        return np.sort(chosen).astype(np.uint32)
    left = np.ones(numel, bool)
    left[chosen] = False
    return np.flatnonzero(left).astype(np.uint32)


def _first_distinct(numel: int, wanted: int, seed: int, tensor_id: int) -> NDArray[np.uint64]:
    draws = np.empty(0, np.uint64)
    block = 0
    while True:
        # `unique` sorts by value. Sorting the first positions restores the order of the draws.
        _, first = np.unique(draws, return_index=True)
        if first.size >= wanted:
            return draws[np.sort(first)[:wanted]]
        blocks = max(16, wanted - first.size)
        draws = np.concatenate([draws, _draws(numel, block, blocks, seed, tensor_id)])
        block += blocks


def _draws(numel: int, block: int, blocks: int, seed: int, tensor_id: int) -> NDArray[np.uint64]:
    """Draw two indices from each Philox block.

    An index is floor(u * numel / 2**64) for a random 64-bit u, computed without a 128-bit product.
    """
    counter = np.arange(block, block + blocks, dtype=np.uint64)
    words = np.stack(philox4x32_10((counter, tensor_id, *_MASK_STREAM), seed), axis=1).reshape(-1, 2)
    size, half = np.uint64(numel), np.uint64(32)
    # words < 2**32 and numel <= 2**32: neither product nor sum reaches 2**64.
    return (words[:, 1] * size + (words[:, 0] * size >> half)) >> half
