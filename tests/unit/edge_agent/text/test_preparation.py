"""Tests of turning documents into rows: splits, digests, and counts of unusable conversations."""

import hashlib
import itertools
import json
from dataclasses import replace

import pytest

from permille.errors import InputError, PackageError
from permille_agent.text.documents import Completion, Conversation, Document, PlainText
from permille_agent.text.preparation import (
    GUARD_TOKENS,
    MAX_SELECT_TOKENS,
    MAX_TEST_TOKENS,
    MIN_SELECT_TOKENS,
    MIN_TEST_GROUPS,
    MIN_TEST_TOKENS,
    MIN_TRAIN_TOKENS,
    Split,
    assign,
    count,
    position,
    prepare,
    tokenize,
)
from permille_agent.text.report import DataReport
from permille_agent.text.tokens import TextTokenizer
from tests.packages import sentences, tiny_tokenizer


def _tokenizer(template: str | None = None) -> TextTokenizer:
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    files = {
        "tokenizer.json": tiny_tokenizer().to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }
    return TextTokenizer(files.get)


def _texts(count: int) -> list[Document]:
    return [Document(str(number), PlainText(text)) for number, text in enumerate(sentences(count))]


def test_every_target_is_in_one_split_and_the_digest_names_them() -> None:
    documents = _texts(500)
    prepared = prepare(documents, _tokenizer(), row_tokens=64)
    for split, rows in (
        (Split.TRAIN, prepared.train),
        (Split.SELECT, prepared.select),
        (Split.TEST, prepared.test),
    ):
        assert sum(row.target_T.sum() for row in rows) == prepared.counts[split].tokens
    assert sum(count.documents for count in prepared.counts.values()) == 500
    assert len(prepared.test_documents) == prepared.counts[Split.TEST].documents
    assert max(int(row.document_T.max()) for row in prepared.test) == len(prepared.test_documents) - 1
    again = prepare(documents, _tokenizer(), row_tokens=64)
    assert again.digest == prepared.digest
    assert prepare(documents, _tokenizer(), row_tokens=32).digest != prepared.digest


def _talk(user: str, assistant: str = "the river") -> Document:
    return Document(user, Conversation((("user", user), ("assistant", assistant))))


def test_conversations_that_cannot_be_shown_are_counted_without_their_text() -> None:
    refusing = "{% if 'secret' in messages[0].content %}{{ raise_exception(messages[0].content) }}{% endif %}"
    refusing += "{% for m in messages %}{{ m.content | replace('</s>', '') }}|{% endfor %}"
    report = DataReport()
    documents = [_talk("fine"), _talk("my secret"), _talk("a </s> b </s>"), Document("x", PlainText("y"))]
    known, tokens = tokenize(documents, _tokenizer(refusing), report, row_tokens=32)
    assert [document.group for document in known] == ["fine"]
    assert len(tokens) == 1
    assert dict(report.bad_rows) == {
        "refused by the chat template": 1,
        "a message contains the special token </s>, and the chat template changes this message": 1,
        "no token that counts in the loss": 1,
    }
    assert "secret" not in " ".join(report.examples)


def test_a_template_that_breaks_its_limits_ends_the_preparation() -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(PackageError, match="sandbox-limit"):
        tokenize([_talk("hi")], _tokenizer(endless), DataReport(), row_tokens=32)


def _groups(number: int) -> list[str]:
    return [hashlib.sha256(str(index).encode()).hexdigest() for index in range(number)]


def test_the_parts_have_their_shares_of_the_tokens() -> None:
    tokens = [20 + index % 60 for index in range(700)]
    counts = count(assign(_groups(700), tokens), tokens)
    total = sum(tokens)
    assert 0.15 * total <= counts[Split.TEST].tokens < 0.15 * total + 80
    assert 0.05 * total <= counts[Split.SELECT].tokens < 0.05 * total + 80
    assert counts[Split.TRAIN].tokens > 0.79 * total


def test_large_texts_do_not_make_large_evaluations() -> None:
    counts = count(assign(_groups(3000), [1000] * 3000), [1000] * 3000)
    assert counts[Split.TEST].tokens == MAX_TEST_TOKENS
    assert counts[Split.SELECT].tokens == MAX_SELECT_TOKENS


