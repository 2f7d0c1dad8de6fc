"""Tests of the bytes of tokens, against the texts of a byte-level tokenizer's tokens."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from permille.token_bytes import token_bytes
from permille_lab.evaluate.cell_data import CellData, Encoder
from permille_lab.tasks.examples import BadRow, Example
from permille_lab.tasks.splits import Splits

MODEL = Path(__file__).parents[2] / "examples" / "model"


def document(text: str, prompt: str = "") -> Example:
    return Example(name=text[:9], group=text, prompt=prompt, candidates=(text,), label=0, document=True)


def data_of(documents: list[Example], max_tokens: int, bad: list[BadRow]) -> CellData:
    return CellData(
        Splits(train=(), validation=(), test=tuple(documents)),
        Encoder(MODEL),
        seed=0,
        shots=0,
        batch_size=1,
        max_tokens=max_tokens,
        unfit=bad.append,
    )


def test_every_byte_is_one_tokens() -> None:
    text = "Plain wörds,  two blanks\nand 漢字 🙂🙂 to the end"
    encoding = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(text, add_special_tokens=False)
    ends_T = np.array([end for _, end in encoding.offsets])
    found_T = token_bytes(text, ends_T)
    assert found_T.sum() == len(text.encode())
    assert (found_T >= 0).all()
    # Here, a token's text has one letter per byte. The bytes of a split character belong to its first token.
    written_T = np.array([len(token) for token in encoding.tokens])
    alone_T = np.diff(ends_T, prepend=0) > 0
    assert (found_T[alone_T] >= written_T[alone_T]).all()
    assert (found_T[~alone_T] == 0).all()
    assert token_bytes(text, np.array([0, 5, 0, 5])).tolist() == [0, 5, 0, 0]
    assert token_bytes("", np.array([], dtype=np.int64)).tolist() == []


@pytest.mark.parametrize("max_tokens", [7, 16, 31, 500])
@pytest.mark.parametrize("prompt", ["", "What 漢字 says: "])
def test_documents_that_are_cut_count_what_was_scored(max_tokens: int, prompt: str) -> None:
    texts = ["漢字かな交じり文" * 8, "wörter äöü " * 9, "short", "🙂" * 12]
    bad: list[BadRow] = []
    data = data_of([document(text, prompt) for text in texts], max_tokens, bad)
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    written = 0
    for choices in data.test:
        (answer,) = choices.answers
        written += sum(len(str(tokenizer.id_to_token(token))) for token in answer.ids[-answer.targets :])
    assert not bad
    assert abs(data.test_bytes - written) <= 2 * 3 * len(texts)  # one character at either end of each text
    assert written > 20


def test_what_begins_inside_a_character_stands_for_no_byte() -> None:
    """No token precedes the text. Of a character in several tokens, the first token is not a target."""
    bad: list[BadRow] = []
    data = data_of([document("漢")], 16, bad)
    assert len(data.test) == 1
    assert data.test_bytes == 0
