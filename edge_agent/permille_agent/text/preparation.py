"""From documents to the three sets of rows of a run: to train, to select the state, to judge the result.

The rows are a pure function of (documents, tokenizer, row length); their digest names what a run reads.

Groups of documents stand in an order that their hash decides, the same in every run: text that judged one run
trains none. The test split is taken from the
front of it, the select split from the back, each as large as it has to be; the rest trains. So nothing
depends on the order of files, and added text moves few documents, those near a boundary. The test split must
hold `MIN_TEST_TOKENS` target tokens of `MIN_TEST_GROUPS` groups, or a difference between two models is luck.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from permille.errors import InputError, PackageError
from permille_agent.text.documents import Document
from permille_agent.text.reading import DataReport
from permille_agent.text.rows import Row, document_rows, packed_rows, rows_digest
from permille_agent.text.tokens import TextTokenizer, TokenizedDocument

TEST_SHARE = 0.2
SELECT_SHARE = 0.1
MIN_TEST_TOKENS = 2_600
MIN_TEST_GROUPS = 8
MIN_SELECT_TOKENS = 800
MIN_TRAIN_TOKENS = 2_000
# More would make evaluations slower and hardly surer.
MAX_TEST_TOKENS = 20_000
MAX_SELECT_TOKENS = 4_000


class Split(StrEnum):
    """What a document is for."""

    TRAIN = "train"
    SELECT = "select"
    TEST = "test"


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCount:
    """Target tokens and documents of one split."""

    tokens: int
    documents: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The rows of one run.

    Attributes:
        train: packed rows.
        select: rows of single documents, for choosing the state.
        test: rows of single documents, read once, at the end; `document_T` indexes `test_documents`.
        test_documents: the documents behind `test`, so that another package can be judged on the same text.
        counts: target tokens and documents of each split.
        digest: of all rows.
    """

    train: list[Row]
    select: list[Row]
    test: list[Row]
    test_documents: list[Document]
    counts: dict[Split, SplitCount]
    digest: str


def prepare(
    documents: Sequence[Document],
    tokenizer: TextTokenizer,
    *,
    row_tokens: int,
    report: DataReport | None = None,
) -> Prepared:
    """Tokenize, divide and pack `documents`; what cannot be tokenized is counted in `report`.

    Args:
        documents: of one user.
        tokenizer: of the package that is trained.
        row_tokens: longest row.
        report: where to count; None does not count.

    Raises:
        InputError: too little text.
        PackageError: the chat template breaks a limit.
    """
    known, tokenized = tokenize(documents, tokenizer, report, row_tokens=row_tokens)
    splits = assign([d.group for d in known], [t.targets for t in tokenized])
    parts = {split: [i for i in range(len(known)) if splits[i] is split] for split in Split}
    train = packed_rows([tokenized[i] for i in parts[Split.TRAIN]], row_tokens)
    select = document_rows([tokenized[i] for i in parts[Split.SELECT]], row_tokens)
    test = document_rows([tokenized[i] for i in parts[Split.TEST]], row_tokens)
    return Prepared(
        train=train,
        select=select,
        test=test,
        test_documents=[known[i] for i in parts[Split.TEST]],
        counts=count(splits, [t.targets for t in tokenized]),
        digest=rows_digest([train, select, test]),
    )


def tokenize(
    documents: Iterable[Document],
    tokenizer: TextTokenizer,
    report: DataReport | None = None,
    *,
    row_tokens: int,
) -> tuple[list[Document], list[TokenizedDocument]]:
    """Tokenize the documents that can be shown to the model; the others are counted in `report`.

    Raises:
        PackageError: the chat template breaks a limit.
    """
    report = report or DataReport()
    known = []
    tokenized = []
    with tokenizer.chat_template() as template:
        for document in documents:
            try:
                tokens = tokenizer.tokenize(document.content, template, row_tokens=row_tokens)
            except InputError as exc:
                report.bad("conversation", str(exc))
                report.read -= 1
                continue
            except PackageError as exc:
                if exc.code == "chat-template-limit":
                    raise
                report.bad("conversation", "refused by the chat template")
                report.read -= 1
                continue
            if tokens.targets:
                known.append(document)
                tokenized.append(tokens)
            else:
                report.bad("document", "no token that counts")
    return known, tokenized


def position(group: str) -> float:
    """Place `group` in [0, 1), uniformly."""
    digest = hashlib.sha256(f"permille-split-1\0{group}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def assign(groups: Sequence[str], target_tokens: Sequence[int]) -> list[Split]:
    """Decide the split of each document.

    Args:
        groups: the group of each document.
        target_tokens: how many of each document's tokens count in the loss.

    Raises:
        InputError: too little text; the message says how much is needed and how much came.
    """
    tokens: dict[str, int] = defaultdict(int)
    for group, number in zip(groups, target_tokens, strict=True):
        tokens[group] += number
    order = sorted(tokens, key=lambda group: (position(group), group))
    total = sum(tokens.values())
    test = _taken(
        order, tokens, _wanted(TEST_SHARE, total, MIN_TEST_TOKENS, MAX_TEST_TOKENS), MIN_TEST_GROUPS
    )
    rest = order[len(test) :]
    wanted = _wanted(SELECT_SHARE, total, MIN_SELECT_TOKENS, MAX_SELECT_TOKENS)
    select = _taken(reversed(rest), tokens, wanted, 1)
    split_of = dict.fromkeys(rest, Split.TRAIN) | dict.fromkeys(test, Split.TEST)
    split_of |= dict.fromkeys(select, Split.SELECT)
    splits = [split_of[group] for group in groups]
    counts = count(splits, target_tokens)
    if (
        counts[Split.TEST].tokens < MIN_TEST_TOKENS
        or len(test) < MIN_TEST_GROUPS
        or counts[Split.SELECT].tokens < MIN_SELECT_TOKENS
        or counts[Split.TRAIN].tokens < MIN_TRAIN_TOKENS
    ):
        raise InputError(_too_little(counts, total, len(order)))
    return splits


def count(splits: Sequence[Split], target_tokens: Sequence[int]) -> dict[Split, SplitCount]:
    """Count target tokens and documents by split."""
    result = {}
    for wanted in Split:
        tokens = [n for split, n in zip(splits, target_tokens, strict=True) if split is wanted]
        result[wanted] = SplitCount(tokens=sum(tokens), documents=len(tokens))
    return result


def _wanted(share: float, total: int, least: int, most: int) -> int:
    return min(most, max(least, int(share * total)))


def _taken(order: Iterable[str], tokens: dict[str, int], wanted: int, least_groups: int) -> list[str]:
    """The first groups of `order` that hold as many tokens as wanted, and are as many as needed."""
    taken: list[str] = []
    have = 0
    for group in order:
        if have >= wanted and len(taken) >= least_groups:
            break
        taken.append(group)
        have += tokens[group]
    return taken


def _too_little(counts: dict[Split, SplitCount], total: int, groups: int) -> str:
    needed = MIN_TEST_TOKENS + MIN_SELECT_TOKENS + MIN_TRAIN_TOKENS
    return (
        f"expected at least {needed} tokens of text that count ({MIN_TEST_TOKENS} held-out ones in "
        f"{MIN_TEST_GROUPS} or more documents to judge the result, {MIN_SELECT_TOKENS} to select the state, "
        f"{MIN_TRAIN_TOKENS} to train; somewhat more where documents are long, they are not divided), got "
        f"{total} tokens in {groups} documents, which leaves {counts[Split.TEST].tokens}, "
        f"{counts[Split.SELECT].tokens} and {counts[Split.TRAIN].tokens}"
    )
