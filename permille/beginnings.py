"""The tokens that a model reads before every text in use: BOS, or none.

`llama.cpp`, Ollama and transformers put BOS before a text if the tokenizer asks for it. A model that was
trained with BOS predicts a text without it badly. So every row of tokens begins as a text in use does:

    bos = beginning(files, answer)        # (2,) for Gemma, () for SmolLM2
    for context, first, last in row_spans(300, 128, bos):
        ids_T = [*bos, *document[context:last]]     # the tokens `first:last` count in the loss

- A row has tokens of one document, because in use no text follows another one's BOS.
- A row that begins inside a document has some of the tokens before it as context, which does not count in the
  loss. In use, too, a token follows the text before it.
- Models without BOS have no context, and several documents may share a row.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from permille.errors import InputError
from permille.tokenizer_files import TokenizerFiles

MOST_TOKENS = 4
CONTEXT_SHARE = 4
"""A row that begins inside a document has one token of context for this number of its tokens."""


def beginning(files: TokenizerFiles, loaded: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens that a model reads before every text.

    Args:
        files: the files beside the tokenizer.
        loaded: the answer of `Sandbox.start` for this tokenizer. The first of its tokens is `bos`.

    Raises:
        InputError: there are too many of them.
    """
    begins, bos = tuple(loaded["begins"]), loaded["ids"][0]
    # The answer comes from a process that runs foreign data.
    if len(begins) > MOST_TOKENS or not all(type(token) is int and token >= 0 for token in begins):
        raise InputError(f"The tokenizer puts {len(begins)} tokens before a text, more than {MOST_TOKENS}.")
    # Some tokenizers leave BOS to the program, and ask for it in `tokenizer_config.json`.
    return (bos,) if not begins and files.add_bos and files.special.get("bos") and bos is not None else begins


def begun(ids: Sequence[int], bos: tuple[int, ...]) -> list[int]:
    """Return the ids of a text with BOS, once.

    Example:
        >>> begun([5, 6], (2,)), begun([2, 5, 6], (2,)), begun([5, 6], ())
        ([2, 5, 6], [2, 5, 6], [5, 6])
    """
    return list(ids) if tuple(ids[: len(bos)]) == bos else [*bos, *ids]


def row_spans(tokens: int, row_tokens: int, bos: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Cut a document into rows. Yield (context, first, last) for each row.

    The row is `bos` and the tokens `context:last` of the document, at most `row_tokens` together. The tokens
    `first:last` are in no other row. The tokens `context:first` were in the row before it.

    Args:
        tokens: the number of tokens of the document, without BOS.
        row_tokens: the length of the longest row.
        bos: the beginning of a text.

    Raises:
        InputError: a row has no room for a token after `bos`.

    Example:
        >>> list(row_spans(10, 4, ())), list(row_spans(10, 5, (2,)))
        ([(0, 0, 4), (4, 4, 8), (8, 8, 10)], [(0, 0, 4), (3, 4, 7), (6, 7, 10)])
    """
    room = row_tokens - len(bos)
    if room < 1:
        raise InputError(f"A row of {row_tokens} tokens has no room after the beginning of a text, {bos}.")
    context = room // CONTEXT_SHARE if bos else 0
    first = 0
    while first < tokens:
        before = min(first, context)
        last = min(tokens, first - before + room)
        yield first - before, first, last
        first = last
