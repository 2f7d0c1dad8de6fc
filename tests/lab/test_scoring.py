"""Tests of candidates' scores, against losses computed by hand."""

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.errors import InputError
from permille.zo.estimators import Batch
from permille_lab.tasks.examples import Example
from permille_lab.tasks.scoring import encode_example, mean_losses, score, training_batch


def encode(text: str) -> list[int]:
    """Return one token per letter, except that "Ye" is one token."""
    ids: list[int] = []
    for letter in text:
        if ids and letter == "e" and ids[-1] == ord("Y"):
            ids[-1] = 500
        else:
            ids.append(ord(letter))
    return ids


def made(prompt: str = "Q", candidates: tuple[str, ...] = ("Yes", "No"), label: int = 0) -> Example:
    return Example(prompt=prompt, candidates=candidates, label=label, group="g", name="f:1")


def by_id(batch: Batch) -> NDArray[np.float32]:
    """Return losses that depend only on the targets' ids."""
    return (batch.input_ids_BT[batch.target_BT] % 7).astype(np.float32)


def test_targets_are_the_candidates_tokens() -> None:
    choices = encode_example(made(), encode, begin=1, max_tokens=16)
    assert [answer.ids for answer in choices.answers] == [(1, 81, 500, 115), (1, 81, 78, 111)]
    assert [answer.targets for answer in choices.answers] == [2, 2]
    batch = training_batch([choices])
    assert batch.target_BT.tolist() == [[False, False, True, True]]


def test_a_candidate_that_merges_with_the_prompt_counts_the_merged_token() -> None:
    choices = encode_example(made(prompt="QY", candidates=("e", "o")), encode, begin=None, max_tokens=16)
    assert [answer.ids for answer in choices.answers] == [(81, 500), (81, 89, 111)]
    assert [answer.targets for answer in choices.answers] == [1, 1]


def test_a_long_prompt_loses_its_front() -> None:
    choices = encode_example(made(prompt="abcdefgh"), encode, begin=1, max_tokens=6)
    assert choices.answers[1].ids == (1, ord("f"), ord("g"), ord("h"), ord("N"), ord("o"))
    with pytest.raises(InputError, match="1 to 1 tokens in candidate 'Yes' of f:1"):
        encode_example(made(), encode, begin=1, max_tokens=3)


def test_all_candidates_stand_after_the_same_tokens() -> None:
    choices = encode_example(made(prompt="abcdefgh", candidates=("x", "uvw")), encode, begin=1, max_tokens=6)
    assert [answer.ids[:3] for answer in choices.answers] == [(1, ord("g"), ord("h"))] * 2
    assert choices.cut == 6


def test_demonstrations_that_do_not_fit_are_left_out_whole() -> None:
    for room, shown in ((16, "D\nE\n"), (7, "D\nE\n"), (6, "E\n"), (5, "E\n"), (4, "")):
        choices = encode_example(made(), encode, begin=None, max_tokens=room, demonstrations=("D\n", "E\n"))
        assert choices.answers[1].ids == tuple(map(ord, shown + "QNo"))
        assert (choices.shots, choices.cut) == (len(shown) // 2, 0)


def document(text: str, prompt: str = "") -> Example:
    return Example(prompt=prompt, candidates=(text,), label=0, group="g", name="f:1", document=True)


def test_a_document_is_learned_whole_and_loses_its_end() -> None:
    begun = encode_example(document("abcd"), encode, begin=1, max_tokens=16)
    assert (begun.answers[0].ids, begun.answers[0].targets) == ((1, 97, 98, 99, 100), 4)
    bare = encode_example(document("abcd"), encode, begin=None, max_tokens=16)
    assert (bare.answers[0].ids, bare.answers[0].targets) == ((97, 98, 99, 100), 3)
    assert training_batch([bare]).target_BT.tolist() == [[False, True, True, True]]
    short = encode_example(document("abcd"), encode, begin=1, max_tokens=4)
    assert (short.answers[0].ids, short.answers[0].targets, short.cut) == ((1, 97, 98, 99), 3, 1)
    with pytest.raises(InputError, match="expected a token to predict in f:1, got 1 tokens"):
        encode_example(document("a"), encode, begin=None, max_tokens=16)


def test_what_follows_a_prompt_keeps_a_quarter_of_the_row_of_it() -> None:
    """Encode ten prompt tokens and twenty targets in rows of 8 to 32 tokens."""
    text = document("b" * 20, "0123456789")
    for room, prompt, targets in (
        (32, "0123456789", 20),
        (24, "456789", 18),
        (20, "56789", 15),
        (8, "89", 6),
    ):
        (answer,) = encode_example(text, encode, begin=None, max_tokens=room).answers
        assert (answer.ids, answer.targets) == (tuple(map(ord, prompt + "b" * targets)), targets)


@pytest.mark.parametrize("begin", [1, None])
def test_the_same_tokens_of_a_document_are_scored_whatever_stands_before_it(begin: int | None) -> None:
    (plain,) = encode_example(document("Yes"), encode, begin=begin, max_tokens=16).answers
    for demonstrations, shots in ((("D\n",), 1), (("D\n", "Y"), 2), (("D" * 20, "D\n"), 1)):
        found = encode_example(
            document("Yes"), encode, begin=begin, max_tokens=16, demonstrations=demonstrations
        )
        (answer,) = found.answers
        assert found.shots == shots
        assert answer.targets == plain.targets
        assert answer.ids[-2:] == plain.ids[-2:] == (500, ord("s"))


def test_a_long_document_is_not_read_through() -> None:
    read: list[int] = []

    def counted(text: str) -> list[int]:
        read.append(len(text))
        return encode(text)

    encode_example(document("b" * 100_000, "a" * 100_000), counted, begin=None, max_tokens=8)
    assert max(read) <= 2 * 64 * 8


def test_losses_of_examples_are_means_over_their_own_tokens() -> None:
    items = [
        encode_example(item, encode, begin=1, max_tokens=64) for item in (made(), made(candidates=("x",)))
    ]
    got = mean_losses(by_id(training_batch(items)), items)
    assert got.tolist() == [(500 % 7 + 115 % 7) / 2, ord("x") % 7]


@pytest.mark.parametrize("tokens", [1, 8, 4096])
def test_scores_are_means_over_the_candidates_own_tokens(tokens: int) -> None:
    examples = [
        made(),
        made(label=1),
        made(prompt="a longer one", candidates=("x", "yz")),
        made(candidates=("No", "No")),
    ]
    items = [encode_example(item, encode, begin=1, max_tokens=64) for item in examples]
    got = score(by_id, items, max_batch_tokens=tokens)
    yes, no = (500 % 7 + 115 % 7) / 2, (78 % 7 + 111 % 7) / 2
    assert got.loss_N.tolist() == [yes, no, ord("x") % 7, no]
    # Of equal scores, the first wins.
    assert got.correct_N.tolist() == [yes < no, no < yes, ord("x") % 7 <= (121 % 7 + 122 % 7) / 2, True]
    assert got.accuracy == np.mean(got.correct_N)


def test_losses_that_are_not_finite_are_refused() -> None:
    item = encode_example(made(), encode, begin=1, max_tokens=64)
    with pytest.raises(InputError, match="got 2 that are not"):
        score(lambda batch: np.full(int(batch.target_BT.sum()), np.nan, np.float32), [item])
    with pytest.raises(InputError, match="got none"):
        score(by_id, [])
