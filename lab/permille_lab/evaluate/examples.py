"""What every task is turned into: a prompt, its candidate answers, which of them are right.

A row that cannot be read is kept as a `BadRow` and reported, never dropped in silence: a file of which one
line in two hundred is broken otherwise gives another test set to every reader.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from permille.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One question with its candidate answers.

    Attributes:
        prompt: the text before the answer.
        candidates: what may follow the prompt, each beginning as it joins the prompt (with its space). Empty
            for a task that is answered in free text.
        label: index of the right candidate; -1 where `references` hold the answers.
        references: right answers in free text (SQuAD); empty for tasks with candidates.
        group: examples of one group (a passage, a sentence pair's text) never stand in two splits.
        name: where it comes from, for reports: "val.jsonl:17".
        document: language modelling: the one candidate follows the prompt, if there is one, and may lose its
            end.
    """

    prompt: str
    candidates: tuple[str, ...]
    label: int
    group: str
    name: str
    references: tuple[str, ...] = ()
    document: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """A row that is no example of its task: where it stands, what was expected and what came."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The labelled examples of a file or of several, and the rows that could not be read."""

    examples: Sequence[Example]
    bad: Sequence[BadRow]

    def __add__(self, other: "Pool") -> "Pool":
        """Both, in order."""
        return Pool(examples=(*self.examples, *other.examples), bad=(*self.bad, *other.bad))


def majority_share(examples: Sequence[Example]) -> float:
    """Share of the most frequent label: what guessing it always reaches.

    Raises:
        InputError: no example, or one without candidates.
    """
    labels = [example.label for example in examples]
    if not labels or min(labels) < 0:
        raise InputError(f"expected examples with candidates, got {len(labels)} of which some have none")
    return max(labels.count(label) for label in set(labels)) / len(labels)
