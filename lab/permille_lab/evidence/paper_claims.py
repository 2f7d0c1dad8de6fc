"""The papers' claims. Each compares two sides, which select records. `claims.py` judges them."""

from dataclasses import dataclass
from enum import StrEnum

from permille_lab.evaluate.contrasts import Record

FLOATING = ("bf16", "float32")
"""Bases that are not quantized."""

SEVERAL = 4
"""Number of queries in claims on "several" queries. It was fixed before the measurement.

The best of many numbers would have been chosen by luck.
"""


class Relation(StrEnum):
    """The relation that a claim states between its two methods."""

    BETTER = "better than"
    AT_LEAST = "at least equal to"
    WITHIN = "within the margin of"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of a claim: a method on a kind of base.

    Attributes:
        four_bit: True for the base NF4, False for one that is not quantized.
        queries: number of queries, None if any number counts.
    """

    method: str
    four_bit: bool = False
    queries: int | None = None

    def takes(self, record: Record) -> bool:
        """Return True if the record belongs to this side."""
        return (
            record["method"] == self.method
            and (record["base"] == "nf4" if self.four_bit else record["base"] in FLOATING)
            and (self.queries is None or self.queries == record["queries"])
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A claim that records can refute.

    Attributes:
        stage: the stage of the evidence with the compared records. None for the stages given to `verdicts`.
    """

    key: str
    sentence: str
    relation: Relation
    first: Side
    second: Side
    stage: str | None = None


_SENSITIVE = Side(method="zo:sensitive-c4")
CLAIMS = (
    Claim(
        key="sensitive-random",
        sentence="Sensitive weights train better than as many random ones",
        relation=Relation.BETTER,
        first=_SENSITIVE,
        second=Side(method="zo:random"),
    ),
    Claim(
        key="sensitive-outliers",
        sentence="Sensitive weights train better than as many of the largest ones",
        relation=Relation.BETTER,
        first=_SENSITIVE,
        second=Side(method="zo:outliers"),
    ),
    Claim(
        key="c4-task",
        sentence="The mask of C4 is within the margin of the task's own",
        relation=Relation.WITHIN,
        first=_SENSITIVE,
        second=Side(method="zo:sensitive-task"),
    ),
    Claim(
        key="four-bit",
        sentence="Sensitive weights over 4 bits are at least equal to all weights of 16 bits",
        relation=Relation.AT_LEAST,
        first=Side(method="zo:sensitive-c4", four_bit=True),
        second=Side(method="zo:full"),
    ),
    *(
        Claim(
            key=f"four-bit-{method.partition(':')[2]}",
            sentence=f"Over the same 4 bits sensitive weights train better than {rival}",
            relation=Relation.BETTER,
            first=Side(method="zo:sensitive-c4", four_bit=True),
            second=Side(method=method, four_bit=True),
        )
        for method, rival in (("zo:lora-8", "LoRA"), ("zo:prefix-real-5", "a prefix"))
    ),
    *(
        Claim(
            key=f"queries-{method.partition(':')[2]}",
            sentence=f"At constant work, {SEVERAL} queries are better than one ({method})",
            relation=Relation.BETTER,
            first=Side(method=method, queries=SEVERAL),
            second=Side(method=method, queries=1),
            stage="queries",
        )
        for method in ("zo:sensitive-c4", "zo:lora-fa-8")
    ),
    Claim(
        key="lora-fa-lora-16",
        sentence="LoRA-FA trains better than LoRA",
        relation=Relation.BETTER,
        first=Side(method="zo:lora-fa-16"),
        second=Side(method="zo:lora-16"),
    ),
    Claim(
        key="static",
        # Both sides have segments, since these are an advantage even without new masks (docs/adr/0035).
        sentence="A static mask is at least equal to one that is selected again while training",
        relation=Relation.AT_LEAST,
        first=Side(method="zo:sensitive-task-segments"),
        second=Side(method="zo:sensitive-task-dynamic"),
    ),
)
