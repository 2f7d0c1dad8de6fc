"""Cells of the evidence that are no sweeps: guesses, gradients, a step's parts. Each is measured once."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from permille_lab.benchmarks.cells import Cells, Result, Settings
from permille_lab.benchmarks.evidence_gradients import Gradients
from permille_lab.benchmarks.evidence_plan import DENSITY, Materials, Size, Unit
from permille_lab.benchmarks.evidence_prior import FIGURE as PRIOR
from permille_lab.benchmarks.evidence_prior import measure_prior, settings
from permille_lab.benchmarks.evidence_steps import measure_steps
from permille_lab.evaluate.specification import Sweep

CELL_STAGES = (PRIOR, "coverage", "transfer", "steps")
"""Of a model and a task each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureCells:
    """The cells of a folder, a file for each model, and how they are measured.

    Attributes:
        specified: the sweep of a unit: its examples are the cells'.
        check_time: raises where no new cell may begin.
    """

    folder: Path
    materials: Materials
    specified: Callable[[Unit], Sweep]
    check_time: Callable[[], None]
    quick: bool
    threads: int

    def of(self, model: Path) -> Cells:
        """Those of a model."""
        return Cells(self.folder / f"cells-{model.name}.jsonl")

    def of_settings(self, at: Settings) -> Cells:
        """Those beside which a cell stands: memory is of no model."""
        name = f"cells-{at['model']}" if "model" in at else "memory"
        return Cells(self.folder / f"{name}.jsonl")

    def everything(self) -> list[tuple[str, Settings, Result]]:
        """All that are finished, with their figure."""
        files = (*sorted(self.folder.glob("cells-*.jsonl")), self.folder / "memory.jsonl")
        return [cell for path in files for cell in Cells(path)]

    def guess(self, references: Unit) -> Result | None:
        """The cell of the prior that has the test items of a unit."""
        at = settings(references)
        own = (found for figure, of, found in self.of(references.model) if (figure, of) == (PRIOR, at))
        return next(own, None)

    def measure(self, stage: str, references: Unit, size: Size) -> None:
        """What a stage of `CELL_STAGES` lacks of the model and task of a unit.

        Raises:
            TimeIsUpError: of `check_time`.
            InputError: a model or a file is not as expected.
        """
        at, measured = {
            PRIOR: self._prior,
            "coverage": self._coverage,
            "transfer": self._transfer,
            "steps": self._steps,
        }[stage](references, size)

        def measure() -> Result:
            self.check_time()
            return measured()

        self.of(references.model).once(stage, at, measure)

    def _prior(self, unit: Unit, _: Size) -> tuple[Settings, Callable[[], Result]]:
        return settings(unit), lambda: measure_prior(self.specified(unit), unit)

    def _coverage(self, unit: Unit, size: Size) -> tuple[Settings, Callable[[], Result]]:
        return self._judged(unit), lambda: self._gradients(unit, size).coverage()

    def _transfer(self, unit: Unit, size: Size) -> tuple[Settings, Callable[[], Result]]:
        at = self._judged(unit) | {"steps": size.fo_steps}
        return at, lambda: self._gradients(unit, size).transfer(size.fo_steps)

    def _judged(self, unit: Unit) -> Settings:
        return {
            "model": unit.model.name,
            "task": unit.task,
            "examples": self._examples(),
            "judged": "validation",
        }

    def _examples(self) -> int:
        return 4 if self.quick else 64

    def _gradients(self, unit: Unit, size: Size) -> Gradients:
        # The same examples whatever the table's sizes: what is finished stays comparable.
        unit = replace(unit, choices=dict(unit.choices) | {"sizes": size.sizes})
        return Gradients(self.specified(unit), unit, examples=self._examples())

    def _steps(self, unit: Unit, size: Size) -> tuple[Settings, Callable[[], Result]]:
        rounds = 1 if self.quick else 7
        at = {"model": unit.model.name, "task": unit.task, "density": DENSITY, "rounds": rounds}

        def measure() -> Result:
            return measure_steps(
                unit.model,
                self.materials.corpus,
                Gradients(self.specified(unit), unit).batch(0),
                self.folder / "packages",
                density=DENSITY,
                sequences=size.corpus_sequences,
                length=size.corpus_tokens,
                rounds=rounds,
                threads=self.threads,
            )

        return at | {"threads": self.threads}, measure
