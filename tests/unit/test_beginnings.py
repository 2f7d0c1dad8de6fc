"""Tests of the beginning of a text, and of rows that begin as a text in use does."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from permille.beginnings import beginning, begun, row_spans
from permille.errors import InputError
from permille.tokenizer_files import TokenizerFiles


def _files(bos: str | None, *, add_bos: bool) -> TokenizerFiles:
    special = {} if bos is None else {"bos": bos}
    return TokenizerFiles(special=special, add_bos=add_bos, template=None, stop_ids=())


@pytest.mark.parametrize(
    ("bos", "add_bos", "begins", "ids", "found"),
    [
        ("<s>", False, [], [1], ()),  # the model knows a BOS and does not use it: SmolLM2
        ("<s>", True, [], [1], (1,)),  # the program adds it
        ("<s>", False, [1], [1], (1,)),  # the tokenizer adds it: Gemma
        ("<s>", True, [1], [1], (1,)),
        ("<s>", True, [7, 8], [1], (7, 8)),  # the tokenizer's own beginning: GLM
        (None, True, [], [None], ()),
        ("<s>", True, [], [None], ()),  # not a token of the vocabulary
        (None, False, [5], [None], (5,)),
    ],
)
def test_a_text_begins_with_what_the_tokenizer_or_its_configuration_adds(
    bos: str | None, add_bos: bool, begins: list[int], ids: list[int | None], found: tuple[int, ...]
) -> None:
    assert beginning(_files(bos, add_bos=add_bos), {"ids": ids, "begins": begins}) == found


@pytest.mark.parametrize("begins", [[1] * 5, [-1], [True], ["<s>"]])
def test_a_tokenizer_that_begins_a_text_with_anything_else_is_refused(begins: list[Any]) -> None:
    with pytest.raises(InputError, match="before a text"):
        beginning(_files("<s>", add_bos=False), {"ids": [1], "begins": begins})


def test_a_row_without_room_after_bos_is_refused() -> None:
    with pytest.raises(InputError, match="no room"):
        list(row_spans(10, 2, (1, 1)))


def test_bos_is_never_doubled() -> None:
    assert begun(begun([5, 6], (2,)), (2,)) == [2, 5, 6]
    assert begun([], (2,)) == [2]


@given(st.integers(0, 300), st.integers(2, 40), st.sampled_from([(), (1,)]))
def test_every_token_is_new_in_exactly_one_row_and_no_row_is_too_long(
    tokens: int, row_tokens: int, bos: tuple[int, ...]
) -> None:
    spans = list(row_spans(tokens, row_tokens, bos))
    assert [place for _, first, last in spans for place in range(first, last)] == list(range(tokens))
    assert all(len(bos) + last - context <= row_tokens for context, _, last in spans)
    assert all(0 <= context <= first < last for context, first, last in spans)
    if not bos:
        assert all(context == first for context, first, _ in spans)


def test_a_row_inside_a_document_has_a_quarter_of_context_after_bos() -> None:
    assert list(row_spans(200, 129, (2,))) == [(0, 0, 128), (96, 128, 200)]
