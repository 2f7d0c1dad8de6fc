"""Measure the losses of sparse models, for each way to prune and recover them: `make bench-sparse`.

    PERMILLE_MODELS=DIR PERMILLE_DATA=DIR python -m permille_lab.sparse

A cell is a model, a target (the share of zeros or a pattern), a way and a seed. Its result is the loss after
recovery, and for one-shot ways also the loss before. The texts that judge were used neither for pruning nor
for recovery. The seed draws the rows of calibration and recovery.

Adam's learning rates are searched once for each model and kind of adapter, at 60 % zeros, with the seed
`TUNING_SEED` and on the selection windows. Finished cells are not measured again. The most informative cells
come first.
"""

import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from permille.corpora.sequences import POOL, token_sequences
from permille.models.checkpoint import Checkpoint
from permille.models.gguf.folder import model_folder
from permille.models.loading import FileTokenizer, load_model
from permille.quantization.perplexity import perplexity
from permille_lab.measuring.cells import FOLDER, Cells, Result, Settings, settings_parser
from permille_lab.measuring.model_packages import SMOLLM2_FILE, Sources, sources_from_environment
from permille_lab.quantization.__main__ import texts
from permille_lab.sparse.adapters import RecoveryAdapter
from permille_lab.sparse.rounds import IterativePlan, IterativeText, iterate
from permille_lab.sparse.ways import (
    ABLATED,
    ABLATIONS,
    LONGER,
    ONE_SHOT,
    RANK,
    ROUNDS,
    STEPS,
    TABLE,
    Rates,
    Way,
    plan_of,
)
from permille_sparsify.plan import PruningPlan
from permille_sparsify.streaming import PruningText, prune_model

FIGURE, TUNING, DENSE = "sparse", "rates", "dense"
TARGETS = ("0.6", "2:4", "0.5", "0.7")
SEEDS = (0, 1, 2)
TUNING_SEED = 99
LENGTH, CALIBRATION, SELECTION = 128, 32, 32
SMOLLM2 = "SmolLM2-135M-Instruct"
JUDGED = 32
"""Number of windows of each text that judges."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, the text of its pruning and recovery, and the texts that judge it.

    Attributes:
        text: public text for calibration, recovery and selection.
        judged: texts of the reported losses.
        rows: number of rows in a step.
        tried: learning rates of Adam that the search tries.
        searched: number of steps of a run of the search.
    """

    model: str
    text: str
    judged: tuple[str, ...]
    rows: int
    tried: tuple[float, ...]
    searched: int
    targets: tuple[str, ...] = TARGETS
    ways: tuple[Way, ...] = (*TABLE, *ABLATIONS)
    seeds: tuple[int, ...] = SEEDS


