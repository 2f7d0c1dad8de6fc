"""How long until a held-out loss? The agent beside MeZO and first order: `make bench-time-to-loss`.

    PERMILLE_MODELS=DIR PERMILLE_DATA=DIR python -m permille_lab.learning.time_to_loss

One speaker of Shakespeare's plays stands for a user; held-out is the select split. `permille` is the agent
with its defaults. The others have 16 rows a step, as in the papers, and a step size from a grid that grows
while its best is on an edge, tried on another division of the text. MeZO and LoRA (r = 8, peft) train a dense
float32 model, LoRA the one that the package's codes decode to; `the same values, AdamW` takes the engine's
gradient of the masked weights. First order is evaluated after every step.
"""

import math
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch

from permille.engines.factory import AUTO, LIGHT_INT8
from permille.engines.interface import GradientEngine
from permille.models.loading import load_model
from permille.package.reader import Package
from permille.quantization import Scheme
from permille.zo.estimators import Batch
from permille_agent.embed import TrainingBatches, batch_of, mean_loss
from permille_lab.learning.mezo import Mezo
from permille_lab.learning.runs import TextRun, options_for, text_run
from permille_lab.measuring.cells import Cells, Result, settings_parser
from permille_lab.measuring.dense import batch_loss, dense_model
from permille_lab.measuring.dense import mean_loss as model_loss
from permille_lab.measuring.machine import machine
from permille_lab.measuring.model_packages import (
    DENSITIES,
    Sources,
    model_package,
    sources_from_environment,
)
from permille_lab.people.user_texts import Collection, Document, read_users

SPEAKER = "GLOUCESTER"
OURS = {"permille": AUTO, "permille, light-int8": LIGHT_INT8}
BATCH_ROWS = 16
_TUNING_SEED = 1000
"""Beside the seed of a run: another division of the text."""
_EVALUATIONS = 40
_GRID_FACTOR, _EXTENSIONS = 10**0.5, 4
_EVALUATED_ROWS = 16


class Method(Protocol):
    """What trains a model of its own."""

    def step(self, batch: Batch, number: int) -> None:
        """Make one step."""

    def loss(self) -> float:
        """Of the select split."""


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
    """AdamW on adapters of all linear layers, r = 8, over the weights that the package decodes to."""

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
    """AdamW on the package's own sparse values, by the engine's gradient."""

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


THEIRS: Mapping[str, tuple[Callable[[TextRun, Path, float], Method], tuple[float, ...]]] = {
    "MeZO": (DenseMezo, (1e-5, 3e-5, 1e-4, 3e-4, 1e-3)),
    "LoRA, AdamW": (Lora, (3e-4, 1e-3, 3e-3, 1e-2)),
    "the same values, AdamW": (SparseValues, (1e-3, 3e-3, 1e-2, 3e-2)),
}
"""How each is made, and the grid of its step sizes."""


def rows_loss(model: Any, run: TextRun) -> float:
    """Mean loss of a target token of the select split, as the agent's own."""
    rows = run.prepared.select
    total, targets = 0.0, 0
    for first in range(0, len(rows), _EVALUATED_ROWS):
        batch = batch_of(rows[first : first + _EVALUATED_ROWS])
        count = int(batch.target_BT.sum())
        total += batch_loss(model, batch) * count
        targets += count
    return total / targets


def descend(method: Method, run: TextRun, *, steps: int, every: int) -> list[dict[str, Any]]:
    """Make steps and evaluate before the first and after every `every`; ends where the loss is not finite."""
    batches = TrainingBatches(run.prepared.train, batch_rows=BATCH_ROWS, seed=run.seed)
    points = [{"step": 0, "loss": method.loss(), "seconds": 0.0}]
    spent = 0.0
    for number in range(steps):
        begin = time.perf_counter()
        method.step(batches(number), number)
        spent += time.perf_counter() - begin
        if (number + 1) % every == 0 or number + 1 == steps:
            points.append({"step": number + 1, "loss": method.loss(), "seconds": round(spent, 3)})
            if not math.isfinite(points[-1]["loss"]):
                break
    return points


