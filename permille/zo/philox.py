"""Philox4x32-10, the counter-based generator of all directions.

Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011). Tests compare it
with the known-answer vectors of Random123. NumPy's own Philox is 4x64 and gives another stream.

Words are uint64 arrays with values below 2**32, because the products need 64 bits.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

GENERATOR = "philox4x32-10"
GENERATOR_VERSION = 1

WORDS = 4
BLOCK_BITS = 128

_ROUNDS = 10
# FORMAT 6.1: the multipliers of Philox4x32, and the increments of its key.
_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)

Words = NDArray[np.uint64]


def philox4x32_10(counter: tuple[Any, Any, Any, Any], seed: int) -> tuple[Words, Words, Words, Words]:
    """Encrypt counters of four words each into outputs of four words each, elementwise.

    For example, the first known-answer vector of Random123:

        >>> [hex(int(word)) for word in philox4x32_10((0, 0, 0, 0), 0)]
        ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']

    Args:
        counter: four words below 2**32, integers or uint64 arrays that broadcast to one shape.
        seed: the 64-bit key. Its low half is key word 0, its high half key word 1.

    Returns:
        Four uint64 arrays of the broadcast shape, with values below 2**32.
    """
    words = np.broadcast_arrays(*(np.asarray(word, dtype=np.uint64) for word in counter))
    x0, x1, x2, x3 = (np.array(word, dtype=np.uint64, order="C") for word in words)
    encrypt((x0, x1, x2, x3), (np.empty_like(x0), np.empty_like(x0)), seed)
    return x0, x1, x2, x3


def encrypt(words: tuple[Words, Words, Words, Words], scratch: tuple[Words, Words], seed: int) -> None:
    """Run the ten rounds in place: the counters in `words` become the output. `scratch` is overwritten."""
    x0, x1, x2, x3 = words
    p0, p1 = scratch
    key_0, key_1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(_ROUNDS):
        # High halves, mixed with a neighbour and the key, go to words 0 and 2; low halves to words 1 and 3.
        np.multiply(x0, _MULTIPLIER_0, out=p0)
        np.multiply(x2, _MULTIPLIER_1, out=p1)
        np.right_shift(p1, _HALF, out=x0)
        np.bitwise_xor(x0, x1, out=x0)
        np.bitwise_xor(x0, np.uint64(key_0), out=x0)
        np.right_shift(p0, _HALF, out=x2)
        np.bitwise_xor(x2, x3, out=x2)
        np.bitwise_xor(x2, np.uint64(key_1), out=x2)
        np.bitwise_and(p1, _LOW, out=x1)
        np.bitwise_and(p0, _LOW, out=x3)
        # Python integers do not wrap, so cut the sums to 32 bits.
        key_0 = (key_0 + _WEYL_0) & 0xFFFFFFFF
        key_1 = (key_1 + _WEYL_1) & 0xFFFFFFFF
