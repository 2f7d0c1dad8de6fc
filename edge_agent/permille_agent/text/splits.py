"""Which documents train, which select the state, and which are kept to judge the result at the end.

Groups of documents stand in an order that their hash and the seed decide. The test part is taken from the
front of it, the select part from the back, each as large as it has to be; the rest trains. So nothing depends
on the order of files, and added text moves few documents, those near a boundary. The test part must hold
`MIN_TEST_TOKENS` target tokens of `MIN_TEST_GROUPS` groups, or a difference between two models is luck.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from permille.errors import InputError

TEST_SHARE = 0.2
SELECT_SHARE = 0.1
MIN_TEST_TOKENS = 2_000
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


def position(group: str, seed: int) -> float:
    """Where `group` falls in [0, 1), uniformly, for this seed."""
    digest = hashlib.sha256(f"permille-split-1\0{seed}\0{group}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def assign(groups: Sequence[str], target_tokens: Sequence[int], seed: int) -> list[Split]:
    """The split of each document.

    Args:
        groups: the group of each document.
        target_tokens: how many of each document's tokens count in the loss.
        seed: of the run.

    Raises:
        InputError: too little text; the message says how much is needed and how much came.
    """
    tokens: dict[str, int] = defaultdict(int)
    for group, number in zip(groups, target_tokens, strict=True):
        tokens[group] += number
    order = sorted(tokens, key=lambda group: (position(group, seed), group))
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
    """Target tokens and documents by split."""
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
