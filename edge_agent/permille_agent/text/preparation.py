"""Splitting of documents into the rows of a run, which train the state, select it or judge it.

The rows are a pure function of the documents, the tokenizer and the row length.

Groups of documents are sorted by a hash, so the order is the same in every run:

- The test split is taken from the front, the select split from the back. The rest trains.
- The order of files has no effect. Added text moves only documents near a boundary to another split.
- Text that judges one run does not train another run, except for short texts and groups near a boundary.

With a small test split, the result of a comparison of two models would be random. So the test split must have
`MIN_TEST_TOKENS` target tokens in `MIN_TEST_GROUPS` groups.

If a text is too short for three splits, it is cut into passages. These are sorted by the same hash and
divided into `PARTS` parts. Each part after the first judges a state that was trained on the earlier parts
only. All parts train the final state.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from permille.errors import InputError, PackageError
from permille_agent.text.documents import Document
from permille_agent.text.reading import passages
from permille_agent.text.report import DataReport
from permille_agent.text.rows import Row, document_rows, packed_rows, rows_digest
from permille_agent.text.tokens import TextTokenizer, TokenizedDocument

TEST_SHARE = 0.15  # of all target tokens, within the bounds below
SELECT_SHARE = 0.05
MIN_TEST_TOKENS = 2_000
MIN_TEST_GROUPS = 5
MIN_SELECT_TOKENS = 400
MIN_TRAIN_TOKENS = 3_000
# Larger splits would make evaluations slower and hardly more certain.
MAX_TEST_TOKENS = 20_000
MAX_SELECT_TOKENS = 4_000
NEEDED_TOKENS = MIN_TEST_TOKENS + MIN_SELECT_TOKENS + MIN_TRAIN_TOKENS
LITTLE_TOKENS = 700  # smallest number of target tokens of a short text
REMEMBERED_TOKENS = 100  # smallest number of target tokens of a text of which only a memory is made
PARTS = 4
LITTLE_GROUP_TOKENS = 24
"""Target tokens per group when a short text is judged, so that 700 tokens give enough groups."""
MIN_LITTLE_GROUPS = 20
GUARD_TOKENS = 24
"""Tokens that are dropped from a training block where it touches a held-out block."""


class Split(StrEnum):
    """Purpose of a document in a run."""

    TRAIN = "train"
    SELECT = "select"
    TEST = "test"


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCount:
    """Target tokens and documents of one split."""

    tokens: int
    documents: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One part of a short text that judges a state, and the rows that train this state.

    Attributes:
        train: packed rows of all earlier parts.
        rows: place of the part's rows in `Prepared.test`.
        documents: place of the part's documents in `Prepared.test_documents`.
        read: the documents of all earlier parts, in the order of the text.
    """

    train: list[Row]
    rows: slice
    documents: slice
    read: tuple[TokenizedDocument, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The rows of one run.

    Attributes:
        train: packed rows. For a short text, these are the rows of all parts.
        select: rows of single documents that select the state. Empty for a short text.
        test: rows of single documents that judge the state. `document_T` indexes `test_documents`.
        test_documents: the documents of `test`, to judge another package on the same text.
        counts: number of target tokens and documents of each split.
        digest: digest of all rows.
        stages: one stage for each part of a short text after the first. Empty for other text.
        groups: groups of all documents, sorted.
        read: the documents of `train`, in the order of the text. A memory is made of them.
        separator: the tokens of an empty line, which separates documents in a memory.
    """

    train: list[Row]
    select: list[Row]
    test: list[Row]
    test_documents: list[Document]
    counts: dict[Split, SplitCount]
    digest: str
    stages: tuple[Stage, ...] = ()
    groups: tuple[str, ...] = ()
    read: tuple[TokenizedDocument, ...] = ()
    separator: tuple[int, ...] = ()


def prepare(
    documents: Sequence[Document],
    tokenizer: TextTokenizer,
    *,
    row_tokens: int,
    report: DataReport | None = None,
) -> Prepared:
    """Tokenize, split and pack the documents of one user.

    For example, with rows of 128 tokens:

        documents, report = read_documents([Path("notes")])
        prepared = prepare(documents, package_tokenizer(package), row_tokens=128, report=report)

    Args:
        documents: documents of one user.
        tokenizer: tokenizer of the package to train.
        row_tokens: length of the longest row.
        report: counts documents that cannot be tokenized.

    Raises:
        InputError: there is too little text.
        PackageError: the tokenizer or the chat template breaks a limit.
    """
    known, tokenized = tokenize(documents, tokenizer, report, row_tokens=row_tokens)
    tokens = [t.targets for t in tokenized]
    try:
        splits = assign([d.group for d in known], tokens)
    except InputError as exc:
        return _prepare_little(known, sum(tokens), tokenizer, row_tokens, str(exc))
    held_out = [split is not Split.TRAIN for split in splits]
    tokenized = _guarded(known, tokenized, held_out)
    parts = {split: [i for i in range(len(known)) if splits[i] is split] for split in Split}
    read = tuple(tokenized[i] for i in parts[Split.TRAIN])
    train = packed_rows(read, row_tokens)
    select = document_rows([tokenized[i] for i in parts[Split.SELECT]], row_tokens)
    test = document_rows([tokenized[i] for i in parts[Split.TEST]], row_tokens)
    return Prepared(
        train=train,
        select=select,
        test=test,
        test_documents=[known[i] for i in parts[Split.TEST]],
        counts=count(splits, [t.targets for t in tokenized]),
        digest=rows_digest([train, select, test]),
        groups=_groups(known),
        read=read,
        separator=tokenizer.separator(),
    )


def prepare_untested(documents: Sequence[Document], tokenizer: TextTokenizer, *, row_tokens: int) -> Prepared:
    """Tokenize a text that is too short for a test. A memory can still be made of it.

    Raises:
        InputError: there are fewer than `REMEMBERED_TOKENS` tokens.
        PackageError: the tokenizer or the chat template breaks a limit.
    """
    known, tokenized = tokenize(documents, tokenizer, row_tokens=row_tokens)
    counts = dict.fromkeys(Split, SplitCount(tokens=0, documents=0))
    total = sum(document.targets for document in tokenized)
    if total < REMEMBERED_TOKENS:
        raise InputError(
            f"A memory needs at least {REMEMBERED_TOKENS} tokens of text, got {total}. Add text."
        )
    return Prepared(
        train=[],
        select=[],
        test=[],
        test_documents=[],
        counts=counts | {Split.TRAIN: SplitCount(tokens=total, documents=len(known))},
        digest=rows_digest([document_rows(tokenized, row_tokens)]),
        groups=_groups(known),
        read=tuple(tokenized),
        separator=tokenizer.separator(),
    )


def _prepare_little(
    documents: Sequence[Document], total: int, tokenizer: TextTokenizer, row_tokens: int, too_little: str
) -> Prepared:
    """Divide a text that is too short for three splits. `too_little` is the error message of `assign`."""
    if total < LITTLE_TOKENS:
        raise InputError(
            f"There is too little text: {total} tokens in {_documents(len(documents))}, and at least "
            f"{LITTLE_TOKENS} are needed. With {NEEDED_TOKENS} or more, training works better."
        )
    pieces, units = _pieces(documents)
    known, tokenized = tokenize(pieces, tokenizer, row_tokens=row_tokens)
    unit_of = {id(piece): unit for piece, unit in zip(pieces, units, strict=True)}
    part_of = _parts([unit_of[id(piece)] for piece in known], [t.targets for t in tokenized])
    places = [[i for i, part in enumerate(part_of) if part == number] for number in range(PARTS)]
    least = (
        f"{too_little} A shorter text is tested in parts. This needs at least {MIN_LITTLE_GROUPS} pieces of "
        f"{LITTLE_GROUP_TOKENS} tokens in the last {PARTS - 1} of {PARTS} parts, and text in each part."
    )
    if not all(places):
        raise InputError(least)
    stages, test, judged = [], list[Row](), list[Document]()
    # The first part judges nothing, because there is no earlier text that could train a model for it.
    for number in range(1, PARTS):
        guarded = _guarded(known, tokenized, [part == number for part in part_of])
        # Train on earlier parts only, so that each state is judged on text that it has not seen.
        read = tuple(guarded[i] for i, part in enumerate(part_of) if part < number)
        before = packed_rows(read, row_tokens)
        rows = document_rows([tokenized[i] for i in places[number]], row_tokens, first=len(judged))
        stages.append(
            Stage(
                train=before,
                rows=slice(len(test), len(test) + len(rows)),
                documents=slice(len(judged), len(judged) + len(places[number])),
                read=read,
            )
        )
        test += rows
        judged += [known[i] for i in places[number]]
    train = packed_rows(tokenized, row_tokens)
    judged_tokens = [sum(int(row.target_T.sum()) for row in test[stage.rows]) for stage in stages]
    groups = sum(tokens // LITTLE_GROUP_TOKENS for tokens in judged_tokens)
    # The number of targets is known only now, because the first token of a row is not a target. The guard may
    # have left nothing of a first part with few tokens.
    if groups < MIN_LITTLE_GROUPS or not stages[0].train:
        raise InputError(least)
    return Prepared(
        train=train,
        select=[],
        test=test,
        test_documents=judged,
        counts={
            Split.TRAIN: SplitCount(tokens=sum(t.targets for t in tokenized), documents=len(known)),
            Split.SELECT: SplitCount(tokens=0, documents=0),
            Split.TEST: SplitCount(tokens=sum(judged_tokens), documents=len(judged)),
        },
        digest=rows_digest([train, *(stage.train for stage in stages), test]),
        stages=tuple(stages),
        groups=_groups(documents),
        read=tuple(tokenized),
        separator=tokenizer.separator(),
    )


def tokenize(
    documents: Iterable[Document],
    tokenizer: TextTokenizer,
    report: DataReport | None = None,
    *,
    row_tokens: int,
) -> tuple[list[Document], list[TokenizedDocument]]:
    """Tokenize the documents that the model can read, and count the others in `report`.

    Raises:
        PackageError: the tokenizer or the chat template breaks a limit.
    """
    report = report or DataReport()
    known = []
    tokenized = []
    for document in documents:
        try:
            tokens = tokenizer.tokenize(document.content, row_tokens=row_tokens)
        except (InputError, PackageError) as exc:
            # Many templates refuse some orders of roles. Then one conversation is at fault, not the package.
            code = exc.code if isinstance(exc, PackageError) else None
            if code not in (None, "chat-template"):
                raise
            report.refuse("conversation", "refused by the chat template" if code else str(exc))
            continue
        if document.continues:
            # In use, the first token of a block follows the block before it, not BOS.
            tokens.target_T[:1] = False
        if tokens.targets:
            known.append(document)
            tokenized.append(tokens)
        elif document.continues:  # the last block of a row that was read
            report.left_out["end without a token that counts"] += 1
        else:
            report.refuse("document", "no token that counts in the loss")
    return known, tokenized


def position(group: str) -> float:
    """Map a group to a position in [0, 1). Positions of different groups are uniform and independent."""
    digest = hashlib.sha256(f"permille-split-1\0{group}".encode()).digest()
    # 48 bits fit a float exactly.
    return int.from_bytes(digest[:6], "big") / 2**48


def assign(groups: Sequence[str], target_tokens: Sequence[int]) -> list[Split]:
    """Assign each document to a split.

    Args:
        groups: group of each document.
        target_tokens: number of target tokens of each document.

    Raises:
        InputError: there is too little text. The message gives the needed and the actual numbers.
    """
    tokens: dict[str, int] = defaultdict(int)
    for group, number in zip(groups, target_tokens, strict=True):
        tokens[group] += number
    # Sort by a hash of the group, so that text that is added later does not change the order of older text.
    order = sorted(tokens, key=lambda group: (position(group), group))
    total = sum(tokens.values())
    test = _taken(
        order, tokens, _wanted(TEST_SHARE, total, MIN_TEST_TOKENS, MAX_TEST_TOKENS), MIN_TEST_GROUPS
    )
    rest = order[len(test) :]
    wanted = _wanted(SELECT_SHARE, total, MIN_SELECT_TOKENS, MAX_SELECT_TOKENS)
    # Take the select split from the other end, so that the two held-out splits stay apart when they grow.
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
    """Count the target tokens and the documents of each split."""
    result = {}
    for wanted in Split:
        tokens = [n for split, n in zip(splits, target_tokens, strict=True) if split is wanted]
        result[wanted] = SplitCount(tokens=sum(tokens), documents=len(tokens))
    return result


def _wanted(share: float, total: int, least: int, most: int) -> int:
    return min(most, max(least, int(share * total)))


def _taken(order: Iterable[str], tokens: dict[str, int], wanted: int, least_groups: int) -> list[str]:
    """Return the shortest prefix of `order` with at least the wanted numbers of tokens and groups."""
    taken: list[str] = []
    have = 0
    for group in order:
        if have >= wanted and len(taken) >= least_groups:
            break
        taken.append(group)
        have += tokens[group]
    return taken


def _groups(documents: Iterable[Document]) -> tuple[str, ...]:
    return tuple(sorted({document.group for document in documents}))


def _pieces(documents: Sequence[Document]) -> tuple[list[Document], list[str]]:
    """Cut documents into passages, and return the passages with their units.

    Passages of one unit go to the same part. A document that shares its group with others is not cut.
    """
    # Rows that the user has grouped belong together, so none of them is divided.
    alone = {group for group, number in Counter(d.group for d in documents).items() if number == 1}
    pieces: list[Document] = []
    units: list[str] = []
    for document in documents:
        cut = passages([document]) if document.group in alone else [document]
        pieces += cut
        units += [f"{document.group}\0{place}" for place in range(len(cut))]
    return pieces, units


def _parts(units: Sequence[str], target_tokens: Sequence[int]) -> list[int]:
    """Assign each piece to a part, in the order of hashes. All parts get about the same number of tokens."""
    tokens: dict[str, int] = defaultdict(int)
    for unit, number in zip(units, target_tokens, strict=True):
        tokens[unit] += number
    total, before, part_of = sum(tokens.values()), 0, {}
    for unit in sorted(tokens, key=lambda unit: (position(unit), unit)):
        # The middle of a unit decides its part: PARTS * (before + tokens / 2) / total, in integers.
        part_of[unit] = min(PARTS - 1, PARTS * (2 * before + tokens[unit]) // (2 * total))
        before += tokens[unit]
    return [part_of[unit] for unit in units]


def _guarded(
    documents: Sequence[Document], tokenized: Sequence[TokenizedDocument], held_out: Sequence[bool]
) -> list[TokenizedDocument]:
    """Shorten training blocks where they touch a held-out block."""
    # Otherwise, the model would learn the words right before or after the text that judges it.
    guarded = list(tokenized)
    for place in range(1, len(documents)):
        if documents[place].continues and held_out[place - 1] != held_out[place]:
            if held_out[place]:
                guarded[place - 1] = guarded[place - 1].between(0, -GUARD_TOKENS)
            else:
                guarded[place] = guarded[place].between(GUARD_TOKENS, None)
    return guarded


def _too_little(counts: dict[Split, SplitCount], total: int, groups: int) -> str:
    return (
        f"There is too little text: {total} tokens in {_documents(groups)}. Training needs {NEEDED_TOKENS} "
        f"tokens: {MIN_TEST_TOKENS} in {MIN_TEST_GROUPS} or more documents for the test, {MIN_SELECT_TOKENS} "
        f"to select the state, and {MIN_TRAIN_TOKENS} to train. This text gives {counts[Split.TEST].tokens} "
        f"for the test, {counts[Split.SELECT].tokens} to select and {counts[Split.TRAIN].tokens} to train. "
        "Conversations and rows of one group are not divided."
    )


def _documents(number: int) -> str:
    return f"{number} document{'s' * (number != 1)}"
