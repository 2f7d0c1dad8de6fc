"""From documents to rows: complete, divided, named by a digest, bad conversations counted."""

import json

import pytest

from permille.errors import PackageError
from permille_agent.text.documents import Conversation, Document, PlainText
from permille_agent.text.preparation import Split, prepare, tokenize
from permille_agent.text.reading import DataReport
from permille_agent.text.rows import target_count
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

    prepared = prepare(documents, _tokenizer(), seed=0, row_tokens=64)

    for split, rows in (
        (Split.TRAIN, prepared.train),
        (Split.SELECT, prepared.select),
        (Split.TEST, prepared.test),
    ):
        assert target_count(rows) == prepared.counts[split].tokens
    assert sum(count.documents for count in prepared.counts.values()) == 500
    assert len(prepared.test_documents) == prepared.counts[Split.TEST].documents
    assert max(int(row.document_T.max()) for row in prepared.test) == len(prepared.test_documents) - 1
    again = prepare(documents, _tokenizer(), seed=0, row_tokens=64)
    assert again.digest == prepared.digest
    assert prepare(documents, _tokenizer(), seed=1, row_tokens=64).digest != prepared.digest
    assert prepare(documents, _tokenizer(), seed=0, row_tokens=32).digest != prepared.digest


def _talk(user: str, assistant: str = "the river") -> Document:
    return Document(user, Conversation((("user", user), ("assistant", assistant))))


def test_conversations_that_cannot_be_shown_are_counted_without_their_text() -> None:
    refusing = "{% if 'secret' in messages[0].content %}{{ raise_exception(messages[0].content) }}{% endif %}"
    refusing += "{% for m in messages %}{{ m.content }}|{% endfor %}"
    report = DataReport()
    documents = [_talk("fine"), _talk("my secret"), _talk("a </s> b"), Document("x", PlainText("y"))]

    known, tokens = tokenize(documents, _tokenizer(refusing), report, row_tokens=32)

    assert [document.group for document in known] == ["fine"]
    assert len(tokens) == 1
    assert dict(report.bad_rows) == {
        "refused by the chat template": 1,
        "a message contains a special token of the model": 1,
        "no token that counts": 1,
    }
    assert "secret" not in " ".join(report.examples)


def test_a_template_that_breaks_its_limits_ends_the_preparation() -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(PackageError, match="chat-template-limit: expected the template to render within 5 s"):
        tokenize([_talk("hi")], _tokenizer(endless), DataReport(), row_tokens=32)
