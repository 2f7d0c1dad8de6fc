"""Runs what the evidence lacks, takes up what another clone kept, and writes the page."""

import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.cells import Cells, Result, Settings
from benchmarks.evidence_archive import FOLDER as ARCHIVES
from benchmarks.evidence_archive import check_kept, expand, write_archives
from benchmarks.evidence_gradients import Gradients
from benchmarks.evidence_page import DATA, kept_cells, write_page
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
from permille.errors import InputError
from permille.evaluate.specification import Sweep, sweep_of
from permille.evaluate.sweep import open_results, run_sweep

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

    def restore(self, output: Path) -> None:
        """Take up the results that a page was made from; a sweep that has results here keeps those.

        Raises:
            InputError: they are damaged, or of other files, choices or procedure than these models
                and tasks have.
        """
        for stage in SWEEP_STAGES:  # in this order: `fractions` says what `flat` is
            for model in self.materials.models:
                for task in self.materials.tasks:
                    for unit in self.planned(stage, model, task):
                        self._restore(unit, output / ARCHIVES / f"{unit.name}.jsonl")
        for figure, settings, result in self._lacking(output):
            self._cells_of(settings).keep(figure, settings, result)

    def _restore(self, unit: Unit, archive: Path) -> None:
        results = self._results(unit)
        if results.exists() or not archive.exists():
            return
        sweep, restored = self._specified(unit), results.with_suffix(".restored")
        expand(archive, restored)
        open_results(sweep, restored)
        self._describe(unit)
        restored.replace(results)

    def check_kept(self, output: Path) -> None:
        """That a page would say no less than the one that is there; in the own folder it always may.

        Raises:
            InputError: the page there was made from results that are not here.
        """
        if output.absolute().is_relative_to(self.folder.absolute()):
            return
        check_kept(self.folder / "sweeps", output)
        if lacking := self._lacking(output):
            figure, settings, _ = lacking[0]
            raise InputError(
                f"expected every figure's data of {output / DATA} in {self.folder}, {len(lacking)} are not "
                f"there, such as {figure} {settings}: take them up with --restore {output}, or choose "
                "another --output"
            )

    def _lacking(self, output: Path) -> list[tuple[str, Settings, Result]]:
        """Figures' data of the page there that are not here."""
        return [cell for cell in kept_cells(output) if not self._cells_of(cell[1]).has(*cell[:2])]

    def page(self, output: Path) -> None:
        """Write page, data and figures of what there is, and the results themselves.

        Raises:
            InputError: as `check_kept`; nothing was written.
        """
        self.check_kept(output)
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
        write_archives(self.folder / "sweeps", output, [unit.name for unit in planned])
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
        sweep, results = self._specified(unit), self._results(unit)
        open_results(sweep, results)
        self._describe(unit)
        run_sweep(sweep, results, self._progress)

    def _describe(self, unit: Unit) -> None:
        """Write the file that says what a unit's results are of."""
        path = self._results(unit).with_suffix(".toml")
        part = path.with_suffix(".part")
        part.write_text(unit.toml(self.materials), encoding="utf-8")
        part.replace(path)

    def _results(self, unit: Unit) -> Path:
        return self.folder / "sweeps" / f"{unit.name}.jsonl"

    def _specified(self, unit: Unit) -> Sweep:
        return sweep_of(tomllib.loads(unit.toml(self.materials)), self.folder)

    def _cells(self, model: Path) -> Cells:
        return Cells(self.folder / f"cells-{model.name}.jsonl")

    def _cells_of(self, settings: Settings) -> Cells:
        name = f"cells-{settings['model']}" if "model" in settings else "memory"
        return Cells(self.folder / f"{name}.jsonl")

    def _progress(self, done: int, total: int, following: str) -> None:
        if following:
            print(f"[{done}/{total}] {following}", file=sys.stderr, flush=True)
            self.check_time()

    def _size(self, model: Path) -> Size:
        return QUICK if self._quick else size_for(model)

    def _fractions(self) -> Sequence[float]:
        return FRACTIONS[:1] if self._quick else FRACTIONS
