"""Token sequences of one length from a corpus. Texts, tokenizer and seed determine them.

The rule, so that anyone can repeat it:

1. Each text is tokenized alone, with the special tokens that the tokenizer adds. Texts are joined in order.
2. The joined stream is cut into windows of exactly `length` tokens, from its start, without gaps or overlap.
   The rest at the end is left out, so there is no padding.
   If a text begins with BOS, texts are not joined: a window is BOS and tokens of one text, and the rest of
   each text is left out (`permille.beginnings`).
3. Each of the first `POOL * n` windows (or of all windows of a smaller corpus) gets a 64-bit key, which
   Philox4x32-10 makes from the number of the window and the seed. The n windows with the smallest keys are
   chosen. If keys are equal, the earlier window is chosen.
4. The chosen windows are returned in the order of the stream.

So at most `skip + POOL * n` windows of a corpus are read, and only n windows are held in memory. The first
`skip` windows are passed over before the rule counts windows. So a call can get sequences that share no token
with those of another call.
"""

import heapq
import itertools
from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from permille.errors import InputError
from permille.zo.philox import philox4x32_10

# A larger pool spreads the choice over more of the corpus, but takes longer to tokenize.
POOL = 8
# Words 2 and 3 of the generator's counter. Masks use another pair. Directions put their step and query there,
# and a step is below 2**24. So sequences, masks and directions never draw the same random numbers.
_SEQUENCE_STREAM = (0xFFFFFFFF, 0xFFFFFFFE)


class Tokenizer(Protocol):
    """Interface of a tokenizer, such as `permille.models.loading.FileTokenizer`."""

    @property
    def bos(self) -> tuple[int, ...]:
        """The tokens that begin every text, often none."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the token ids of one text, with the tokens that begin it."""
        ...


def token_sequences(
    tokenizer: Tokenizer, texts: Iterable[str], n: int, length: int, seed: int, *, skip: int = 0
) -> NDArray[np.int64]:
    """Return `n` sequences of exactly `length` tokens, int64 [n, length].

    Args:
        skip: the number of windows to pass over first, so that two calls can share no token.

    Raises:
        InputError: the corpus holds fewer than `skip + n` windows, or a number is out of range.
    """
    if n < 1 or length < 2 or skip < 0 or not 0 <= seed < 1 << 64:
        raise InputError(
            f"expected n >= 1, length >= 2, skip >= 0 and a seed of 64 bits, got n = {n}, length = {length}, "
            f"skip = {skip} and seed = {seed}"
        )
    windows = itertools.islice(_windows(tokenizer, texts, length), skip, skip + POOL * n)
    best: list[tuple[int, int, NDArray[np.int64]]] = []  # a heap whose top is the worst of the n best
    for index, tokens in enumerate(windows):
        # Negate key and index, because heapq keeps the smallest item on top.
        item = (-_key(index, seed), -index, tokens)
        if len(best) < n:
            heapq.heappush(best, item)
        elif item[:2] > best[0][:2]:
            heapq.heapreplace(best, item)
    if len(best) < n:
        passed = f" beside the {skip} that are passed over" if skip else ""
        passed += ", each within one text, as this model reads them" if tokenizer.bos else ""
        raise InputError(
            f"The corpus has {len(best)} sequences of {length} tokens{passed}, but {n} are needed. Add text "
            "to the corpus, or ask for fewer or shorter sequences where a command lets you choose them."
        )
    return np.stack([tokens for _, _, tokens in sorted(best, key=lambda item: -item[1])])


def row_order(rows: int, taken: int, seed: int, step: int) -> NDArray[np.int64]:
    """Return the rows that a training step takes.

    Every row occurs once in a seeded order, then again in another order. For example, if a step takes two of
    four rows, the first two steps together take all rows:

        >>> sorted([*row_order(4, 2, 0, 0).tolist(), *row_order(4, 2, 0, 1).tolist()])
        [0, 1, 2, 3]

    Args:
        rows: the number of rows to choose from.
        taken: the number of rows that a step takes.
        seed: the seed of the orders.
        step: the number of the step, from 0.
    """
    # One order follows another without a gap, so a step may take the end of one and the start of the next.
    places = np.arange(step * taken, (step + 1) * taken)
    orders = {
        int(turn): np.random.default_rng([seed, int(turn)]).permutation(rows) for turn in places // rows
    }
    return np.array([orders[int(place // rows)][place % rows] for place in places])


def _windows(tokenizer: Tokenizer, texts: Iterable[str], length: int) -> Iterator[NDArray[np.int64]]:
    bos_S = np.array(tokenizer.bos, np.int64)
    room = length - bos_S.size
    if room < 1:
        raise InputError(
            f"A sequence of {length} tokens has no room after the {bos_S.size} that begin a text."
        )
    rest = np.empty(0, np.int64)
    for text in texts:
        ids_T = np.asarray(tokenizer.encode(text), np.int64)[bos_S.size :]
        joined = ids_T if bos_S.size else np.concatenate([rest, ids_T])
        whole = joined.size // room * room
        yield from (np.concatenate([bos_S, part_T]) for part_T in joined[:whole].reshape(-1, room))
        # At most `length - 1` tokens wait here, so memory does not grow with the corpus.
        rest = joined[whole:]


def _key(window: int, seed: int) -> int:
    # Philox takes 32-bit words, so a window's number is split in two.
    low, high, _, _ = philox4x32_10((window & 0xFFFFFFFF, window >> 32, *_SEQUENCE_STREAM), seed)
    return int(high) << 32 | int(low)
