"""Runs what the evidence lacks, takes up what another clone kept, and writes the page."""

import sys
import time
import tomllib
from pathlib import Path

from permille.errors import InputError
from permille.files import write_atomic
from permille_lab.benchmarks.cells import Cells
from permille_lab.benchmarks.evidence_archive import FOLDER as ARCHIVES
from permille_lab.benchmarks.evidence_archive import archives, searches_lost, take_up, write_archives
from permille_lab.benchmarks.evidence_cells import CELL_STAGES, FigureCells
from permille_lab.benchmarks.evidence_page import DATA, kept, write_page
from permille_lab.benchmarks.evidence_plan import QUERIES, SWEEP_STAGES, Materials, Unit
from permille_lab.benchmarks.evidence_planner import IF_LEARNED, Planner
from permille_lab.benchmarks.evidence_prior import FIGURE as PRIOR
from permille_lab.benchmarks.evidence_records import identity, read_records, read_trials, read_tunings
from permille_lab.benchmarks.evidence_steps import measure_memory
from permille_lab.evaluate.specification import Sweep, sweep_of
from permille_lab.evaluate.sweep import run_sweep
from permille_lab.evaluate.sweep_results import open_results


class TimeIsUpError(Exception):
    """No new cell and no new trial of a search may begin."""


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
        self.planner = Planner(materials, folder, self.cells.guess, quick=quick)

    def run(self, stage: str, model: Path, task: str) -> None:
        """What a stage lacks.

        Raises:
            TimeIsUpError: before the next cell or trial.
            InputError: a model, a task's file or what a former run left is not as expected.
        """
        if not self.planner.takes(stage, task):
            return
        if stage in SWEEP_STAGES:
            if stage in IF_LEARNED and not self.planner.is_first(task):
                self.run(PRIOR, model, task)  # seconds, for what may be hours
            for unit in self.planner.planned(stage, model, task):
                # Asked again for each: the first ones, the references, decide on the others.
                if self.planner.wanted([unit]):
                    self._sweep(unit)
        elif stage in CELL_STAGES:
            self.cells.measure(stage, self.planner.references(model, task), self.planner.size(model))

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
                    planned = [
                        unit for unit in self.planner.planned(stage, model, task) if unit.name in found
                    ]
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
        names = {unit.name for unit in self.planner.all_planned()}
        here = {identity(record) for record in read_records(self.folder) if record["unit"] in names}
        lacking = [" ".join(map(str, at)) for at in map(identity, before.records) if at not in here]
        figures = [
            (figure, at) for figure, at, _ in before.cells if not self.cells.of_settings(at).has(figure, at)
        ]
        found = archives(output)
        searches = [
            f"{name} {key}"
            for name in sorted(names & found.keys())
            for key in searches_lost(found[name], self.folder / "sweeps" / f"{name}.jsonl")
        ]
        return lacking + [f"{figure} {at}" for figure, at in figures] + searches

    def _write(self, output: Path) -> None:
        models = {model.name: model for model in self.materials.models}
        planned = self.planner.all_planned()
        waiting = {
            f"`flat` of {model.name}": "waits for `fractions` and `table`, which say where the curve is flat"
            for model in self.materials.models
            if self.planner.flat(model) is None
        }
        waiting |= self._missing_cells()
        records = read_records(self.folder)
        searched = (*read_tunings(self.folder), *read_trials(self.folder))
        measured = {line["unit"] for line in (*records, *searched)}
        names = [unit.name for unit in planned if unit.name in measured]
        write_archives(self.folder / "sweeps", output, names)
        known = {
            (model.name, task, stage): found
            for model in self.materials.models
            for task in self.materials.tasks
            for stage, of_stage in (
                ("table", self.planner.learned),
                ("longer", self.planner.learned_in_longer_runs),
            )
            if (found := of_stage(model, task, records)) is not None
        }
        write_page(
            self.folder,
            output,
            planned,
            models,
            wanted=self.planner.wanted(planned),
            cells=self.cells.everything(),
            waiting=waiting,
            priors=self.planner.priors(),
            known=known,
            queries=QUERIES,
        )

    def _missing_cells(self) -> dict[str, str]:
        """Cells of `CELL_STAGES` that there are not yet, by name, with the reason."""
        missing = {}
        for model in self.materials.models:
            done = {(stage, at["model"], at["task"]) for stage, at, _ in self.cells.of(model)}
            for task in self.materials.tasks:
                for stage in CELL_STAGES:
                    if self.planner.takes(stage, task) and (stage, model.name, task) not in done:
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
