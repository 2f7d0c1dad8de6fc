"""The common form of all tasks: a prompt, its candidate answers, and the right one.

A row that cannot be read is kept as a `BadRow` and reported. If it were silently dropped, programs with
different rules would test on different sets.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Task(StrEnum):
    """Known tasks, with built-in prompts. Other tasks are `CHOICE`, and language modelling is `TEXT`."""

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
    """Rows that contain their prompt, their candidates and the index of the right one."""
    TEXT = "text"
    """Language modelling, as on a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One question with its candidate answers.

    Attributes:
        prompt: the text before the answer.
        candidates: possible continuations of the prompt, with a leading space if one belongs between.
        label: index of the right candidate.
        group: name of a group, such as a passage or a person. A group is never in two splits.
        name: file and line for reports, such as "val.jsonl:17".
        document: True for language modelling. The only candidate is the document, and the prompt may be
            empty. The end of the document may be cut.
    """

    prompt: str
    candidates: tuple[str, ...]
    label: int
    group: str
    name: str
    document: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """A row that is no example of its task, by file and line, with the reason."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The labelled examples of a file, and the rows that could not be read."""

    examples: Sequence[Example]
    bad: Sequence[BadRow]


def majority_share(examples: Sequence[Example]) -> float:
    """Return the share of the most frequent label: the accuracy of always guessing it."""
    labels = [example.label for example in examples]
    return max(labels.count(label) for label in set(labels)) / len(labels)
