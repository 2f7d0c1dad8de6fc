"""Whether training learns anything of a task at a model's size, or only what its answers look like.

The `references` of a task come first. Of a task that is not the first, the other methods are measured where
tuned first-order training shows that it reads the prompt: it ends below the best guess that is the same for
every prompt (`permille_lab.evaluate.prior`), or it is right more often than such a guess, answer by answer. Where
answers differ by example there is no such guess but of their place: it must be right more often than the more
frequent place. The first task has all methods whatever they learn: it shows how soon they know the answers'
form.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from permille_lab.benchmarks.cells import Result, Settings
from permille_lab.benchmarks.evidence_plan import REFERENCES, Unit
from permille_lab.evaluate.cells import Bench
from permille_lab.evaluate.contrasts import Contrast, contrast
from permille_lab.evaluate.methods import method
from permille_lab.evaluate.outcomes import Cell, Json
from permille_lab.evaluate.prior import prior_losses
from permille_lab.evaluate.prompts import Task
from permille_lab.evaluate.specification import Base, Sweep

FIGURE = "prior"
_P = 0.01 / 2
"""Of either of two tests."""
TUNED = tuple(name for name in REFERENCES if name.startswith("fo:"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What first-order training shows of a task, over items and seeds.

    Attributes:
        method: the best one by validation.
        loss: its loss, nats a token.
        prior: of the best guess that is the same for every prompt, on the same items; None where there is
            none.
        p_loss: one-sided p that the loss is not below that.
        right: how often it is right, mean over the answers (recalls); without a guess, plainly.
        guessed: how often a guess is: one by the number of answers; without a guess, the majority.
        p_right: one-sided p that it is not right more often than that.
    """

    method: str
    loss: float
    prior: float | None
    p_loss: float | None
    right: float
    guessed: float
    p_right: float

    @property
    def shown(self) -> bool:
        """Whether it reads the prompt for sure. It may do so unseen: a few hundred items and three seeds."""
        return min(1.0 if self.p_loss is None else self.p_loss, self.p_right) < _P

    def __str__(self) -> str:
        verdict = f"{'learned' if self.shown else 'not shown'}: {self.method}"
        if self.p_loss is None:
            return (
                f"{verdict} is right in {100 * self.right:.1f} %, the more frequent answer in "
                f"{100 * self.guessed:.1f} (p {self.p_right:.2g})"
            )
        return (
            f"{verdict} ends at {self.loss:.3f} nats a token, the guess has {self.prior:.3f} "
            f"(p {self.p_loss:.2g}); accuracy over the answers {100 * self.right:.1f} "
            f"(p {self.p_right:.2g})"
        )


def settings(unit: Unit) -> Settings:
    """What a cell is of: the sizes decide which items test."""
    return {"model": unit.model.name, "task": unit.task, "sizes": list(unit.choices["sizes"])}


def measure_prior(sweep: Sweep, unit: Unit) -> Result:
    """The guess' loss on every test item, and the items' answers; none where answers differ by example."""
    cell = Cell(model=unit.model, base=Base.BF16, method=method("fo:full"), task=Task(unit.task), seed=0)
    data = Bench(sweep).data(cell, 0)
    losses = prior_losses(data.test)
    if losses is None:
        return {"loss": None}
    return {
        "loss": float(losses.mean()),
        "items": [example.name for example in data.tested],
        "labels": [item.label for item in data.test],
        "item_losses": [round(float(loss), 6) for loss in losses],
    }


def learned(
    prior: Result | None, references: Sequence[Json], seeds: int, methods: Sequence[str] = TUNED
) -> Learned | None:
    """What first-order training shows; None while it is not known, and of what has no answers to choose from.

    Args:
        prior: of the task.
        references: of the model and task, in 16 bits.
        seeds: that each tuned one must have.
        methods: of first order.
    """
    tuned = {name: [record for record in references if record["method"] == name] for name in methods}
    if prior is None or any(len(of_method) < seeds for of_method in tuned.values()):
        return None
    best = min(tuned, key=lambda name: float(np.mean([r["validation_loss"] for r in tuned[name]])))
    own = tuned[best]
    if any(record["correct"] is None for record in own):
        return None
    if prior["loss"] is None:
        return _learned_by_place(best, own)
    if any(record["items"] != prior["items"] for record in own):
        return None  # of other data
    answers = len(set(prior["labels"]))
    worth = _worth(prior["labels"])
    by_loss = _beyond(own, prior["item_losses"])
    by_answer = _beyond([_rights(record, worth) for record in own], [-1 / answers] * len(worth))
    if by_loss is None or by_answer is None:
        return None
    return Learned(
        method=best,
        loss=prior["loss"] - by_loss.effect,
        prior=prior["loss"],
        p_loss=by_loss.p_above(0.0),
        right=1 / answers + by_answer.effect,
        guessed=1 / answers,
        p_right=by_answer.p_above(0.0),
    )


def _learned_by_place(best: str, own: Sequence[Json]) -> Learned | None:
    items = len(own[0]["items"])
    majority = max(record["majority"] for record in own)
    found = _beyond([_rights(record, [1.0] * items) for record in own], [-majority] * items)
    if found is None:
        return None
    return Learned(
        method=best,
        loss=float(np.mean([record["item_losses"] for record in own])),
        prior=None,
        p_loss=None,
        right=majority + found.effect,
        guessed=majority,
        p_right=found.p_above(0.0),
    )


def _beyond(records: Sequence[Json], guess: Sequence[float]) -> Contrast | None:
    other = records[0] | {"seed": 0, "item_losses": list(guess)}
    return contrast(records, [other], by_loss=True, fixed=True)


def _worth(labels: Sequence[int]) -> list[float]:
    """What each item adds to the accuracy over the answers, beside what it adds to the plain one."""
    counts = Counter(labels)
    return [len(labels) / len(counts) / counts[label] for label in labels]


def _rights(record: Json, worth: Sequence[float]) -> Json:
    """A record whose losses are minus what is right, so that their mean is minus the accuracy."""
    rights = [-float(right) * each for right, each in zip(record["correct"], worth, strict=True)]
    return record | {"item_losses": rights}
