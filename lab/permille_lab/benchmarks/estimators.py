"""Which estimator, with which directions: held-out loss at the same number of row passes and of seconds.

    PERMILLE_MODELS=DIR PERMILLE_DATA=DIR python -m permille_lab.benchmarks.estimators --minutes 30 --processes 2

Every contender trains every model on every kind of text, three seeds each (a seed is also another person or
slice of text), after the same number of tuning trials. The budget is so large that all fits into `--minutes`:
the pace of each model is measured once and kept. What was measured is kept in `--cells`, one line each, so
that a run which was stopped, or stopped itself when its time was over, goes on. `--quick` is a smoke test.

Shares of a package's masked weights and powers of two from Fisher scores are made from public text (C4), never from what the contenders read.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from permille.package.blobs import BlobFolder
from permille.package.reader import Package
from permille.zo.header import EstimatorKind
from permille.zo.steps import take_step
from permille_lab.benchmarks.cells import Cells, Result, Settings
from permille_lab.benchmarks.estimator_page import FIGURE, page
from permille_lab.benchmarks.estimator_runs import (
    EVALUATIONS,
    TRIAL_SHARE,
    TRIALS,
    Contender,
    make_run,
    measure,
)
from permille_lab.benchmarks.estimator_texts import TEXTS, public_sequences, write_text
from permille_lab.benchmarks.model_packages import Sources, package_of_model, sources_from_environment

PACE = "estimators pace"
ROW_TOKENS = 64
BASIS_SEQUENCES = 128
# Share of the time for each model: row passes of the larger one take longer.
MODELS = {"stories260K-hf": (0.01, 0.25), "reference-7M": (0.001, 0.75)}
SEEDS = (0, 1, 2)
# What dearer passes, directions and updates take on top of the steps' passes, roughly.
OVERHEAD = 1.2
LEAST_PASSES = 128

SPSA, ONE_SIDED, SPLIT, FORWARD = (
    EstimatorKind.SPSA,
    EstimatorKind.ONE_SIDED,
    EstimatorKind.SPLIT,
    EstimatorKind.FORWARD,
)
CONTENDERS = (
    Contender(estimator=SPSA, queries=8),
    Contender(estimator=ONE_SIDED, queries=16),
    Contender(estimator=SPLIT, queries=15),
    Contender(estimator=FORWARD, queries=8),
    Contender(estimator=SPSA, queries=8, scaling=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What one measurement is of."""

    model: str
    text: str
    seed: int
    contender: Contender

    def settings(self) -> Settings:
        """As it is known in the file."""
        contender = asdict(self.contender) | {"estimator": self.contender.estimator.value}
        return {"model": self.model, "text": self.text, "seed": self.seed, **contender}


def cells_of(models: list[str], texts: list[str], seeds: list[int]) -> Iterator[Cell]:
    """Seed by seed, so that a run which ends early has compared everything at least once."""
    for seed, model, text, contender in product(seeds, models, texts, CONTENDERS):
        yield Cell(model=model, text=text, seed=seed, contender=contender)


def layered_model_package(sources: Sources, model: str, folder: Path) -> Package:
    """The model's package with exponents, made once in `folder`."""
    known = folder / f"{model}.layered"
    blobs = folder / "blobs"
    if not known.exists():
        # Here, so that the processes which measure need no torch.
        from permille.models.loading import load_model
        from permille.sensitivity.gradients import masked_gradients
        from permille.sensitivity.scores import fisher_exponents
        from tests.packages import layered_package

        folder.mkdir(parents=True, exist_ok=True)
        source = sources.models / model
        package = package_of_model(source, blobs, sources.corpus, density=MODELS[model][0])
        mask = {tensor.name: package.mask(tensor.name) for tensor in package.manifest.tensors}
        sequences_NT = public_sequences(source / "tokenizer.json", sources.corpus, BASIS_SEQUENCES, 128)
        gradients_NK = masked_gradients(load_model(source), sequences_NT, mask)
        scores_K = (gradients_NK.astype(np.float64) ** 2).mean(axis=0).astype(np.float32)
        package = layered_package(package, exponents_K=fisher_exponents(scores_K))
        known.write_text(package.digest)
    return Package.open(BlobFolder(blobs), known.read_text())


def measured(folder: Path, cell: Cell, passes: int) -> Result:
    """One cell, in a process of its own."""
    sources = sources_from_environment()
    package = layered_model_package(sources, cell.model, folder)
    path = folder / f"{cell.text}-{cell.seed}-{os.getpid()}.jsonl"
    text = write_text(sources, cell.text, cell.seed, path)
    try:
        return measure(
            package, text, cell.contender, seed=cell.seed, row_tokens=ROW_TOKENS, passes=passes
        ) | {"passes": passes}
    finally:
        path.unlink()


