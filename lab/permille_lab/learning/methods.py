"""MeZO and first-order methods, which are compared with the agent's training on the same text.

First order takes as many rows in a step as the agent. MeZO takes 16, as published. The step size of each
method comes from a grid, which grows while the best value is at an edge.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch

from permille.engines.interface import GradientEngine
from permille.models.loading import load_model
from permille.zo.estimators import Batch
from permille_agent.embed import TrainingBatches, batch_of, mean_loss
from permille_lab.learning.mezo import Mezo
from permille_lab.learning.runs import TextRun
from permille_lab.measuring.dense import batch_loss, dense_model
from permille_lab.measuring.dense import mean_loss as model_loss

_GRID_FACTOR, _EXTENSIONS = 10**0.5, 4
_EVALUATED_ROWS = 16


class Method(Protocol):
    """A method that holds and trains a model."""

    def step(self, batch: Batch, number: int) -> None:
        """Take one step."""

    def loss(self) -> float:
        """Return the loss of the select split."""


class DenseMezo:
    """MeZO on all weights of the full-precision model."""

    def __init__(self, run: TextRun, model: Path, learning_rate: float) -> None:
        self._run = run
        self._model = load_model(model)
        self._mezo = Mezo(self._model.parameters(), epsilon=1e-3, learning_rate=learning_rate)

    def step(self, batch: Batch, number: int) -> None:
        self._mezo.step(partial(batch_loss, self._model, batch), number)

    def loss(self) -> float:
        return rows_loss(self._model, self._run)


class Lora:
    """AdamW on adapters of all linear layers, r = 8, over the decoded weights of the package."""

    def __init__(self, run: TextRun, _: Path, learning_rate: float) -> None:
        import peft

        torch.manual_seed(run.seed)
        self._run = run
        config = peft.LoraConfig(
            r=8, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        adapted = peft.get_peft_model(dense_model(run.package, prepacked=False), config)
        self._model: Any = adapted.base_model.model
        trained = [weight for weight in adapted.parameters() if weight.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=learning_rate)

    def step(self, batch: Batch, number: int) -> None:  # noqa: ARG002
        model_loss(self._model, batch).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def loss(self) -> float:
        return rows_loss(self._model, self._run)


class SparseValues:
    """AdamW on the package's sparse values, by the engine's gradient."""

    def __init__(self, run: TextRun, _: Path, learning_rate: float) -> None:
        self._run = run
        self._engine = cast(GradientEngine, run.engine)
        self._values_K = torch.from_numpy(run.package.values().copy()).requires_grad_(True)
        self._optimizer = torch.optim.AdamW([self._values_K], lr=learning_rate, weight_decay=0.0)

    def step(self, batch: Batch, number: int) -> None:  # noqa: ARG002
        _, gradient_K = self._engine.gradient(self._values_K.detach().numpy(), batch)
        self._values_K.grad = torch.from_numpy(np.array(gradient_K))
        self._optimizer.step()

    def loss(self) -> float:
        return mean_loss(self._run.engine, self._values_K.detach().numpy(), self._run.prepared.select)


@dataclass(frozen=True, slots=True)
class Contender:
    """A constructor of a method, its grid of step sizes, and its number of rows in a step."""

    make: Callable[[TextRun, Path, float], Method]
    grid: tuple[float, ...]
    rows: int


METHODS: Mapping[str, Contender] = {
    "MeZO": Contender(DenseMezo, (3e-5, 1e-4, 3e-4), 16),
    "LoRA, AdamW": Contender(Lora, (1e-3, 3e-3, 1e-2), 4),
    "the same values, AdamW": Contender(SparseValues, (3e-3, 1e-2, 3e-2), 4),
}


def rows_loss(model: Any, run: TextRun) -> float:
    """Return the mean loss per target of the select split, as the agent computes it."""
    rows = run.prepared.select
    total, targets = 0.0, 0
    for first in range(0, len(rows), _EVALUATED_ROWS):
        batch = batch_of(rows[first : first + _EVALUATED_ROWS])
        count = int(batch.target_BT.sum())
        total += batch_loss(model, batch) * count
        targets += count
    return total / targets


def descend(method: Method, run: TextRun, *, steps: int, every: int, rows: int) -> list[dict[str, Any]]:
    """Take steps. Evaluate before the first one and every `every` steps. End if a loss is not finite."""
    batches = TrainingBatches(run.prepared.train, batch_rows=rows, seed=run.seed)
    points = [{"step": 0, "loss": method.loss(), "seconds": 0.0}]
    spent = 0.0
    for number in range(steps):
        begin = time.process_time()
        method.step(batches(number), number)
        spent += time.process_time() - begin
        if (number + 1) % every == 0 or number + 1 == steps:
            points.append({"step": number + 1, "loss": method.loss(), "seconds": round(spent, 3)})
            if not math.isfinite(points[-1]["loss"]):
                break
    return points


def best_rate(tried: Callable[[float], float], grid: tuple[float, ...]) -> float:
    """Return the rate with the lowest loss. The grid grows at its edges by up to `_EXTENSIONS` rates."""
    losses = {rate: tried(rate) for rate in grid}
    for _ in range(_EXTENSIONS):
        best = min(losses, key=lambda rate: losses[rate])
        if best not in (min(losses), max(losses)):
            break
        beyond = float(f"{best * (_GRID_FACTOR if best == max(losses) else 1 / _GRID_FACTOR):.3g}")
        losses[beyond] = tried(beyond)
    return min(losses, key=lambda rate: losses[rate])


def final_loss(contender: Contender, run: TextRun, model: Path, rate: float, *, steps: int) -> float:
    """Return the final loss of a trial with a step size, infinity if training diverged."""
    loss = float(
        descend(contender.make(run, model, rate), run, steps=steps, every=steps, rows=contender.rows)[-1][
            "loss"
        ]
    )
    return loss if math.isfinite(loss) else math.inf
