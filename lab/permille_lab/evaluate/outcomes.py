"""A cell of a sweep, its outcome, and the JSON record of it.

The record has the outcome of each test item, so that any two methods can later be compared in pairs.
"""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from permille_lab.evaluate.cell_data import CellData
from permille_lab.evaluate.methods import Method
from permille_lab.evaluate.specification import Base
from permille_lab.evaluate.training import Trained
from permille_lab.tasks.examples import Task, majority_share
from permille_lab.tasks.scoring import Scored, prior_losses

Json = dict[str, Any]

_SPLIT_NAMES = ("train", "validation", "test")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A model, base, method, task and seed. It is trained and tested once."""

    model: Path
    base: Base
    method: Method
    task: Task
    seed: int

    @property
    def key(self) -> str:
        """Name of the cell in the results file."""
        return "/".join((self.tuning_key, str(self.seed)))

    @property
    def tuning_key(self) -> str:
        """Name of the tuning that the cells of all seeds share."""
        return "/".join((self.model.name, self.base.value, self.method.name, self.task.value))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a cell."""

    cell: Cell
    data: CellData
    trained: Trained | None
    tested: Scored
    seconds: float

    def _bits_per_byte(self) -> float | None:
        """Return bits per byte over the scored bytes of all documents; None for other tasks.

        Bits per byte can be compared between tokenizers if `max_tokens` cuts no document.
        """
        if self.cell.task is not Task.TEXT:
            return None
        targets_N = np.array([item.answers[item.label].targets for item in self.data.test])
        size = self.data.test_bytes
        return float(self.tested.loss_N @ targets_N) / math.log(2) / size if size else None

    def _majority(self) -> float | None:
        return None if self.cell.task is Task.TEXT else majority_share(self.data.tested)

    def _prior_loss(self) -> float | None:
        """Return the loss of the best guess that is the same for every prompt.

        Return None if the items do not have the same answers.
        """
        found = prior_losses(self.data.test)
        return None if found is None else float(found.mean())

    def record(self) -> Json:
        """Return the line of the results file.

        Language modelling has no right answers. Its `accuracy`, `majority` and `correct` are None.
        """
        return {
            "model": self.cell.model.name,
            "base": self.cell.base.value,
            "method": self.cell.method.name,
            "task": self.cell.task.value,
            "seed": self.cell.seed,
            "accuracy": None if self.cell.task is Task.TEXT else self.tested.accuracy,
            "loss": self.tested.loss,
            "bits_per_byte": self._bits_per_byte(),
            "majority": self._majority(),
            "prior_loss": self._prior_loss(),
            "examples": dict(
                zip(
                    _SPLIT_NAMES,
                    (len(self.data.train), len(self.data.validation), len(self.data.test)),
                    strict=True,
                )
            ),
            "items": [example.name for example in self.data.tested],
            "groups": [_digest(example.group) for example in self.data.tested],
            "correct": None
            if self.cell.task is Task.TEXT
            else "".join("01"[int(right)] for right in self.tested.correct_N),
            "item_losses": [round(loss, 5) for loss in self.tested.loss_N.tolist()],
            "shots": float(np.mean([item.shots for item in self.data.test])),
            "cut_examples": sum(item.cut > 0 for item in self.data.test),
            "validation_loss": None if self.trained is None else self.trained.loss,
            "best_step": None if self.trained is None else self.trained.step,
            "curve": None if self.trained is None else _finite_curve(self.trained),
            "attempts": None if self.trained is None else self.trained.attempts,
            "step_factor": None if self.trained is None else self.trained.step_factor,
            "seconds": round(self.seconds, 2),
        }


def _digest(text: str) -> str:
    """Return a short name of a passage, the same in every record. 48 bits suffice for some thousand."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _finite_curve(trained: Trained) -> list[list[float | None]]:
    return [[step, loss if np.isfinite(loss) else None] for step, loss in trained.curve]
