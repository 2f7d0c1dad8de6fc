"""The comparisons of the papers, repeated: sweeps, gradients, times; then the page with the verdicts.

    python -m benchmarks.evidence --models DIR/stories260K-hf DIR/reference-7M
    python -m benchmarks.evidence --stage table --model stories260K-hf --minutes 60

Stop it whenever you like: what is finished is durable, and the same command goes on. The page is written at
the end of each call (`--page` alone writes it from what there is).

Files: PERMILLE_MODELS names a folder of models, PERMILLE_DATA one of tasks (`tasks/BoolQ/val.jsonl`, ...) and
text; or `--materials FILE`, a TOML file with `models`, `corpus` and `[tasks.<name>]` like a sweep's.
"""

import argparse
import os
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

from benchmarks.evidence_plan import FRACTIONS, QUICK, Materials, Size, Unit, size_for, units
from permille.errors import InputError, PermilleError
from permille.evaluate.specification import read_sweep
from permille.evaluate.sweep import run_sweep

STAGES = ("table", "fractions", "flat", "queries")
_MODELS = ("stories260K-hf", "reference-7M")
_TASK_FILES = {
    "sst2": {"train": "SST-2_glue/train.tsv", "test": "SST-2_glue/dev.tsv"},
    "boolq": {"train": "BoolQ/val.jsonl"},
    "rte": {"train": "RTE/train.jsonl", "test": "RTE/val.jsonl"},
}


class TimeIsUpError(Exception):
    """No new cell may begin."""


class Runner:
    """Runs stages into a folder."""

    def __init__(self, materials: Materials, folder: Path, *, quick: bool, minutes: float | None) -> None:
        self.materials = materials
        self.folder = folder
        self.quick = quick
        self._end = None if minutes is None else time.monotonic() + 60 * minutes

    def run(self, stage: str, model: Path, task: str) -> None:
        """Every sweep of a stage that is not finished."""
        for unit in units(stage, model, task, self._size(model), fractions=self._fractions()):
            self._sweep(unit)

    def _sweep(self, unit: Unit) -> None:
        path = self.folder / "sweeps" / f"{unit.name}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(unit.toml(self.materials), encoding="utf-8")
        run_sweep(read_sweep(path), path.with_suffix(".jsonl"), self._progress)

    def _progress(self, done: int, total: int, following: str) -> None:
        if following:
            print(f"[{done}/{total}] {following}", file=sys.stderr, flush=True)
            self.check_time()

    def check_time(self) -> None:
        """
        Raises:
            TimeIsUpError: the minutes are over.
        """
        if self._end is not None and time.monotonic() >= self._end:
            raise TimeIsUpError

    def _size(self, model: Path) -> Size:
        return QUICK if self.quick else size_for(model)

    def _fractions(self) -> Sequence[float]:
        return FRACTIONS[2:4] if self.quick else FRACTIONS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("build/evidence"), help="results and sweeps")
    parser.add_argument("--materials", type=Path)
    parser.add_argument("--models", type=Path, nargs="+", help="transformers folders")
    parser.add_argument("--model", help="only this one, by name")
    parser.add_argument("--task", help="only this one")
    parser.add_argument("--stage", choices=STAGES, action="append")
    parser.add_argument("--minutes", type=float, help="begin no new cell after these")
    parser.add_argument(
        "--quick", action="store_true", help="a few steps of everything: numbers mean nothing"
    )
    options = parser.parse_args(arguments)
    try:
        materials = _materials(options.materials, options.models)
        runner = Runner(materials, options.folder, quick=options.quick, minutes=options.minutes)
        for model in materials.models:
            for stage in options.stage or STAGES:
                for task in materials.tasks:
                    if options.model in (None, model.name) and options.task in (None, task):
                        runner.run(stage, model, task)
    except TimeIsUpError:
        print("the minutes are over; the same command goes on", file=sys.stderr)
    except PermilleError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    return 0


def _materials(path: Path | None, models: Sequence[Path] | None) -> Materials:
    if path is not None:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
        folder = path.parent
        tasks = {
            name: {key: folder / value for key, value in files.items()}
            for name, files in found["tasks"].items()
        }
        materials = Materials(
            models=tuple(models or [folder / name for name in found["models"]]),
            tasks=tasks,
            corpus=folder / found["corpus"],
        )
    else:
        data = Path(_environment("PERMILLE_DATA"))
        materials = Materials(
            models=tuple(models or [Path(_environment("PERMILLE_MODELS")) / name for name in _MODELS]),
            tasks={
                name: {key: data / "tasks" / value for key, value in files.items()}
                for name, files in _TASK_FILES.items()
            },
            corpus=data / "text/c4_en/c4_sample.jsonl",
        )
    materials.check()
    return materials


def _environment(name: str) -> str:
    try:
        return os.environ[name]
    except KeyError as exc:
        raise InputError(
            f"expected the environment variable {name} to name a folder, or --materials"
        ) from exc


if __name__ == "__main__":
    sys.exit(main())
