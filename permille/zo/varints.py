"""Variable-length integers with 7 bits in a byte, low bits first.

The top bit of a byte means that more bytes follow. Signed integers are first mapped to unsigned ones
(zigzag). A number takes at most 5 bytes, and only its shortest form is valid. So each number has exactly one
byte string (FORMAT 9.2).
"""

import numpy as np
from numpy.typing import NDArray

from permille.errors import PackageError

# After zigzag, a coefficient has at most 32 bits (FORMAT 8.2), and a byte holds 7 of them.
MAX_BYTES = 5

_SEVEN = np.uint64(7)


def zigzag(numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Map signed numbers to unsigned ones.

    >>> zigzag(np.array([0, -1, 1, -2])).tolist()
    [0, 1, 2, 3]
    """
    # The shift of a signed number keeps the sign, so `numbers >> 63` is 0, or -1 with all bits set.
    return ((numbers << 1) ^ (numbers >> 63)).view(np.uint64)


def unzigzag(numbers: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Invert `zigzag`."""
    return (numbers >> np.uint64(1)).view(np.int64) ^ -(numbers & np.uint64(1)).view(np.int64)


def encode_varints(numbers_V: NDArray[np.uint64]) -> bytes:
    """Encode numbers below 2**35, one after the other.

    >>> encode_varints(np.array([1, 300], np.uint64)).hex()
    '01ac02'
    """
    sizes_V = np.ones(len(numbers_V), dtype=np.int64)
    # Loop over byte positions, and handle all numbers at once. A Python loop over numbers would be slow.
    for index in range(1, MAX_BYTES):
        sizes_V += numbers_V >= np.uint64(1 << 7 * index)
    starts_V = np.cumsum(sizes_V) - sizes_V
    out = np.zeros(int(sizes_V.sum()), dtype=np.uint8)
    for index in range(MAX_BYTES):
        present = sizes_V > index
        more = (sizes_V[present] > index + 1).astype(np.uint8) << 7
        digits = (numbers_V[present] >> (_SEVEN * np.uint64(index))) & np.uint64(0x7F)
        out[starts_V[present] + index] = digits.astype(np.uint8) | more
    return out.tobytes()


def decode_varints(data: bytes) -> NDArray[np.uint64]:
    """Decode the numbers of `data`, uint64 [V].

    Raises:
        PackageError: `log-content`: a number is cut, longer than 5 bytes, or not in its shortest form.
    """
    raw = np.frombuffer(data, dtype=np.uint8)
    ends_V = np.flatnonzero(raw < 0x80)
    if len(raw) and (not len(ends_V) or ends_V[-1] != len(raw) - 1):
        raise PackageError("log-content", "expected a whole integer at the end of the chunk, got a cut one")
    starts_V = np.concatenate([[0], ends_V[:-1] + 1]).astype(np.int64)[: len(ends_V)]
    sizes_V = ends_V - starts_V + 1
    if len(sizes_V) and sizes_V.max() > MAX_BYTES:
        raise PackageError(
            "log-content", f"expected integers of at most {MAX_BYTES} bytes, got {sizes_V.max()}"
        )
    # A last byte of 0 adds nothing, so a shorter form exists.
    if np.any((raw[ends_V] == 0) & (sizes_V > 1)):
        raise PackageError("log-content", "expected integers in their shortest form, got an overlong one")
    numbers_V = np.zeros(len(ends_V), dtype=np.uint64)
    for index in range(MAX_BYTES):
        present = sizes_V > index
        digits = (raw[starts_V[present] + index] & np.uint8(0x7F)).astype(np.uint64)
        numbers_V[present] |= digits << (_SEVEN * np.uint64(index))
    return numbers_V
