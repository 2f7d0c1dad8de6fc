"""Whether a task tells methods apart at a model's size, or only how soon they know what answers look like.

The `references` of a task come first. Where tuned first-order training does not end below the loss of the
answers' frequencies (`permille.evaluate.prior`), nothing of the task was learned: the other methods are not
measured on it. The first task has all methods whatever they learn: it shows how soon they know the form.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from benchmarks.cells import Result, Settings
from benchmarks.evidence_plan import REFERENCES, Unit
from permille.evaluate.cells import Bench
from permille.evaluate.contrasts import contrast
from permille.evaluate.methods import method
from permille.evaluate.outcomes import Cell, Json
from permille.evaluate.prior import prior_losses
from permille.evaluate.prompts import Task
from permille.evaluate.specification import Base, Sweep

FIGURE = "prior"
_P = 0.01
_TUNED = tuple(name for name in REFERENCES if name.startswith("fo:"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What first-order training learned of a task.

    Attributes:
        method: the best one by validation.
        loss: its loss, nats a token, mean over items and seeds.
        prior: of the answers' frequencies, on the same items.
        p_below: one-sided p that its loss is below the prior's.
    """

    method: str
    loss: float
    prior: float
    p_below: float

    @property
    def form_only(self) -> bool:
        """Whether it is no more than the answers' form and their frequencies, as far as these items tell."""
        return self.p_below >= _P

    def __str__(self) -> str:
        return (
            f"{self.method} ends at {self.loss:.3f} nats a token, the answers' frequencies alone at "
            f"{self.prior:.3f} (p {self.p_below:.2g}): {'the form alone' if self.form_only else 'learned'}"
        )


def measure_prior(sweep: Sweep, unit: Unit) -> Result:
    """The prior's loss of every test item, by seed 0's train part; none where answers differ by example."""
    cell = Cell(model=unit.model, base=Base.BF16, method=method("fo:full"), task=Task(unit.task), seed=0)
    data = Bench(sweep).data(cell, 0)
    losses = prior_losses(data.train, data.test)
    if losses is None:
        return {"loss": None}
    return {
        "loss": float(losses.mean()),
        "items": [example.name for example in data.tested],
        "item_losses": [round(float(loss), 6) for loss in losses],
    }


def priors(cells: Iterable[tuple[Settings, Result]]) -> dict[tuple[str, str], float]:
    """Mean losses of the frequencies by model and task, of tasks that have fixed answers."""
    return {(at["model"], at["task"]): found["loss"] for at, found in cells if found["loss"] is not None}


def learned(
    model: str, task: str, cells: Iterable[tuple[Settings, Result]], records: Iterable[Json], seeds: int
) -> Learned | None:
    """What first-order training learned; None while it is not known, and where answers differ by example.

    Args:
        cells: of `FIGURE`.
        records: of any models and tasks.
        seeds: that each reference must have.
    """
    prior = next((found for at, found in cells if (at["model"], at["task"]) == (model, task)), None)
    if prior is None or prior["loss"] is None:
        return None
    place = ("table", model, task, "bf16")
    own = [r for r in records if (r["stage"], r["model"], r["task"], r["base"]) == place]
    tuned = {name: [record for record in own if record["method"] == name] for name in _TUNED}
    if any(len(of_method) < seeds for of_method in tuned.values()):
        return None
    best = min(tuned, key=lambda name: float(np.mean([r["validation_loss"] for r in tuned[name]])))
    guess = {"method": FIGURE, "task": task, "seed": 0} | prior
    found = contrast(tuned[best], [guess], by_loss=True, fixed=True)
    if found is None:
        return None
    loss = prior["loss"] - found.effect
    return Learned(method=best, loss=loss, prior=prior["loss"], p_below=found.p_above(0.0))
