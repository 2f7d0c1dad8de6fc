"""The comparisons of the papers, repeated: sweeps, gradients, times; then the page with the verdicts.

    python -m benchmarks.evidence --models DIR/stories260K-hf DIR/reference-7M
    python -m benchmarks.evidence --stage table --model stories260K-hf --minutes 60
    python -m benchmarks.evidence --page

Stop it whenever you like: what is finished is durable, and the same command goes on. The page is written at
the end of each call (`--page` alone writes it from what there is). Two calls may run at once if no model is
common to both.

Files: PERMILLE_MODELS names a folder of models, PERMILLE_DATA one of tasks (`tasks/BoolQ/val.jsonl`, ...) and
text; or `--materials FILE`, a TOML file with `models`, `corpus` and `[tasks.<name>]` like a sweep's.

Hours of one core, reckoned from cells measured on a shared Zen 3 core with AVX2 (a run and its test on SST-2:
20 s with stories260K, 25 s with reference-7M for a mask, 45 s for an adapter, 100 s for all weights; a search
is 11 to 15 shorter runs, of `fractions` 4 to 7); `steps` and `memory` are minutes; a task with passages was
not timed to its end, the first trained methods of RTE took reference-7M some eight minutes each:

    stage                   stories260K    reference-7M
    coverage, transfer              0.1             0.1
    table (first task)              1.3             2.2
    fractions (first task)          1.0             1.3
    flat (first task)               0.6             0.9
    queries (first task)            0.8             1.2
    schemes (first task)            0.3             0.4
"""

import argparse
import os
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.cells import Cells
from benchmarks.evidence_gradients import Gradients
from benchmarks.evidence_materials import find_materials
from benchmarks.evidence_page import write_page
from benchmarks.evidence_plan import (
    DENSITY,
    FRACTIONS,
    QUERIES,
    QUICK,
    STATIC,
    SWEEP_STAGES,
    Materials,
    Size,
    Unit,
    size_for,
    units,
)
from benchmarks.evidence_records import by_density, flat_density, read_records
from benchmarks.evidence_steps import measure_memory, measure_steps
from permille.errors import PermilleError
from permille.evaluate.specification import Sweep, sweep_of
from permille.evaluate.sweep import open_results, run_sweep

STAGES = ("coverage", "transfer", "table", "fractions", "flat", "queries", "schemes", "steps", "memory")
FOLDER, QUICK_FOLDER = Path("build/evidence"), Path("build/evidence-quick")
_CELL_STAGES = ("coverage", "transfer", "steps")
"""Of a model and a task, and no sweeps."""
_FIRST_TASK_ONLY = frozenset({"fractions", "queries", "schemes", "steps"})


class TimeIsUpError(Exception):
    """No new cell may begin."""


