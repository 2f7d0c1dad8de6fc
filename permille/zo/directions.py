"""Directions `z`: integer vectors, a function of (seed, step, query, tensor id, rank in the mask) alone.

Nothing else enters: not chunking, thread count, device, library version or iteration order (FORMAT 6; golden
vectors in `tests/golden/directions.json`). The numpy here is the definition; where the native kernels are
built, they make whole directions, held to the same vectors.

Shapes: K = masked weights of all tensors, concatenated in tensor order; N = masked weights of one slice.
"""

import math
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille.native.directions import direction_into
from permille.native.library import load
from permille.zo.philox import BLOCK_BITS, WORDS, Words, philox4x32_10

GENERATOR = "philox4x32-10"
GENERATOR_VERSION = 1

Scalar = TypeVar("Scalar", bound=np.generic)

_WORD_LIMIT = 1 << 32
_SEED_LIMIT = 1 << 64


class Distribution(StrEnum):
    """What a coefficient of `z` is: a sign, or a centred sum of 4, 16 or 64 fair bits."""

    RADEMACHER = "rademacher"
    BINOMIAL4 = "binomial4"
    BINOMIAL16 = "binomial16"
    BINOMIAL64 = "binomial64"


_BITS = {
    Distribution.RADEMACHER: 1,
    Distribution.BINOMIAL4: 4,
    Distribution.BINOMIAL16: 16,
    Distribution.BINOMIAL64: 64,
}


def bits_per_value(distribution: Distribution) -> int:
    """How many generator bits one coefficient consumes: 1, 4, 16 or 64."""
    return _BITS[distribution]


def sigma(distribution: Distribution) -> float:
    """Standard deviation of a coefficient: 1 for Rademacher, `sqrt(n)/2` for n bits (FORMAT 6)."""
    bits = _BITS[distribution]
    return 1.0 if bits == 1 else math.sqrt(bits) / 2


def largest(distribution: Distribution) -> int:
    """Largest absolute value of a coefficient: 1 for Rademacher, `n/2` for n bits."""
    return max(1, _BITS[distribution] // 2)


def direction_slice(
    *, seed: int, step: int, query: int, tensor_id: int, start: int, stop: int, distribution: Distribution
) -> NDArray[np.int8]:
    """Coefficients `start` to `stop` (exclusive) of one tensor's direction, int8 [stop - start].

    Raises:
        InputError: a number does not fit its counter word, or the slice is not one.
    """
    _check_words(seed, step=step, query=query, tensor_id=tensor_id, stop=stop)
    if not 0 <= start <= stop:
        raise InputError(f"expected 0 <= start <= stop, got start {start} and stop {stop}")
    bits = _BITS[distribution]
    first = start * bits // BLOCK_BITS
    block_B = np.arange(first, -(-stop * bits // BLOCK_BITS), dtype=np.uint64)
    z_N = _decode(philox4x32_10((block_B, tensor_id, step, query), seed), bits)
    offset = first * BLOCK_BITS // bits
    return z_N[start - offset : stop - offset]


def direction(
    *, seed: int, step: int, query: int, counts: Sequence[int], distribution: Distribution
) -> NDArray[np.int8]:
    """The whole direction of one query, int8 [k], `counts[t]` coefficients for tensor `t`.

    Raises:
        InputError: a number does not fit its counter word.
    """
    _check_words(seed, step=step, query=query)
    bits = _BITS[distribution]
    library = load()
    if library is not None:
        _check_counts(tuple(counts))
        z_K = np.empty(sum(counts), dtype=np.int8)
        direction_into(library, z_K, seed=seed, step=step, query=query, counts=counts, bits=bits)
        return z_K
    layout = block_layout(tuple(counts), bits)
    z_P = _decode(philox4x32_10((layout.block_B, layout.tensor_B, step, query), seed), bits)
    return layout.without_padding(z_P, bits)


class BlockLayout:
    """The generator blocks of all tensors side by side, so that one call makes a whole direction.

    Attributes:
        block_B: counter word 0 (block within its tensor) of each of the B blocks, uint64.
        tensor_B: counter word 1 (tensor id) of each block, uint64.
    """

    __slots__ = ("block_B", "counts", "starts", "tensor_B")

    def __init__(self, counts: tuple[int, ...], bits: int) -> None:
        _check_counts(counts)
        blocks_T = np.array([-(-count * bits // BLOCK_BITS) for count in counts], dtype=np.int64)
        self.counts = counts
        self.starts = np.concatenate([[0], np.cumsum(blocks_T)])
        self.tensor_B = np.repeat(np.arange(len(counts), dtype=np.uint64), blocks_T)
        self.block_B = np.arange(self.starts[-1], dtype=np.uint64) - np.repeat(
            self.starts[:-1].astype(np.uint64), blocks_T
        )
        self.block_B.flags.writeable = False
        self.tensor_B.flags.writeable = False

    def without_padding(
        self, padded_P: NDArray[Scalar], bits: int, tensors: slice = slice(None)
    ) -> NDArray[Scalar]:
        """Drop what each tensor's last block holds beyond its count: [B * 128 / bits] -> [k].

        Args:
            tensors: consecutive tensors whose blocks `padded_P` holds; all of them by default.
        """
        per_block = BLOCK_BITS // bits
        starts_T = self.starts[:-1][tensors]
        firsts = (starts_T - starts_T[:1]).tolist()
        return np.concatenate(
            [padded_P[:0]]
            + [
                padded_P[first * per_block : first * per_block + count]
                for first, count in zip(firsts, self.counts[tensors], strict=True)
            ]
        )


@lru_cache(maxsize=8)
def block_layout(counts: tuple[int, ...], bits: int) -> BlockLayout:
    """The layout of a mask's counts; kept, because every step of a run asks for the same one."""
    return BlockLayout(counts, bits)


def _decode(words: tuple[Words, Words, Words, Words], bits: int) -> NDArray[np.int8]:
    """Generator words [B] x 4 -> centred coefficients int8 [B * 128 / bits], lowest bit first (FORMAT 6)."""
    packed = np.empty((len(words[0]), WORDS), dtype="<u4")
    for index, word in enumerate(words):
        packed[:, index] = word
    raw = packed.view(np.uint8).reshape(-1)
    if bits == 1:
        z = np.unpackbits(raw, bitorder="little").view(np.int8)
        z *= 2
        z -= 1
        return z
    if bits == 4:
        counted = np.bitwise_count(np.stack([raw & 15, raw >> 4], axis=1)).reshape(-1)
    else:
        counted = np.bitwise_count(raw.view(f"<u{bits // 8}"))
    return counted.view(np.int8) - np.int8(bits // 2)


def _check_counts(counts: tuple[int, ...]) -> None:
    if any(not 0 <= count < _WORD_LIMIT for count in counts):
        raise InputError(f"expected counts from 0 to 2**32 - 1, got {min(counts)} to {max(counts)}")


def _check_words(seed: int, **words: int) -> None:
    if not 0 <= seed < _SEED_LIMIT:
        raise InputError(f"expected a seed from 0 to 2**64 - 1, got {seed}")
    for name, word in words.items():
        if not 0 <= word < _WORD_LIMIT:
            raise InputError(f"expected {name} from 0 to 2**32 - 1, got {word}")
