"""Bytes of a text that each of its tokens stands for, by which bits per byte divide.

They come from the offsets that a tokenizer reports, not from decoded tokens: a tokenizer that spells
characters in bytes decodes a run of them that is cut to a replacement character each, and one that normalizes
decodes another text.
"""

import numpy as np
from numpy.typing import NDArray


def token_bytes(text: str, ends_T: NDArray[np.int64]) -> NDArray[np.int64]:
    """Bytes of UTF-8 of each token, int64 [T]; their sum is the text's but for what follows the last token.

    A token stands for what no token before it did: of several that spell one character the first one has its
    bytes, and what lies between two tokens is the second one's.

    Args:
        ends_T: int64, where in `text` (characters) each token ends; 0 for a token that stands for no text.
    """
    before = np.concatenate([[0], np.cumsum(_utf8_lengths(text))])
    bytes_T: NDArray[np.int64] = np.diff(before[np.maximum.accumulate(ends_T)], prepend=0)
    return bytes_T


def _utf8_lengths(text: str) -> NDArray[np.int64]:
    """Return the bytes of each character of `text` in UTF-8."""
    points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    lengths = np.ones(len(points), dtype=np.int64)
    for first in (0x80, 0x800, 0x10000):
        lengths += points >= first
    return lengths