class Runner:
    """Runs stages into a folder, whose name says nothing of the models: they may be added to."""

    def __init__(
        self,
        materials: Materials,
        folder: Path,
        *,
        quick: bool = False,
        minutes: float | None = None,
        shape: str = "1.1B",
        layers: int | None = None,
        threads: int = 1,
    ) -> None:
        self.materials = materials
        self.folder = folder
        self._quick = quick
        self._shape, self._layers, self._threads = shape, layers, threads
        self._end = None if minutes is None else time.monotonic() + 60 * minutes

    def run(self, stage: str, model: Path, task: str) -> None:
        """What a stage lacks.

        Raises:
            TimeIsUpError: before the next cell.
            InputError: a model, a task's file or what a former run left is not as expected.
        """
        if not self._takes(stage, task):
            return
        if stage in SWEEP_STAGES:
            for unit in self.planned(stage, model, task):
                self._sweep(unit)
        elif stage in ("coverage", "transfer"):
            self._gradients(stage, model, task)
        elif stage == "steps":
            self._steps(model, task)

    def memory(self) -> None:
        """The stage that needs no model.

        Raises:
            TimeIsUpError: before the next cell.
        """
        few = {"sequences": (1,), "tokens": (8,)} if self._quick else {}
        measure_memory(
            Cells(self.folder / "memory.jsonl"),
            self.folder / "random",
            shape="tiny" if self._quick else self._shape,
            layers=self._layers,
            threads=self._threads,
            check_time=self.check_time,
            **few,
        )

    def planned(self, stage: str, model: Path, task: str) -> list[Unit]:
        """The sweeps of a stage; none where it waits for another stage, or for another density."""
        if not self._takes(stage, task):
            return []
        density = self.flat(model) if stage == "flat" else DENSITY
        if stage == "flat" and density in (None, DENSITY):
            return []
        return units(
            stage, model, task, self._size(model), density=density or DENSITY, fractions=self._fractions()
        )

    def flat(self, model: Path) -> float | None:
        """Where the model's curve is flat, once the fractions and the table's part of them are finished."""
        task = next(iter(self.materials.tasks))
        planned = self.planned("fractions", model, task)
        names = {unit.name for unit in planned}
        records = [r for r in read_records(self.folder) if r["stage"] == "table" or r["unit"] in names]
        own = [r for r in by_density(records) if (r["model"], r["task"]) == (model.name, task)]
        of_table = {r["seed"] for r in own if (r["stage"], r["method"]) == ("table", STATIC[0])}
        cells = sum(len(unit.choices["methods"]) * len(unit.choices["seeds"]) for unit in planned)
        done = sum(record["stage"] == "fractions" for record in own)
        if done < cells or not of_table.issuperset(self._size(model).seeds):
            return None
        return flat_density(records, model.name, task)

    def page(self, output: Path) -> None:
        """Write page, data and figures of what there is."""
        models = {model.name: model for model in self.materials.models}
        planned = [
            unit
            for stage in SWEEP_STAGES
            for model in self.materials.models
            for task in self.materials.tasks
            for unit in self.planned(stage, model, task)
        ]
        waiting = {
            f"`flat` of {model.name}": "waits for `fractions` and `table`, which say where the curve is flat"
            for model in self.materials.models
            if self.flat(model) is None
        }
        waiting |= self._missing_cells()
        cells = [
            cell
            for path in (*sorted(self.folder.glob("cells-*.jsonl")), self.folder / "memory.jsonl")
            for cell in Cells(path)
        ]
        write_page(self.folder, output, planned, models, cells=cells, waiting=waiting, queries=QUERIES)

    def _takes(self, stage: str, task: str) -> bool:
        """Whether a stage is of this task: some are of the first one only."""
        return stage not in _FIRST_TASK_ONLY or task == next(iter(self.materials.tasks))

    def _missing_cells(self) -> dict[str, str]:
        """Cells of `_CELL_STAGES` that there are not yet, by name, with the reason."""
        missing = {}
        for model in self.materials.models:
            done = {(stage, at["model"], at["task"]) for stage, at, _ in self._cells(model)}
            for task in self.materials.tasks:
                for stage in _CELL_STAGES:
                    if self._takes(stage, task) and (stage, model.name, task) not in done:
                        missing[f"`{stage}` of {model.name}, {task}"] = "not measured"
        return missing

    def check_time(self) -> None:
        """
        Raises:
            TimeIsUpError: the minutes are over.
        """
        if self._end is not None and time.monotonic() >= self._end:
            raise TimeIsUpError

    def _gradients(self, stage: str, model: Path, task: str) -> None:
        size = self._size(model)
        unit = self.planned("table", model, task)[0]
        # The same examples whatever the table's sizes: what is finished stays comparable.
        unit = replace(unit, choices=dict(unit.choices) | {"sizes": size.sizes})
        settings = {"model": model.name, "task": task, "examples": 4 if self._quick else 64}
        if stage == "transfer":
            settings["steps"] = size.fo_steps

        def measure() -> dict[str, object]:
            self.check_time()
            gradients = Gradients(self._specified(unit), unit, examples=int(settings["examples"]))
            return gradients.coverage() if stage == "coverage" else gradients.transfer(size.fo_steps)

        self._cells(model).once(stage, settings, measure)

    def _steps(self, model: Path, task: str) -> None:
        unit = self.planned("table", model, task)[0]
        size, rounds = self._size(model), 1 if self._quick else 7
        settings = {"model": model.name, "task": task, "density": DENSITY, "rounds": rounds}

        def measure() -> dict[str, object]:
            self.check_time()
            return measure_steps(
                model,
                self.materials.corpus,
                Gradients(self._specified(unit), unit).batch(0),
                self.folder / "packages",
                density=DENSITY,
                sequences=size.corpus_sequences,
                length=size.corpus_tokens,
                rounds=rounds,
                threads=self._threads,
            )

        self._cells(model).once("steps", settings | {"threads": self._threads}, measure)

    def _sweep(self, unit: Unit) -> None:
        """Run a unit, its file beside its results.

        The file says what the results are of (`read_records`): it is written after these were found to be of
        this very sweep, so that one that is refused leaves both as they were.
        """
        sweep, results = self._specified(unit), self.folder / "sweeps" / f"{unit.name}.jsonl"
        open_results(sweep, results)
        part = results.with_suffix(".part")
        part.write_text(unit.toml(self.materials), encoding="utf-8")
        part.replace(results.with_suffix(".toml"))
        run_sweep(sweep, results, self._progress)

    def _specified(self, unit: Unit) -> Sweep:
        return sweep_of(tomllib.loads(unit.toml(self.materials)), self.folder)

    def _cells(self, model: Path) -> Cells:
        return Cells(self.folder / f"cells-{model.name}.jsonl")

    def _progress(self, done: int, total: int, following: str) -> None:
        if following:
            print(f"[{done}/{total}] {following}", file=sys.stderr, flush=True)
            self.check_time()

    def _size(self, model: Path) -> Size:
        return QUICK if self._quick else size_for(model)

    def _fractions(self) -> Sequence[float]:
        return FRACTIONS[:1] if self._quick else FRACTIONS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, then write the page. Exit status: 0 done or out of minutes, 1 refused."""
    options = _parser().parse_args(arguments)
    try:
        materials = find_materials(options.materials, options.models)
        folder = options.folder or (QUICK_FOLDER if options.quick else FOLDER)
        runner = Runner(
            materials,
            folder,
            quick=options.quick,
            minutes=options.minutes,
            shape=options.shape,
            layers=options.layers,
            threads=options.threads,
        )
        try:
            _run(runner, options)
        except TimeIsUpError:
            print("the minutes are over; the same command goes on", file=sys.stderr)
        runner.page(options.output or folder / "page")
    except PermilleError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    return 0


def _run(runner: Runner, options: argparse.Namespace) -> None:
    if options.page:
        return
    wanted = options.stage or STAGES
    for model in runner.materials.models:
        if options.model not in (None, model.name):
            continue
        for stage in wanted:
            for task in runner.materials.tasks:
                if options.task in (None, task):
                    runner.run(stage, model, task)
    if "memory" in wanted:
        runner.memory()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, help=f"results and sweeps; default: {FOLDER}, quick {QUICK_FOLDER}"
    )
    parser.add_argument("--output", type=Path, help="of the page; default: FOLDER/page")
    parser.add_argument("--materials", type=Path)
    parser.add_argument("--models", type=Path, nargs="+", help="transformers folders")
    parser.add_argument("--model", help="only this one, by name")
    parser.add_argument("--task", help="only this one")
    parser.add_argument("--stage", choices=STAGES, action="append")
    parser.add_argument("--minutes", type=float, help="begin no new cell after these")
    parser.add_argument("--quick", action="store_true", help="a few steps of all: numbers mean nothing")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--shape", default="1.1B", help="of the memory figure; see random_packages")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    return parser


if __name__ == "__main__":
    sys.exit(main())
