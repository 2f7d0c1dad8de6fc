"""Measure how few weights hold most of a gradient (the sensitive-sparse paper's figures 2 and 3).

    PERMILLE_DATA=DIR python -m permille_lab.evidence.coverage

Figure 2 is the share of a tensor's squared gradients that the largest ones hold. Figure 3 is the share that a
mask from C4 holds. The model is not trained. A stopped run continues with the next text.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from permille.choices import MaskMethod
from permille.models.gguf.folder import model_folder
from permille.sensitivity.fisher import fisher_scores
from permille.sensitivity.masks import Mask, select_mask
from permille_lab.evaluate.cells import Bench
from permille_lab.evaluate.methods import method
from permille_lab.evaluate.outcomes import Cell
from permille_lab.evaluate.specification import Base
from permille_lab.evidence.paper import MODEL, ROWS, materials, named, planned
from permille_lab.measuring.cells import FOLDER, RESULTS, Cells, Result
from permille_lab.measuring.model_packages import SMOLLM2_FILE
from permille_lab.measuring.tables import markdown
from permille_lab.models import storage
from permille_lab.tasks.examples import Task
from permille_lab.tasks.scoring import training_batch

DENSITIES = (1e-4, 1e-3, 1e-2)
EXAMPLES = 32
"""Number of examples of a task, and of sequences of C4."""
_FILE = "coverage.jsonl"
_CORPUS = "c4"

Scores = Mapping[str, NDArray[np.float32]]
"""Squared gradients of each linear, summed over the examples."""


def concentration(scores: Scores, density: float) -> list[float]:
    """Return the share of each tensor's squared gradients that its largest ones hold."""
    return [
        _held(scores, name, index) for name, index in select_mask(scores, MaskMethod.FISHER, density).items()
    ]


def coverage(scores: Scores, mask: Mask) -> float:
    """Return the share of all squared gradients that a mask holds."""
    held = sum(float(scores[name].reshape(-1)[index].sum(dtype=np.float64)) for name, index in mask.items())
    return held / sum(float(each.sum(dtype=np.float64)) for each in scores.values())


def _held(scores: Scores, name: str, index: NDArray[np.uint32]) -> float:
    return coverage({name: scores[name]}, {name: index})


def measured(scores: Scores, others: Mapping[str, Mapping[float, Mask]]) -> Result:
    """Return the shares of the largest squared gradients, and those of other masks, by density."""
    found: Result = {}
    for density in DENSITIES:
        of_tensors = concentration(scores, density)
        found[f"{density:g}"] = {
            "tensors": [float(np.mean(of_tensors)), float(np.std(of_tensors))],
            "own": coverage(scores, select_mask(scores, MaskMethod.FISHER, density)),
            **{name: coverage(scores, masks[density]) for name, masks in others.items()},
        }
    return found


def coverage_tables(folder: Path) -> dict[str, str]:
    """Return the page's tables of both figures by their names in the template."""
    cells = Cells(folder / _FILE).of("coverage")
    rows = [
        {
            "gradients of": settings["text"],
            "weights": f"{float(density):.2%}",
            "largest of each tensor, mean and deviation": "{:.0%} ± {:.0%}".format(*shares["tensors"]),
            "its own mask": f"{shares['own']:.1%}",
            "mask of C4": "" if settings["text"] == _CORPUS else f"{shares['c4']:.1%}",
            "largest weights": f"{shares['outliers']:.2%}",
            "random weights": f"{shares['random']:.2%}",
        }
        for settings, result in cells
        for density, shares in result.items()
    ]
    return {"coverage": markdown(rows) or "Not measured yet.", "examples": str(EXAMPLES)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the missing texts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=RESULTS / "paper", help="results")
    parser.add_argument("--gguf", type=Path, default=SMOLLM2_FILE, help="the model")
    options = parser.parse_args(arguments)
    model = named(model_folder(options.gguf, FOLDER))
    cells = Cells(options.folder / _FILE)

    def bench(task: str) -> Bench:
        unit = next(unit for unit in planned(model) if unit.name == f"{task}-bf16-tuned-first-order")
        return Bench(unit.sweep(materials()))

    @cache
    def scores_of_corpus() -> Scores:
        sequences_NT = bench("sst2").corpus_sequences(model)[:EXAMPLES]
        return dict(fisher_scores(storage.stored(model, Base.BF16), sequences_NT))

    @cache
    def masks() -> dict[str, dict[float, Mask]]:
        own = storage.stored(model, Base.BF16)
        return {
            "c4": {at: select_mask(scores_of_corpus(), MaskMethod.FISHER, at) for at in DENSITIES},
            "outliers": {at: storage.weight_mask(own, MaskMethod.MAGNITUDE, at, 0) for at in DENSITIES},
            "random": {at: storage.weight_mask(own, MaskMethod.RANDOM, at, 0) for at in DENSITIES},
        }

    def of_task(task: str) -> Result:
        found = bench(task)
        cell = Cell(model=model, base=Base.BF16, method=method("zero-shot"), task=Task(task), seed=0)
        singles = [training_batch([item]) for item in found.data(cell, 0).train[:EXAMPLES]]
        return measured(storage.task_scores(storage.stored(model, Base.BF16), singles), masks())

    runs: dict[str, Callable[[], Result]] = {_CORPUS: lambda: measured(scores_of_corpus(), masks())}
    runs |= {task: partial(of_task, task) for task in ROWS}
    for text, run in runs.items():
        cells.once("coverage", {"model": MODEL, "text": text, "examples": EXAMPLES}, run)


if __name__ == "__main__":
    main()
