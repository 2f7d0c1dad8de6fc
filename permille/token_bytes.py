"""Number of UTF-8 bytes for each token of a text, from which bits per byte are computed.

The numbers come from the offsets that a tokenizer reports. Decoding tokens one by one would be wrong: a
byte-level tokenizer may cut a character into pieces that decode to replacement characters, and a normalizing
tokenizer decodes to another text.
"""

import numpy as np
from numpy.typing import NDArray


def token_bytes(text: str, ends_T: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number of bytes for each token, int64 [T].

    Bytes between two tokens count for the second one. If several tokens spell one character, the first one
    has its bytes. Text after the last token is not counted.

        >>> token_bytes("naïve", np.array([2, 5])).tolist()
        [2, 4]

    Args:
        text: the text.
        ends_T: int64, the position in `text` after each token, in characters. A token without text has 0.
    """
    before = np.concatenate([[0], np.cumsum(_utf8_lengths(text))])
    # Offsets may go back within one character, so a running maximum keeps counts from being negative.
    bytes_T: NDArray[np.int64] = np.diff(before[np.maximum.accumulate(ends_T)], prepend=0)
    return bytes_T


def _utf8_lengths(text: str) -> NDArray[np.int64]:
    """Return the UTF-8 bytes of each character."""
    points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    lengths = np.ones(len(points), dtype=np.int64)
    for first in (0x80, 0x800, 0x10000):
        # From each of these code points on, a character takes one more byte.
        lengths += points >= first
    return lengths
