"""Whether training learns anything of a task at a model's size, or only what its answers look like.

The `references` of a task come first. Of a task that is not the first, the other methods are measured where
tuned first-order training shows that it reads the prompt: it ends below the best guess that is the same for
every prompt (`permille.evaluate.prior`), or it is right more often than such a guess, answer by answer. The
first task has all methods whatever they learn: it shows how soon they know the answers' form.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.cells import Result, Settings
from benchmarks.evidence_plan import REFERENCES, Unit
from permille.evaluate.cells import Bench
from permille.evaluate.contrasts import Contrast, contrast
from permille.evaluate.methods import method
from permille.evaluate.outcomes import Cell, Json
from permille.evaluate.prior import prior_losses
from permille.evaluate.prompts import Task
from permille.evaluate.specification import Base, Sweep

FIGURE = "prior"
_P = 0.01 / 2
"""Of either of two tests."""
_TUNED = tuple(name for name in REFERENCES if name.startswith("fo:"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What first-order training shows of a task, over items and seeds.

    Attributes:
        method: the best one by validation.
        loss: its loss, nats a token.
        prior: of the best guess that is the same for every prompt, on the same items.
        p_loss: one-sided p that it is not below that.
        balanced: accuracy, mean over the answers (recalls); a guess has one by the number of answers.
        p_balanced: one-sided p that it is not above that.
    """

    method: str
    loss: float
    prior: float
    p_loss: float
    balanced: float
    p_balanced: float

    @property
    def shown(self) -> bool:
        """Whether it reads the prompt for sure. It may do so unseen: a few hundred items and three seeds."""
        return min(self.p_loss, self.p_balanced) < _P

    def __str__(self) -> str:
        verdict = "learned" if self.shown else "not shown"
        return (
            f"{verdict}: {self.method} ends at {self.loss:.3f} nats a token, the guess has {self.prior:.3f} "
            f"(p {self.p_loss:.2g}); accuracy over the answers {100 * self.balanced:.1f} "
            f"(p {self.p_balanced:.2g})"
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


def learned(prior: Result | None, references: Sequence[Json], seeds: int) -> Learned | None:
    """What first-order training shows; None while it is not known, and where answers differ by example.

    Args:
        prior: of the task.
        references: of the model and task, in 16 bits.
        seeds: that each tuned one must have.
    """
    if prior is None or prior["loss"] is None:
        return None
    tuned = {name: [record for record in references if record["method"] == name] for name in _TUNED}
    if any(len(of_method) < seeds for of_method in tuned.values()):
        return None
    best = min(tuned, key=lambda name: float(np.mean([r["validation_loss"] for r in tuned[name]])))
    if any(record["items"] != prior["items"] for record in tuned[best]):
        return None  # of other data
    by_loss = _beyond(tuned[best], prior["item_losses"])
    recalls = [record | {"item_losses": _recalls(record, prior["labels"])} for record in tuned[best]]
    answers = len(set(prior["labels"]))
    by_answer = _beyond(recalls, [-1 / answers] * len(prior["items"]))
    if by_loss is None or by_answer is None:
        return None
    return Learned(
        method=best,
        loss=prior["loss"] - by_loss.effect,
        prior=prior["loss"],
        p_loss=by_loss.p_above(0.0),
        balanced=1 / answers + by_answer.effect,
        p_balanced=by_answer.p_above(0.0),
    )


def _beyond(records: Sequence[Json], guess: Sequence[float]) -> Contrast | None:
    other = records[0] | {"seed": 0, "item_losses": list(guess)}
    return contrast(records, [other], by_loss=True, fixed=True)


def _recalls(record: Json, labels: Sequence[int]) -> list[float]:
    """Of each item, minus what it adds to the mean over answers: their mean is minus that accuracy."""
    counts = Counter(labels)
    worth = [len(labels) / len(counts) / counts[label] for label in labels]
    return [-float(right) * each for right, each in zip(record["correct"], worth, strict=True)]