def pace(sources: Sources, model: str, folder: Path) -> Result:
    """Processor seconds of a row pass, by a few steps of two-sided differences."""
    from permille.engines.factory import open_engine

    package = layered_model_package(sources, model, folder)
    text = write_text(sources, "speeches", 0, folder / f"{model}-pace.jsonl")
    contender = CONTENDERS[0]
    engine = open_engine(package, threads=1)
    run = make_run(package, engine, text, contender, seed=0, row_tokens=ROW_TOKENS, passes=1)
    header = run.setup.header(seed=0, epsilon=1e-3, total_steps=4)
    s_K = np.zeros(header.k, dtype=np.int64)
    seconds = []
    for step in range(4):
        began = time.process_time()
        take_step(
            engine,
            run.setup.batches(step),
            run.setup.descent(header),
            s_K,
            step,
            clip=None,
        )
        seconds.append(time.process_time() - began)
    text.unlink()
    rows = (EVALUATIONS + 1) * len(run.held_out) + TRIALS * len(run.setup.prepared.select)
    return {
        "pass_s": min(seconds[1:]) / (2 * contender.queries * contender.batch_rows),
        "evaluation_passes": rows,
    }


def budget(pass_s: float, evaluation_passes: int, *, seconds: float, cells: int) -> int:
    """Row passes of each cell's steps, so that all cells, tuned and evaluated, take about `seconds`."""
    steps = seconds / cells / pass_s - evaluation_passes
    return max(LEAST_PASSES, int(steps / OVERHEAD / (1 + TRIALS * TRIAL_SHARE)))


def run_cells(
    cells: Cells, todo: list[tuple[Cell, int]], *, folder: Path, processes: int, end: float
) -> None:
    """Measure what is missing, several at a time; after `end` (monotonic seconds) nothing new is begun."""
    # One thread each: they share the machine, and seconds are compared between them.
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    waiting = iter(todo)
    with ProcessPoolExecutor(max_workers=processes, mp_context=get_context("spawn")) as pool:
        running: dict[Future[Result], Cell] = {}
        while True:
            while len(running) < processes and time.monotonic() < end:
                cell, passes = next(waiting, (None, 0))
                if cell is None:
                    break
                running[pool.submit(measured, folder, cell, passes)] = cell
            if not running:
                return
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                cells.once(FIGURE, running.pop(future).settings(), future.result)


def main() -> int:
    """Measure what is missing; write the page where it is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("build/bench/estimators"))
    parser.add_argument("--cells", type=Path, help="default: in the folder, quick ones apart")
    parser.add_argument("--model", choices=MODELS, action="append", help="only these")
    parser.add_argument("--text", choices=TEXTS, action="append", help="only these")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--quick", action="store_true", help="one model, one text, one seed, few passes")
    parser.add_argument("--output", type=Path, help="folder for estimators.json and estimators.md")
    arguments = parser.parse_args()
    end = time.monotonic() + 60 * arguments.minutes
    sources = sources_from_environment()
    models = arguments.model or list(MODELS)
    texts, seeds = arguments.text or list(TEXTS), arguments.seeds
    if arguments.quick:
        models, texts, seeds = models[:1], texts[:1], seeds[:1]
    name = "quick.jsonl" if arguments.quick else "cells.jsonl"
    cells = Cells(arguments.cells or arguments.folder / name)
    todo = []
    passes = {model: _passes(cells, sources, model, models, texts, seeds, arguments) for model in models}
    for cell in cells_of(models, texts, seeds):
        if not cells.has(FIGURE, cell.settings()):
            todo.append((cell, passes[cell.model]))
    run_cells(cells, todo, folder=arguments.folder, processes=arguments.processes, end=end)
    if arguments.output is None:
        sys.stdout.write(page(cells))
        return 0
    arguments.output.mkdir(parents=True, exist_ok=True)
    rows = [{"settings": settings, "result": result} for settings, result in cells.of(FIGURE)]
    (arguments.output / "estimators.json").write_text(json.dumps(rows, indent=1) + "\n")
    (arguments.output / "estimators.md").write_text(page(cells))
    return 0


def _passes(
    cells: Cells,
    sources: Sources,
    model: str,
    models: list[str],
    texts: list[str],
    seeds: list[int],
    arguments: argparse.Namespace,
) -> int:
    """The budget of a model's cells: chosen once, because cells are compared with each other."""

    def chosen() -> Result:
        found = pace(sources, model, arguments.folder)
        share = MODELS[model][1] / sum(MODELS[name][1] for name in models)
        if arguments.quick:
            return found | {"passes": LEAST_PASSES}
        seconds = 60 * arguments.minutes * arguments.processes * share
        count = len(texts) * len(seeds) * len(CONTENDERS)
        return found | {"passes": budget(**found, seconds=seconds, cells=count)}

    result: dict[str, Any] = cells.once(PACE, {"model": model, "quick": arguments.quick}, chosen)
    return int(result["passes"])


if __name__ == "__main__":
    sys.exit(main())