def best_rate(tried: Callable[[float], float], grid: tuple[float, ...]) -> float:
    """The rate of the lowest loss; the grid goes on, by `_EXTENSIONS` at most, while that is on its edge."""
    losses = {rate: tried(rate) for rate in grid}
    for _ in range(_EXTENSIONS):
        best = min(losses, key=lambda rate: losses[rate])
        if best not in (min(losses), max(losses)):
            break
        beyond = float(f"{best * (_GRID_FACTOR if best == max(losses) else 1 / _GRID_FACTOR):.3g}")
        losses[beyond] = tried(beyond)
    return min(losses, key=lambda rate: losses[rate])


def measure_theirs(
    make: Callable[[TextRun, Path, float], Method],
    grid: tuple[float, ...],
    runs: tuple[TextRun, TextRun],
    model: Path,
    *,
    steps: int,
    trial_steps: int,
) -> Result:
    """A search on the second run's text, then a run on the first one's."""
    begin = time.perf_counter()

    def tried(rate: float) -> float:
        points = descend(make(runs[1], model, rate), runs[1], steps=trial_steps, every=trial_steps)
        loss = float(points[-1]["loss"])
        return loss if math.isfinite(loss) else math.inf

    rate = best_rate(tried, grid)
    search_s = time.perf_counter() - begin
    every = 1 if steps <= _EVALUATIONS * 2 else steps // _EVALUATIONS
    points = descend(make(runs[0], model, rate), runs[0], steps=steps, every=every)
    return {"points": points, "search_s": round(search_s, 1), "rate": rate, "machine": machine()}


def measure_ours(package: Package, documents: tuple[Document, ...], engine: str, *, seed: int, steps: int,
                 threads: int) -> Result:  # fmt: skip
    """A run of the agent with its defaults."""
    with tempfile.TemporaryDirectory() as folder:
        run = text_run(package, documents, Path(folder), seed=seed, threads=threads, engine=engine)
        found = run.train(options_for(package, seed=seed, steps=steps), Path(folder) / "run")
    return found | {"machine": machine()}


def _speeches(sources: Sources) -> tuple[Document, ...]:
    (found,) = [
        user.documents
        for user in read_users(sources.data, Collection.SHAKESPEARE).users
        if user.name == SPEAKER
    ]
    return found


def main() -> None:
    """Measure what is missing."""
    parser = settings_parser(__doc__, "time_to_loss")
    parser.add_argument("--model", choices=DENSITIES, action="append", help="only these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=600, help="of ours; MeZO has 2,000, first order 80")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sources = sources_from_environment()
    cells, documents = Cells(options.cells), _speeches(sources)
    for model in options.model or DENSITIES:
        common = {"model": model, "speaker": SPEAKER, "seed": options.seed, "threads": options.threads}
        for method, engine in OURS.items():
            scheme = Scheme.INT4 if engine == LIGHT_INT8 else Scheme.NF4
            package = model_package(sources, model, options.folder, scheme=scheme)
            run = partial(measure_ours, package, documents, engine, seed=options.seed, steps=options.steps,
                          threads=options.threads)  # fmt: skip
            cells.once("time_to_loss", common | {"method": method, "steps": options.steps}, run)
        package = model_package(sources, model, options.folder)
        with tempfile.TemporaryDirectory() as name:
            first, second = (
                text_run(package, documents, Path(name) / str(seed), seed=seed, threads=options.threads)
                for seed in (options.seed, options.seed + _TUNING_SEED)
            )
            for method, (make, grid) in THEIRS.items():
                steps, trial_steps = (2000, 200) if method == "MeZO" else (80, 20)
                measured = partial(measure_theirs, make, grid, (first, second), sources.models / model,
                                   steps=steps, trial_steps=trial_steps)  # fmt: skip
                cells.once("time_to_loss", common | {"method": method, "steps": steps}, measured)


if __name__ == "__main__":
    main()