def test_the_order_of_documents_does_not_matter() -> None:
    groups = _groups(200)
    forward = dict(zip(groups, assign(groups, [60] * 200), strict=True))
    backward = dict(zip(groups[::-1], assign(groups[::-1], [60] * 200), strict=True))
    assert forward == backward


def test_added_text_moves_few_documents_and_none_from_training_far_into_the_test_part() -> None:
    groups = _groups(440)
    before = assign(groups[:400], [100] * 400)
    after = assign(groups, [100] * 440)[:400]
    assert sum(a is not b for a, b in zip(before, after, strict=True)) < 20


def test_documents_of_one_group_stay_together() -> None:
    groups = [group for group in _groups(200) for _ in range(3)]
    assigned = assign(groups, [50] * 600)
    assert all(len(set(assigned[start : start + 3])) == 1 for start in range(0, 600, 3))


def test_little_text_is_enough() -> None:
    tokens = [270] * 22
    counts = count(assign(_groups(22), tokens), tokens)
    assert counts[Split.TEST].tokens >= MIN_TEST_TOKENS
    assert counts[Split.TEST].documents >= MIN_TEST_GROUPS
    assert counts[Split.SELECT].tokens >= MIN_SELECT_TOKENS
    assert counts[Split.TRAIN].tokens >= MIN_TRAIN_TOKENS


def test_refuses_too_little_with_what_is_needed_and_what_came() -> None:
    with pytest.raises(InputError) as refusal:
        assign(_groups(30), [40] * 30)
    message = str(refusal.value)
    assert "needs 5400 tokens" in message
    assert "2000 in 5 or more documents for the test" in message
    assert "There is too little text: 1200 tokens in 30 documents." in message


@pytest.mark.parametrize(("number", "tokens"), [(0, 0), (6, 5000), (9, 600), (1, 100_000)])
def test_refuses_parts_that_are_too_small(number: int, tokens: int) -> None:
    with pytest.raises(InputError, match=f"too little text: {number * tokens} tokens in {number} document"):
        assign(_groups(number), [tokens] * number)


def test_one_group_is_one_document_however_many_rows_it_has() -> None:
    with pytest.raises(InputError, match="in 3 documents"):
        assign(_groups(3) * 30, [200] * 90)


def test_positions_are_pinned() -> None:
    digest = hashlib.sha256(b"permille-split-1\x00abc").hexdigest()
    assert position("abc") == int(digest[:12], 16) / 2**48


def test_training_text_that_touches_held_out_text_is_left_out() -> None:
    story = "\n\n".join(sentences(600))
    blocks = [story[start : start + 1500] for start in range(0, len(story), 1500)]
    documents = [Document(str(n), PlainText(block), n > 0) for n, block in enumerate(blocks)]
    apart = [replace(document, continues=False) for document in documents]
    tokenizer = _tokenizer()
    joined, free = (prepare(found, tokenizer, row_tokens=64) for found in (documents, apart))
    splits = assign([d.group for d in documents], [tokenizer.prompt(b).size - 1 for b in blocks])
    borders = sum(
        (first is Split.TRAIN) != (second is Split.TRAIN) for first, second in itertools.pairwise(splits)
    )
    assert borders > 5
    left_out = free.counts[Split.TRAIN].tokens - joined.counts[Split.TRAIN].tokens
    # A block with a cut start loses one more target: its first token has no context.
    assert GUARD_TOKENS * borders <= left_out <= (GUARD_TOKENS + 1) * borders
    assert joined.test_documents == [
        d for d, split in zip(documents, splits, strict=True) if split is Split.TEST
    ]
    assert joined.counts[Split.TEST] == free.counts[Split.TEST]


def test_a_first_part_that_the_guard_leaves_empty_is_refused() -> None:
    """Only the shortest document trains the first state, and it touches the text that judges this state."""
    first, second, third, fourth = sorted("abcd", key=lambda group: position(f"{group}\0{0}"))
    long, short = (Completion("Days.", " ".join(sentences(count))) for count in (30, 13))
    note = PlainText("The river and the day.")
    documents = [
        Document(second, long),
        Document(first, note, continues=True),
        Document(third, short),
        Document(fourth, short),
    ]
    with pytest.raises(InputError, match="and text in each part"):
        prepare(documents, _tokenizer(), row_tokens=64)
