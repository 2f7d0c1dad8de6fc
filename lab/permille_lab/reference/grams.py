"""Thirteen words in a row: which text shares some with text that must stay unseen, or with text already kept.

Words are runs of letters and digits in lower case, as in the decontamination of Brown et al. (2020, appendix
C). A run of 13 words is a 64-bit hash; two different runs share one with a probability near 1e-19, and such
an accident drops a document too many, never one too few. A forbidden text of 8 to 12 words is matched whole,
so that the short sentences of the tasks count too; shorter ones are common phrases and are not matched.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

LONG = 13
SHORTEST = 8
_WORD = re.compile(r"[a-z0-9]+")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_ids: dict[str, int] = {}


def word_ids(text: str) -> NDArray[np.uint64]:
    """A 64-bit hash for each word of the text."""
    words = _WORD.findall(text.lower())
    return np.fromiter(
        (_ids.get(word) or _word_id(word) for word in words), dtype=np.uint64, count=len(words)
    )


def _word_id(word: str) -> int:
    _ids[word] = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little") | 1
    return _ids[word]


def grams(ids: NDArray[np.uint64], length: int) -> NDArray[np.uint64]:
    """Hashes of all runs of `length` words; empty where the text is shorter."""
    count = len(ids) - length + 1
    if count <= 0:
        return np.empty(0, dtype=np.uint64)
    total = np.full(count, length, dtype=np.uint64)
    for offset in range(length):
        total = (total ^ (total >> np.uint64(29))) * _FACTOR + ids[offset : offset + count]
    return total


class Forbidden:
    """The runs of words of one kind of unseen text."""

    def __init__(self, texts: Iterable[str]) -> None:
        collected: dict[int, list[NDArray[np.uint64]]] = {n: [] for n in range(SHORTEST, LONG + 1)}
        for text in texts:
            ids = word_ids(text)
            if len(ids) >= SHORTEST:
                length = min(len(ids), LONG)
                collected[length].append(grams(ids, length))
        self._sorted = {n: np.unique(np.concatenate(found)) for n, found in collected.items() if found}

    def __len__(self) -> int:
        return sum(len(found) for found in self._sorted.values())

    def touches(self, ids: NDArray[np.uint64]) -> bool:
        """Whether a text with these words shares a run with the unseen text."""
        return any(bool(_contains(found, grams(ids, n)).any()) for n, found in self._sorted.items())


class Seen:
    """A sample (one in 16, by hash) of the runs of all kept documents, to find those that come again."""

    def __init__(self) -> None:
        self._hashes: set[int] = set()

    def repeated(self, ids: NDArray[np.uint64]) -> bool:
        """Whether more than half of the document's sampled runs were seen before; remembers them."""
        found = grams(ids, LONG)
        sample = found[found & np.uint64(15) == 0].tolist()
        known = sum(value in self._hashes for value in sample)
        if sample and 2 * known > len(sample):
            return True
        self._hashes.update(sample)
        return False


def _contains(ordered: NDArray[np.uint64], values: NDArray[np.uint64]) -> NDArray[np.bool_]:
    places = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    return np.asarray(ordered[places] == values)
