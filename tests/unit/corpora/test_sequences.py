"""Tests of token sequences: exact lengths, no token used twice, and the documented rule of selection."""

from collections.abc import Iterator

import numpy as np
import pytest

from permille.corpora.sequences import POOL, token_sequences
from permille.errors import InputError


class Letters:
    """A tokenizer with one token per character, after a 1 at the beginning of each text."""

    bos: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        return [1, *map(ord, text)]


def texts(characters: int, size: int = 37) -> list[str]:
    stream = "".join(chr(200 + i) for i in range(characters))
    return [stream[i : i + size] for i in range(0, characters, size)]


def joined(parts: list[str]) -> list[int]:
    return [token for part in parts for token in Letters().encode(part)]


def test_sequences_are_whole_windows_of_the_joined_texts_in_order() -> None:
    parts = texts(1000)
    stream = joined(parts)
    windows = [stream[i : i + 16] for i in range(0, len(stream) - 15, 16)]
    found = token_sequences(Letters(), parts, 10, 16, seed=3)
    assert found.dtype == np.int64
    assert found.shape == (10, 16)
    positions = [windows.index(row) for row in found.tolist()]
    assert positions == sorted(set(positions))


def test_all_windows_are_given_where_all_are_asked_for() -> None:
    parts = texts(100)
    stream = joined(parts)
    count = len(stream) // 8
    assert token_sequences(Letters(), parts, count, 8, seed=0).reshape(-1).tolist() == stream[: count * 8]


def test_the_result_depends_on_corpus_and_seed_alone() -> None:
    parts = texts(3000)
    one = token_sequences(Letters(), parts, 12, 10, seed=5)
    assert one.tolist() == token_sequences(Letters(), iter(parts), 12, 10, seed=5).tolist()
    assert one.tolist() != token_sequences(Letters(), parts, 12, 10, seed=6).tolist()


def test_windows_with_the_smallest_philox_keys_win() -> None:
    # The key of window w has the first two words of Philox4x32-10 at (w, 0, 2^32 - 1, 2^32 - 2).
    from permille.zo.philox import philox4x32_10

    low, high, _, _ = philox4x32_10((np.arange(16), 0, 0xFFFFFFFF, 0xFFFFFFFE), 9)
    keys = (high << np.uint64(32)) | low
    winners = sorted(np.argsort(keys)[:2].tolist())
    parts = ["".join(chr(300 + 10 * w + t) for t in range(3)) for w in range(16)]  # one window per text
    found = token_sequences(Letters(), parts, 2, 4, seed=9)
    assert [(row[1] - 300) // 10 for row in found.tolist()] == winners


def test_the_corpus_is_read_no_further_than_the_pool() -> None:
    asked = 0

    def endless() -> Iterator[str]:
        nonlocal asked
        while True:
            asked += 1
            yield "x" * 9

    token_sequences(Letters(), endless(), 3, 10, seed=0)
    assert asked == POOL * 3


def test_skip_gives_sequences_that_share_no_window() -> None:
    parts = texts(4000)
    first = token_sequences(Letters(), parts, 5, 10, seed=0)
    second = token_sequences(Letters(), parts, 5, 10, seed=0, skip=POOL * 5)
    assert not {tuple(row) for row in first.tolist()} & {tuple(row) for row in second.tolist()}


def test_a_corpus_that_is_too_small_is_refused_with_what_it_holds() -> None:
    with pytest.raises(InputError, match="has 10 sequences of 10 tokens, but 20 are needed") as few:
        token_sequences(Letters(), texts(100), 20, 10, seed=0)
    assert "Add text to the corpus, or ask for fewer or shorter sequences" in str(few.value)
    with pytest.raises(InputError, match="has 0 sequences"):
        token_sequences(Letters(), [], 1, 10, seed=0)


@pytest.mark.parametrize(
    ("n", "length", "seed", "skip"),
    [(0, 8, 0, 0), (1, 1, 0, 0), (1, 8, -1, 0), (1, 8, 1 << 64, 0), (1, 8, 0, -1)],
)
def test_numbers_out_of_range_are_refused(n: int, length: int, seed: int, skip: int) -> None:
    with pytest.raises(InputError, match="expected n >= 1"):
        token_sequences(Letters(), texts(100), n, length, seed, skip=skip)


class BegunLetters(Letters):
    """The same tokenizer of a model that reads a 1 before every text."""

    bos = (1,)


def test_windows_of_a_model_with_bos_begin_with_it_and_hold_one_text_each() -> None:
    parts = texts(300, 20)  # each gives two windows of 1 + 7 letters, and a rest of 6
    found = token_sequences(BegunLetters(), parts, 30, 8, seed=0)
    assert found.tolist() == [[1, *map(ord, part[start : start + 7])] for part in parts for start in (0, 7)]


def test_texts_that_are_shorter_than_a_window_are_named_as_the_reason_for_a_model_with_bos() -> None:
    with pytest.raises(InputError, match="0 sequences of 32 tokens, each within one text"):
        token_sequences(BegunLetters(), texts(3000, 20), 2, 32, seed=0)
    assert len(token_sequences(Letters(), texts(3000, 20), 2, 32, seed=0)) == 2
