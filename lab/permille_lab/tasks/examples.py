"""The common form of every task: a prompt, its candidate answers, and the right one.

A row that cannot be read is kept as a `BadRow` and reported, never dropped in silence. A broken line in two
hundred would otherwise give another test set to every reader.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Task(StrEnum):
    """The tasks that have prompts of their own; any other one as `CHOICE`, own text as `TEXT`."""

    SST2 = "sst2"
    RTE = "rte"
    BOOLQ = "boolq"
    WSC = "wsc"
    COPA = "copa"
    MRPC = "mrpc"
    QQP = "qqp"
    QNLI = "qnli"
    WNLI = "wnli"
    CHOICE = "choice"
    """Rows that name their prompt, their candidates and the right one."""
    TEXT = "text"
    """Language modelling: what a device does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One question with its candidate answers.

    Attributes:
        prompt: the text before the answer.
        candidates: what may follow the prompt, each beginning as it joins the prompt (with its space).
        label: index of the right candidate.
        group: examples of one group (a passage, a person) never stand in two splits.
        name: where it comes from, for reports: "val.jsonl:17".
        document: language modelling: the one candidate follows the prompt, if there is one, and may lose its
            end.
    """

    prompt: str
    candidates: tuple[str, ...]
    label: int
    group: str
    name: str
    document: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """A row that is no example of its task: where it stands, what was expected and what came."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The labelled examples of a file, and the rows that could not be read."""

    examples: Sequence[Example]
    bad: Sequence[BadRow]


def majority_share(examples: Sequence[Example]) -> float:
    """Share of the most frequent label: what guessing it always reaches."""
    labels = [example.label for example in examples]
    return max(labels.count(label) for label in set(labels)) / len(labels)
