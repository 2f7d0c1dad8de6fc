"""Runs what the evidence lacks, takes up what another clone kept, and writes the page."""

import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cells import Cells
from benchmarks.evidence_archive import FOLDER as ARCHIVES
from benchmarks.evidence_archive import archives, take_up, write_archives
from benchmarks.evidence_cells import CELL_STAGES, FigureCells
from benchmarks.evidence_page import DATA, kept, write_page
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
from benchmarks.evidence_prior import FIGURE as PRIOR
from benchmarks.evidence_prior import Learned, learned
from benchmarks.evidence_records import by_density, flat_density, identity, read_records, read_tunings
from benchmarks.evidence_steps import measure_memory
from permille.errors import InputError
from permille.evaluate.outcomes import Json
from permille.evaluate.prompts import Task
from permille.evaluate.specification import Sweep, sweep_of
from permille.evaluate.sweep import run_sweep
from permille.evaluate.sweep_results import open_results
from permille.files import write_atomic

_FIRST_TASK_ONLY = frozenset({"fractions", "queries", "schemes", "steps"})
_IF_LEARNED = frozenset({"table", "flat"})
"""Stages of every task, which leave out what says no more than the first task does."""


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
        self.cells = FigureCells(
            folder=folder,
            materials=materials,
            specified=self._specified,
            check_time=self.check_time,
            quick=quick,
            threads=threads,
        )

    def run(self, stage: str, model: Path, task: str) -> None:
        """What a stage lacks.

        Raises:
            TimeIsUpError: before the next cell.
            InputError: a model, a task's file or what a former run left is not as expected.
        """
        if not self._takes(stage, task):
            return
        if stage in SWEEP_STAGES:
            if stage in _IF_LEARNED and not self._is_first(task):
                self.run(PRIOR, model, task)  # seconds, for what may be hours
            for unit in self.planned(stage, model, task):
                if self.wanted([unit]):  # asked again: the first ones, the references, decide on the others
                    self._sweep(unit)
        elif stage in CELL_STAGES:
            self.cells.measure(stage, self._references(model, task), self._size(model))

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
        """The sweeps of a stage, worth it or not; none where it waits for another stage or density."""
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

    def wanted(self, planned: Sequence[Unit]) -> list[Unit]:
        """Without what says no more than the first task does: methods on a task that first order is not
        shown to learn. The references are what that is known by."""
        places = dict.fromkeys((unit.model, unit.task) for unit in planned if unit.stage in _IF_LEARNED)
        records = read_records(self.folder) if any(not self._is_first(task) for _, task in places) else []
        left = set()
        for model, task in places:
            known = None if self._is_first(task) else self.learned(model, task, records)
            if known is not None and not known.shown:
                left.add((model, task))
        return [
            unit
            for unit in planned
            if unit.stage not in _IF_LEARNED
            or (unit.model, unit.task) not in left
            or unit.name == self._references(unit.model, unit.task).name
        ]

    def learned(self, model: Path, task: str, records: Sequence[Json]) -> Learned | None:
        """What first-order training shows of a task; None while it is not known, and of texts."""
        references = self._references(model, task)
        own = [record for record in records if record["unit"] == references.name]
        return learned(self.cells.guess(references), own, len(self._size(model).seeds))

    def _priors(self) -> dict[tuple[str, str], float]:
        """Losses of the guesses, of tasks that have one."""
        found = {
            (model.name, task): self.cells.guess(self._references(model, task))
            for model in self.materials.models
            for task in self.materials.tasks
        }
        return {at: guess["loss"] for at, guess in found.items() if guess and guess["loss"] is not None}

    def _references(self, model: Path, task: str) -> Unit:
        return self.planned("table", model, task)[0]

    def _is_first(self, task: str) -> bool:
        return task == next(iter(self.materials.tasks))

    def restore(self, output: Path) -> None:
        """Take up the results that a page was made from, where there are none here or a part of them.

        Figures' data are known by the names of model and task alone.

        Raises:
            InputError: there are none; or they are damaged, or of other files, choices or version than these
                models and tasks have.
        """
        found, figures = archives(output), kept(output).cells
        if not found and not (output / DATA).exists():
            raise InputError(f"expected results of a page in {output}, found neither {ARCHIVES} nor {DATA}")
        taken = 0
        for stage in SWEEP_STAGES:  # in this order: `fractions` says what `flat` is
            for model in self.materials.models:
                for task in self.materials.tasks:
                    planned = [unit for unit in self.planned(stage, model, task) if unit.name in found]
                    taken += sum(self._take_up(unit, found.pop(unit.name)) for unit in planned)
        models = {None, *(model.name for model in self.materials.models)}
        for figure, at, result in figures:
            own = self.cells.of_settings(at)
            if at.get("model") in models and not own.has(figure, at):
                own.keep(figure, at, result)
        others = f"; of no sweep here: {', '.join(found)}" if found else ""
        print(f"took up {taken} cells of {output}{others}", file=sys.stderr)

    def _take_up(self, unit: Unit, archive: Path) -> int:
        def check(restored: Path) -> None:
            open_results(self._specified(unit), restored)
            self._describe(unit)  # before it counts: results that nothing describes are none

        return take_up(archive, self._results(unit), check)

    def page(self, output: Path) -> Path:
        """Write page, data and figures of what there is, and the results themselves; returns their folder.

        A page elsewhere that shows what is not here stays as it is: the new one is written to the own folder.

        Raises:
            InputError: the data of the page there are damaged.
        """
        own = self.folder / "page"
        elsewhere = not output.absolute().is_relative_to(self.folder.absolute())
        if elsewhere and (lacking := self._lacking(output)):
            print(
                f"{output} shows {len(lacking)} results that {self.folder} lacks, such as {lacking[0]}: "
                f"it stays, the new page is in {own}",
                file=sys.stderr,
            )
            output = own
        self._write(output)
        return output

    def _lacking(self, output: Path) -> list[str]:
        """What the page there shows and one of what is here would not."""
        before = kept(output)
        names = {unit.name for unit in self._all_planned()}
        here = {identity(record) for record in read_records(self.folder) if record["unit"] in names}
        lacking = [" ".join(map(str, at)) for at in map(identity, before.records) if at not in here]
        figures = [
            (figure, at) for figure, at, _ in before.cells if not self.cells.of_settings(at).has(figure, at)
        ]
        return lacking + [f"{figure} {at}" for figure, at in figures]

    def _all_planned(self) -> list[Unit]:
        return [
            unit
            for stage in SWEEP_STAGES
            for model in self.materials.models
            for task in self.materials.tasks
            for unit in self.planned(stage, model, task)
        ]

    def _write(self, output: Path) -> None:
        models = {model.name: model for model in self.materials.models}
        planned = self._all_planned()
        waiting = {
            f"`flat` of {model.name}": "waits for `fractions` and `table`, which say where the curve is flat"
            for model in self.materials.models
            if self.flat(model) is None
        }
        waiting |= self._missing_cells()
        records = read_records(self.folder)
        measured = {line["unit"] for line in (*records, *read_tunings(self.folder))}
        names = [unit.name for unit in planned if unit.name in measured]
        write_archives(self.folder / "sweeps", output, names)
        known = {
            (model.name, task): found
            for model in self.materials.models
            for task in self.materials.tasks
            if (found := self.learned(model, task, records)) is not None
        }
        write_page(
            self.folder,
            output,
            planned,
            models,
            wanted=self.wanted(planned),
            cells=self.cells.everything(),
            waiting=waiting,
            priors=self._priors(),
            known=known,
            queries=QUERIES,
        )

    def _takes(self, stage: str, task: str) -> bool:
        """Whether a stage is of this task: some are of the first one only, `fractions` of it and
        of texts; a text has no answers."""
        if stage == PRIOR and task == Task.TEXT:
            return False
        if stage == "fractions" and task == Task.TEXT:
            return True
        return stage not in _FIRST_TASK_ONLY or self._is_first(task)

    def _missing_cells(self) -> dict[str, str]:
        """Cells of `CELL_STAGES` that there are not yet, by name, with the reason."""
        missing = {}
        for model in self.materials.models:
            done = {(stage, at["model"], at["task"]) for stage, at, _ in self.cells.of(model)}
            for task in self.materials.tasks:
                for stage in CELL_STAGES:
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
        write_atomic(self._results(unit).with_suffix(".toml"), unit.toml(self.materials).encode())

    def _results(self, unit: Unit) -> Path:
        return self.folder / "sweeps" / f"{unit.name}.jsonl"

    def _specified(self, unit: Unit) -> Sweep:
        return sweep_of(tomllib.loads(unit.toml(self.materials)), self.folder)

    def _progress(self, done: int, total: int, following: str) -> None:
        if following:
            print(f"[{done}/{total}] {following}", file=sys.stderr, flush=True)
            self.check_time()

    def _size(self, model: Path) -> Size:
        return QUICK if self._quick else size_for(model)

    def _fractions(self) -> Sequence[float]:
        return FRACTIONS[:1] if self._quick else FRACTIONS
