"""Dividing documents: by hash and group, whatever the order; refused where there is too little."""

import hashlib

import pytest

from permille.errors import InputError
from permille_agent.text import preparation as rules
from permille_agent.text.preparation import Split, assign, count, position


def _groups(number: int) -> list[str]:
    return [hashlib.sha256(str(index).encode()).hexdigest() for index in range(number)]


def test_the_parts_have_their_shares_of_the_tokens() -> None:
    tokens = [20 + index % 60 for index in range(700)]

    counts = count(assign(_groups(700), tokens, seed=3), tokens)

    total = sum(tokens)
    assert 0.2 * total <= counts[Split.TEST].tokens < 0.2 * total + 80
    assert 0.1 * total <= counts[Split.SELECT].tokens < 0.1 * total + 80


def test_large_texts_do_not_make_large_evaluations() -> None:
    counts = count(assign(_groups(3000), [1000] * 3000, seed=0), [1000] * 3000)

    assert counts[Split.TEST].tokens == rules.MAX_TEST_TOKENS
    assert counts[Split.SELECT].tokens == rules.MAX_SELECT_TOKENS


def test_the_order_of_documents_does_not_matter() -> None:
    groups = _groups(200)
    forward = dict(zip(groups, assign(groups, [60] * 200, seed=1), strict=True))

    backward = dict(zip(groups[::-1], assign(groups[::-1], [60] * 200, seed=1), strict=True))

    assert forward == backward


def test_added_text_moves_few_documents_and_none_from_training_far_into_the_test_part() -> None:
    groups = _groups(440)
    before = assign(groups[:400], [100] * 400, seed=0)

    after = assign(groups, [100] * 440, seed=0)[:400]

    assert sum(a is not b for a, b in zip(before, after, strict=True)) < 20


def test_documents_of_one_group_stay_together() -> None:
    groups = [group for group in _groups(200) for _ in range(3)]

    assigned = assign(groups, [50] * 600, seed=1)

    assert all(len(set(assigned[start : start + 3])) == 1 for start in range(0, 600, 3))


def test_the_seed_decides() -> None:
    groups = _groups(300)
    assert assign(groups, [100] * 300, seed=0) == assign(groups, [100] * 300, seed=0)
    assert assign(groups, [100] * 300, seed=0) != assign(groups, [100] * 300, seed=1)


@pytest.mark.parametrize("seed", range(20))
def test_little_text_is_enough_whatever_the_seed(seed: int) -> None:
    tokens = [260] * 22

    counts = count(assign(_groups(22), tokens, seed=seed), tokens)

    assert counts[Split.TEST].tokens >= rules.MIN_TEST_TOKENS
    assert counts[Split.TEST].documents >= rules.MIN_TEST_GROUPS
    assert counts[Split.SELECT].tokens >= rules.MIN_SELECT_TOKENS
    assert counts[Split.TRAIN].tokens >= rules.MIN_TRAIN_TOKENS


def test_refuses_too_little_with_what_is_needed_and_what_came() -> None:
    with pytest.raises(InputError) as refusal:
        assign(_groups(30), [40] * 30, seed=0)

    message = str(refusal.value)
    assert "expected at least 4800 tokens" in message
    assert "2000 held-out ones" in message
    assert "got 1200 tokens in 30 documents" in message


@pytest.mark.parametrize(("number", "tokens"), [(0, 0), (6, 5000), (9, 600), (1, 100_000)])
def test_refuses_parts_that_are_too_small(number: int, tokens: int) -> None:
    with pytest.raises(InputError, match=f"got {number * tokens} tokens in {number} documents"):
        assign(_groups(number), [tokens] * number, seed=0)


def test_one_group_is_one_document_however_many_rows_it_has() -> None:
    with pytest.raises(InputError, match="in 3 documents"):
        assign(_groups(3) * 30, [200] * 90, seed=0)


def test_positions_are_pinned() -> None:
    digest = hashlib.sha256(b"permille-split-1\x007\x00abc").hexdigest()
    assert position("abc", 7) == int(digest[:12], 16) / 2**48
