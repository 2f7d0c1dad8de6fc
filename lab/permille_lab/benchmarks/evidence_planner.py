"""Which sweeps there are to run, by what is measured: some wait for others, some would say nothing new."""

from collections.abc import Callable, Sequence
from pathlib import Path

from permille_lab.benchmarks.cells import Result
from permille_lab.benchmarks.evidence_plan import (
    DENSITY,
    FRACTIONS,
    QUICK,
    STATIC,
    SWEEP_STAGES,
    Materials,
    Size,
    Unit,
    size_for,
    units,
)
from permille_lab.benchmarks.evidence_prior import FIGURE as PRIOR
from permille_lab.benchmarks.evidence_prior import TUNED, Learned, learned
from permille_lab.benchmarks.evidence_records import by_density, flat_density, read_records
from permille_lab.evaluate.outcomes import Json
from permille_lab.evaluate.prompts import Task

_FIRST_TASK_ONLY = frozenset({"fractions", "longer", "queries", "schemes", "steps"})
_WITH_TEXT = frozenset({"fractions", "longer"})
"""Of these also on texts."""
IF_LEARNED = frozenset({"table", "flat"})
"""Stages of every task, which leave out what says no more than the first task does."""


class Planner:
    """Plans from the results in a folder."""

    def __init__(
        self, materials: Materials, folder: Path, guess: Callable[[Unit], Result | None], *, quick: bool
    ) -> None:
        """
        Args:
            guess: the cell of the prior that has the test items of a unit.
        """
        self._materials, self._folder, self._guess, self._quick = materials, folder, guess, quick

    def planned(self, stage: str, model: Path, task: str) -> list[Unit]:
        """The sweeps of a stage, worth it or not; none where it waits for another stage or density."""
        if not self.takes(stage, task):
            return []
        density = self.flat(model) if stage == "flat" else DENSITY
        if stage == "flat" and density in (None, DENSITY):
            return []
        return units(
            stage, model, task, self.size(model), density=density or DENSITY, fractions=self._fractions()
        )

    def flat(self, model: Path) -> float | None:
        """Where the model's curve is flat, once the fractions and the table's part of them are finished."""
        task = next(iter(self._materials.tasks))
        planned = self.planned("fractions", model, task)
        names = {unit.name for unit in planned}
        records = [r for r in read_records(self._folder) if r["stage"] == "table" or r["unit"] in names]
        own = [r for r in by_density(records) if (r["model"], r["task"]) == (model.name, task)]
        of_table = {r["seed"] for r in own if (r["stage"], r["method"]) == ("table", STATIC[0])}
        cells = sum(len(unit.choices["methods"]) * len(unit.choices["seeds"]) for unit in planned)
        done = sum(record["stage"] == "fractions" for record in own)
        if done < cells or not of_table.issuperset(self.size(model).seeds):
            return None
        return flat_density(records, model.name, task)

    def wanted(self, planned: Sequence[Unit]) -> list[Unit]:
        """Without what says no more than the first task does: methods on a task that first order is not
        shown to learn. The references are what that is known by."""
        places = dict.fromkeys((unit.model, unit.task) for unit in planned if unit.stage in IF_LEARNED)
        records = read_records(self._folder) if any(not self.is_first(task) for _, task in places) else []
        left = set()
        for model, task in places:
            known = None if self.is_first(task) else self.learned(model, task, records)
            if known is not None and not known.shown:
                left.add((model, task))
        return [
            unit
            for unit in planned
            if unit.stage not in IF_LEARNED
            or (unit.model, unit.task) not in left
            or unit.name == self.references(unit.model, unit.task).name
        ]

    def learned(self, model: Path, task: str, records: Sequence[Json]) -> Learned | None:
        """What first-order training shows of a task; None while it is not known, and of texts."""
        return self._learned(self.references(model, task), records)

    def learned_in_longer_runs(self, model: Path, task: str, records: Sequence[Json]) -> Learned | None:
        """The same, with the steps of `longer`; None where these are not of the task."""
        of_task = [] if task == Task.TEXT else self.planned("longer", model, task)
        return self._learned(of_task[0], records) if of_task else None

    def _learned(self, references: Unit, records: Sequence[Json]) -> Learned | None:
        own = [record for record in records if record["unit"] == references.name]
        methods = [name for name in references.choices["methods"] if name in TUNED]
        return learned(self._guess(references), own, len(references.choices["seeds"]), methods)

    def priors(self) -> dict[tuple[str, str], float]:
        """Losses of the guesses, of tasks that have one."""
        found = {
            (model.name, task): self._guess(self.references(model, task))
            for model in self._materials.models
            for task in self._materials.tasks
        }
        return {at: guess["loss"] for at, guess in found.items() if guess and guess["loss"] is not None}

    def references(self, model: Path, task: str) -> Unit:
        """The unit of a task that is measured first."""
        return self.planned("table", model, task)[0]

    def is_first(self, task: str) -> bool:
        """Whether a task is the one that has every stage."""
        return task == next(iter(self._materials.tasks))

    def all_planned(self) -> list[Unit]:
        """Of every stage, model and task, worth it or not."""
        return [
            unit
            for stage in SWEEP_STAGES
            for model in self._materials.models
            for task in self._materials.tasks
            for unit in self.planned(stage, model, task)
        ]

    def takes(self, stage: str, task: str) -> bool:
        """Whether a stage is of this task: some are of the first one only, `fractions` and `longer` of it
        and of texts; a text has no answers."""
        if stage == PRIOR and task == Task.TEXT:
            return False
        if stage in _WITH_TEXT and task == Task.TEXT:
            return True
        return stage not in _FIRST_TASK_ONLY or self.is_first(task)

    def size(self, model: Path) -> Size:
        """How much a cell of a model computes, but for tasks with passages."""
        return QUICK if self._quick else size_for(model)

    def _fractions(self) -> Sequence[float]:
        return FRACTIONS[:1] if self._quick else FRACTIONS
