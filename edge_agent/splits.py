"""Which documents train, which select the state, and which are kept to judge the result at the end.

A document's split is a function of its group and the seed alone: more text, another order or another package
moves no document from one split to another. Only the shares widen, in fixed nested levels, where there is
little text: the test part must hold `MIN_TEST_TOKENS` target tokens, or a difference between two models is
luck.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from permille.errors import InputError

MIN_TEST_TOKENS = 2000
MIN_SELECT_TOKENS = 800
MIN_TRAIN_TOKENS = 2000
MIN_TEST_DOCUMENTS = 8
# (test, select): each level contains the one before it.
SHARES = ((0.20, 0.10), (0.30, 0.15), (0.40, 0.20))


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


def position(group: str, seed: int) -> float:
    """Where `group` falls in [0, 1), uniformly, for this seed."""
    digest = hashlib.sha256(f"permille-split-1\0{seed}\0{group}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def assign(groups: Sequence[str], target_tokens: Sequence[int], seed: int) -> list[Split]:
    """The split of each document, at the first level of shares that gives every split what it needs.

    Args:
        groups: the group of each document.
        target_tokens: how many of each document's tokens count in the loss.
        seed: of the run.

    Raises:
        InputError: too little text; the message says how much is needed and how much came.
    """
    places = [position(group, seed) for group in groups]
    counts: dict[Split, SplitCount] = {}
    for test_share, select_share in SHARES:
        splits = [_split(place, test_share, select_share) for place in places]
        counts = count(splits, target_tokens)
        if _enough(counts):
            return splits
    raise InputError(_too_little(counts))


def count(splits: Sequence[Split], target_tokens: Sequence[int]) -> dict[Split, SplitCount]:
    """Target tokens and documents by split."""
    result = {}
    for wanted in Split:
        tokens = [n for split, n in zip(splits, target_tokens, strict=True) if split is wanted]
        result[wanted] = SplitCount(tokens=sum(tokens), documents=len(tokens))
    return result


def _split(place: float, test_share: float, select_share: float) -> Split:
    if place < test_share:
        return Split.TEST
    return Split.SELECT if place >= 1.0 - select_share else Split.TRAIN


def _enough(counts: dict[Split, SplitCount]) -> bool:
    return (
        counts[Split.TEST].tokens >= MIN_TEST_TOKENS
        and counts[Split.TEST].documents >= MIN_TEST_DOCUMENTS
        and counts[Split.SELECT].tokens >= MIN_SELECT_TOKENS
        and counts[Split.TRAIN].tokens >= MIN_TRAIN_TOKENS
    )


def _too_little(counts: dict[Split, SplitCount]) -> str:
    total = sum(split.tokens for split in counts.values())
    documents = sum(split.documents for split in counts.values())
    needed = MIN_TEST_TOKENS + MIN_SELECT_TOKENS + MIN_TRAIN_TOKENS
    return (
        f"expected at least {MIN_TEST_TOKENS} held-out tokens in {MIN_TEST_DOCUMENTS} or more documents to "
        f"judge the result, {MIN_SELECT_TOKENS} to select the state and {MIN_TRAIN_TOKENS} to train (about "
        f"{needed} tokens in all, some more because documents are not divided), got "
        f"{counts[Split.TEST].tokens} tokens in {counts[Split.TEST].documents} documents, "
        f"{counts[Split.SELECT].tokens} and {counts[Split.TRAIN].tokens} ({total} in {documents} documents)"
    )
