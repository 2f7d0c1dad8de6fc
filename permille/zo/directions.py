"""Directions `z`: integer vectors that depend on (seed, step, query, tensor id, rank in the mask) alone.

Chunking, thread count, device, library version and iteration order do not change them (FORMAT 6; golden
vectors in `tests/golden/directions.json`). The numpy code here is the definition. The native kernels compute
whole directions and their sums, and are tested against the same vectors (ADR 7).

This module makes the kind `rademacher`: the elements are fair signs, one bit of the generator each. The
module `groups` makes the other kind. To add a kind, write a module like these, and add a member to
`header.DirectionKind`.

Shapes: K = masked weights of all tensors, concatenated in tensor order; D = directions; B = blocks of the
generator; P = B * 128 signs, the padding of each tensor's last block included.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille.native.arrays import check_array
from permille.native.library import load
from permille.zo.philox import BLOCK_BITS, WORDS, Words, philox4x32_10

Scalar = TypeVar("Scalar", bound=np.generic)

_WORD_LIMIT = 1 << 32
# The number of directions that numpy sums at once: their bits at one position form a byte.
_GROUP = 8


def direction(*, seed: int, step: int, query: int, counts: Sequence[int]) -> NDArray[np.int8]:
    """Return the direction of one query, int8 [K], with `counts[t]` signs for tensor `t` (FORMAT 6.3).

    For example, the signs of two tensors with three and two masked weights:

        >>> direction(seed=7, step=0, query=0, counts=(3, 2)).shape
        (5,)
    """
    layout = block_layout(tuple(counts))
    library = load()
    if library is not None:
        z_K = np.empty(layout.k, dtype=np.int8)
        library.call("direction", seed, step, query, np.array(counts, dtype=np.int64), len(counts), z_K)
        return z_K
    bits_P = _bits(philox4x32_10((layout.block_B, layout.tensor_B, step, query), seed))
    # Convert in place, because the array is as large as the mask. 0 becomes -1, and 1 stays 1.
    z_P = bits_P.view(np.int8)
    z_P *= 2
    z_P -= 1
    return layout.without_padding(z_P)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Combination:
    """A sum of directions with integer coefficients. Replay computes such sums.

    Attributes:
        seed: the seed of all directions.
        step_D, query_D, c_D: step, query and coefficient of each direction, int64. The caller checks that
            the sum of |c| is within 2**53 (FORMAT 7.3).

    Raises:
        InputError: an array has another type or shape.
    """

    seed: int
    step_D: NDArray[np.int64]
    query_D: NDArray[np.int64]
    c_D: NDArray[np.int64]

    def __post_init__(self) -> None:
        check_array("coefficients", self.c_D, np.int64, (None,))
        check_array("steps", self.step_D, np.int64, self.c_D.shape)
        check_array("queries", self.query_D, np.int64, self.c_D.shape)

    def over(self, counts: tuple[int, ...], tensors: slice, *, threads: int = 1) -> NDArray[np.int64]:
        """Return `sum_d c[d] * z[d]` over consecutive tensors, int64. Threads do not change the bits."""
        layout = block_layout(counts)
        first, stop = layout.starts[tensors.start], layout.starts[tensors.stop]
        block_B, tensor_B = layout.block_B[first:stop], layout.tensor_B[first:stop]
        # The threads divide the blocks, not the directions, so their results are joined without another sum.
        edges = [len(block_B) * index // threads for index in range(threads + 1)]
        spans = [slice(start, end) for start, end in pairwise(edges) if start < end]
        with ThreadPoolExecutor(max_workers=threads) as pool:
            sums = list(pool.map(lambda span: self._sums(block_B[span], tensor_B[span]), spans))
        return layout.without_padding(np.concatenate([self.c_D[:0], *sums]), tensors)

    def _sums(self, block_B: Words, tensor_B: Words) -> NDArray[np.int64]:
        """Return `sum_d c[d] * sign[d]` at each bit position of some blocks, int64 [P]."""
        sums_P = np.zeros(len(block_B) * BLOCK_BITS, dtype=np.int64)
        library = load()
        directions = (self.step_D, self.query_D, self.c_D)
        if library is not None:
            sizes = (len(block_B), len(self.c_D))
            library.call("bit_sums", self.seed, block_B, tensor_B, sizes[0], *directions, sizes[1], sums_P)
        else:
            for start in range(0, len(self.c_D), _GROUP):
                step_G, query_G, c_G = (array[start : start + _GROUP] for array in directions)
                counter = (block_B, tensor_B, step_G[:, None], query_G[:, None])
                # The bits of eight directions at one position form a byte, the index of one of 256 sums.
                chosen_P = np.packbits(_bits(philox4x32_10(counter, self.seed)), axis=0)[0]
                sums_P += _subset_sums(c_G)[chosen_P]
        # A sign is `2 * bit - 1`, so the sums of bits become sums of signs here, once for all directions.
        sums_P *= 2
        sums_P -= self.c_D.sum()
        return sums_P


class BlockLayout:
    """The generator blocks of all tensors side by side, so that one call makes a whole direction.

    Attributes:
        counts: the masked weights of each tensor.
        k: the number of elements of a direction.
        starts: the first block of each tensor, followed by the number of all blocks.
        block_B: counter word 0 (block within its tensor) of each block, uint64.
        tensor_B: counter word 1 (tensor id) of each block, uint64.
    """

    __slots__ = ("_width", "block_B", "counts", "k", "starts", "tensor_B")

    def __init__(self, counts: tuple[int, ...], width: int = BLOCK_BITS) -> None:
        """Lay out the blocks. Each block gives `width` elements."""
        if any(not 0 <= count < _WORD_LIMIT for count in counts):
            raise InputError(f"expected counts from 0 to 2**32 - 1, got {min(counts)} to {max(counts)}")
        # Round up: each tensor begins with a new block, so its elements do not depend on earlier tensors.
        blocks_T = np.array([-(-count // width) for count in counts], dtype=np.int64)
        self._width = width
        self.counts = counts
        self.k = sum(counts)
        self.starts = np.concatenate([[0], np.cumsum(blocks_T)])
        self.tensor_B = np.repeat(np.arange(len(counts), dtype=np.uint64), blocks_T)
        self.block_B = np.arange(self.starts[-1], dtype=np.uint64) - np.repeat(
            self.starts[:-1].astype(np.uint64), blocks_T
        )
        # Make the arrays read-only, because `block_layout` gives this object to all callers.
        self.block_B.flags.writeable = False
        self.tensor_B.flags.writeable = False

    def without_padding(self, padded_P: NDArray[Scalar], tensors: slice = slice(None)) -> NDArray[Scalar]:
        """Drop the elements beyond the counts in the last blocks of consecutive tensors."""
        starts_T = self.starts[:-1][tensors]
        firsts = ((starts_T - starts_T[:1]) * self._width).tolist()
        parts = zip(firsts, self.counts[tensors], strict=True)
        return np.concatenate([padded_P[:0], *(padded_P[first : first + count] for first, count in parts)])


@lru_cache(maxsize=8)
def block_layout(counts: tuple[int, ...]) -> BlockLayout:
    """Return the layout of a mask's counts. It is cached, because every step of a run needs the same one."""
    return BlockLayout(counts)


def _bits(words: tuple[Words, Words, Words, Words]) -> NDArray[np.uint8]:
    """Convert four arrays of generator words [..., B] to bits [..., P], lowest bit first (FORMAT 6.2)."""
    shape = words[0].shape
    packed = np.empty((*shape, WORDS), dtype="<u4")
    for index, word in enumerate(words):
        packed[..., index] = word
    return np.unpackbits(packed.view(np.uint8).reshape(*shape[:-1], -1), axis=-1, bitorder="little")


def _subset_sums(c_G: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return all sums of subsets. Entry e sums the coefficients whose bit is set in e, highest bit first."""
    chosen = np.unpackbits(np.arange(1 << _GROUP, dtype=np.uint8)[:, None], axis=1)[:, : len(c_G)]
    sums: NDArray[np.int64] = chosen.astype(np.int64) @ c_G
    return sums