CASES = (
    Case(
        model="stories260K-hf",
        text="tinystories",
        judged=("tinystories", "wikitext-2"),
        rows=8,
        tried=(0.01, 0.03, 0.1),
        searched=STEPS,
    ),
    Case(
        model="reference-7M",
        text="c4",
        judged=("wikitext-2", "boolq"),
        rows=4,
        tried=(0.003, 0.01, 0.03, 0.1),
        searched=STEPS // 3,
        ways=(Way.WANDA, Way.ITERATIVE, Way.SPARSEGPT, Way.MAGNITUDE, Way.UNIFORM, Way.ONE_ROUND, Way.DENSE),
    ),
    Case(
        model=SMOLLM2,
        text="c4",
        judged=("wikitext-2", "boolq"),
        rows=4,
        tried=(0.003, 0.01, 0.03),
        searched=STEPS // 3,
        targets=(ABLATED,),
        ways=(Way.WANDA, Way.ITERATIVE),
        seeds=(0,),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Material:
    """Token rows of one model and seed."""

    work: IterativeText
    judged: Mapping[str, NDArray[np.int64]]


def folder_of(sources: Sources, case: Case) -> Path:
    """Return the folder of a model. SmolLM2 is decoded from its file."""
    return model_folder(SMOLLM2_FILE, FOLDER) if case.model == SMOLLM2 else sources.models / case.model


@cache
def _rows(folder: Path, data: Path, text: str, drawn: tuple[int, int, int]) -> NDArray[np.int64]:
    number, skip, seed = drawn
    return token_sequences(FileTokenizer(folder), texts(data, text), number, LENGTH, seed, skip=skip)


def material(sources: Sources, case: Case, seed: int) -> Material:
    """Return the rows of a cell.

    Calibration, recovery, selection and judgement take consecutive parts of the text.
    """
    folder = folder_of(sources, case)

    def rows(text: str, number: int, skip: int, drawn_by: int) -> NDArray[np.int64]:
        return _rows(folder, sources.data, text, (number, skip, drawn_by))

    recovery = POOL * CALIBRATION
    selection = recovery + POOL * STEPS * case.rows
    last = selection + POOL * SELECTION
    return Material(
        work=IterativeText(
            calibration_NT=rows(case.text, CALIBRATION, 0, seed),
            recovery_MT=rows(case.text, STEPS * case.rows, recovery, seed),
            evaluation_ET=rows(case.text, SELECTION, selection, 0),
        ),
        judged={name: rows(name, JUDGED, last if name == case.text else 0, 0) for name in case.judged},
    )


def losses(model: Any, judged: Mapping[str, NDArray[np.int64]]) -> dict[str, float]:
    """Return the loss of each text, in nats per token."""
    return {name: round(perplexity(model, rows_NT)["loss"], 6) for name, rows_NT in judged.items()}


def measured(
    source: Checkpoint, work: Path, found: Material, plan: IterativePlan, *, one_shot: bool
) -> Result:
    """Return the result of a cell: the losses `recovered`, and a report of each round.

    Args:
        one_shot: also prune in one pass and return the losses `pruned`, before recovery.
    """
    begun = time.process_time()
    shutil.rmtree(work, ignore_errors=True)
    result: Result = {}
    if one_shot:
        alone = PruningPlan(method=plan.method, rates=plan.rate, pattern=plan.pattern)
        prune_model(source, work / "alone", PruningText(calibration_NT=found.work.calibration_NT), alone)
        result["pruned"] = losses(load_model(work / "alone"), found.judged)
    folder, rounds = iterate(source, work / "rounds", found.work, plan)
    linears = [row for report in rounds for row in report.linears][-len(rounds[-1].linears) :]
    result |= {
        "recovered": losses(load_model(folder), found.judged),
        "rounds": [
            {
                "rate": round(report.rate, 4),
                "rates": [round(rate, 4) for rate in report.rates],
                "loss": [report.loss_pruned, report.loss_merged],
                "loss_dense": report.loss_dense,
                "numbers": report.numbers,
                "norms": [round(norm, 4) for norm in report.norms],
            }
            for report in rounds
        ],
        "zeros": round(sum(row.zeros for row in linears) / sum(row.weights for row in linears), 5),
        "cpu_seconds": round(time.process_time() - begun, 1),
    }
    shutil.rmtree(work)
    return result


def tuned(cells: Cells, sources: Sources, case: Case, work: Path) -> Rates:
    """Return the best of the tried rates for each kind of adapter, by the loss on the selection windows."""
    best = {}
    for kind, way in ((RecoveryAdapter.LORA, Way.WANDA), (RecoveryAdapter.POOLING, Way.WANDA_POOLING)):
        found: dict[float, float] = {}
        for rate in case.tried:
            plan = plan_of(way, ABLATED, TUNING_SEED, Rates(lora=rate, pooling=rate))
            recovery = replace(plan.recovery, steps=case.searched // LONGER, rows=case.rows)
            plan = replace(plan, recovery=recovery)

            def measure(plan: IterativePlan = plan) -> Result:
                rows = replace(material(sources, case, TUNING_SEED), judged={})
                return measured(Checkpoint(folder_of(sources, case)), work, rows, plan, one_shot=False)

            settings = {"model": case.model, "adapter": kind.value, "rate": rate, "steps": case.searched}
            found[rate] = cells.once(TUNING, settings, measure)["rounds"][-1]["loss"][1]
        best[kind] = min(found, key=lambda rate: found[rate])
    return Rates(lora=best[RecoveryAdapter.LORA], pooling=best[RecoveryAdapter.POOLING])


def settings_of(case: Case, target: str, way: Way, seed: int) -> Settings:
    """Return the settings that identify a cell."""
    return {
        "model": case.model,
        "target": target,
        "way": way.value,
        "seed": seed,
        "size": [STEPS, case.rows, LENGTH, RANK, ROUNDS, LONGER],
    }


def planned() -> Iterator[tuple[Case, int, str, Way]]:
    """Yield the cells. The first ones are 60 % and 2:4 of every seed.

    Of the second model, only Wanda and the iterative way come first.
    """
    for first in (True, False):
        for seed in SEEDS:
            for case in (case for case in CASES if seed in case.seeds):
                for target in case.targets:
                    for way in case.ways if target == ABLATED else TABLE:
                        early = target in TARGETS[:2] and (
                            case is CASES[0] or way in (Way.WANDA, Way.ITERATIVE)
                        )
                        if early is first:
                            yield case, seed, target, way


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Inputs of the cells, the results file, and the folder of temporary models."""

    cells: Cells
    sources: Sources
    work: Path

    def cell(self, case: Case, seed: int, target: str, way: Way) -> None:
        """Measure a cell if it is missing. Before it, search the rates and measure the dense model."""
        rates = tuned(self.cells, self.sources, case, self.work)
        source = Checkpoint(folder_of(self.sources, case))

        def dense() -> Result:
            return {"losses": losses(load_model(source.folder), material(self.sources, case, seed).judged)}

        def sparse() -> Result:
            plan = plan_of(way, target, seed, rates)
            plan = replace(plan, recovery=replace(plan.recovery, rows=case.rows))
            rows = material(self.sources, case, seed)
            return measured(source, self.work, rows, plan, one_shot=way in ONE_SHOT)

        self.cells.once(DENSE, {"model": case.model, "windows": JUDGED}, dense)
        self.cells.once(FIGURE, settings_of(case, target, way, seed), sparse)


def main() -> None:
    """Measure the missing cells."""
    parser = settings_parser(__doc__, FIGURE)
    parser.add_argument("--models", nargs="+", default=[case.model for case in CASES])
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--targets", nargs="+", default=list(TARGETS))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(
        cells=Cells(options.cells), sources=sources_from_environment(), work=options.folder / "sparse"
    )
    for case, seed, target, way in planned():
        if case.model in options.models and seed in options.seeds and target in options.targets:
            bench.cell(case, seed, target, way)


if __name__ == "__main__":
    main()
