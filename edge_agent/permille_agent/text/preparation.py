"""From documents to the three sets of rows of one run, under one package's tokenizer.

A pure function of (documents, tokenizer, seed, row length): its digest names what a run reads.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from permille.errors import InputError, PackageError
from permille_agent.text.documents import Document
from permille_agent.text.reading import DataReport
from permille_agent.text.rows import Row, document_rows, packed_rows, rows_digest
from permille_agent.text.splits import Split, SplitCount, assign, count
from permille_agent.text.tokens import TextTokenizer, TokenizedDocument


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
    seed: int,
    row_tokens: int,
    report: DataReport | None = None,
) -> Prepared:
    """Tokenize, divide and pack `documents`; what cannot be tokenized is counted in `report`.

    Args:
        documents: of one user.
        tokenizer: of the package that is trained.
        seed: decides which documents train and which are held out.
        row_tokens: longest row.
        report: where to count; None does not count.

    Raises:
        InputError: too little text.
        PackageError: the chat template breaks a limit.
    """
    known, tokenized = tokenize(documents, tokenizer, report or DataReport(), row_tokens=row_tokens)
    splits = assign([d.group for d in known], [t.targets for t in tokenized], seed)
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
    documents: Iterable[Document], tokenizer: TextTokenizer, report: DataReport, *, row_tokens: int
) -> tuple[list[Document], list[TokenizedDocument]]:
    """The documents that can be shown to the model, and their tokens.

    Raises:
        PackageError: the chat template breaks a limit.
    """
    known = []
    tokenized = []
    with tokenizer.chat_template() as template:
        for document in documents:
            try:
                tokens = tokenizer.tokenize(document.content, template, row_tokens=row_tokens)
            except InputError as exc:
                report.bad("conversation", str(exc))
                continue
            except PackageError as exc:
                if exc.code == "chat-template-limit":
                    raise
                report.bad("conversation", "refused by the chat template")
                continue
            if tokens.targets:
                known.append(document)
                tokenized.append(tokens)
            else:
                report.bad("document", "no token that counts")
    return known, tokenized
