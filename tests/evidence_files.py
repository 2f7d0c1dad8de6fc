"""How tests call the evidence, what they compare, and results that nobody measured."""

import tomllib
from collections.abc import Mapping
from pathlib import Path

from permille_lab.benchmarks.evidence_plan import Unit
from permille_lab.benchmarks.evidence_records import SUMMARY
from permille_lab.benchmarks.evidence_runner import Runner
from permille_lab.evaluate.specification import sweep_of
from permille_lab.evaluate.sweep import cells_of
from permille_lab.evaluate.sweep_results import open_results


def arguments(materials: Path, folder: Path, *more: str) -> list[str]:
    return [
        *("--materials", str(materials), "--folder", str(folder), "--quick", "--threads", "1"),
        *more,
    ]


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def measured_elsewhere(runner: Runner, unit: Unit, *, loss: float | Mapping[str, float]) -> None:
    """Results of a sweep, made up: an untrained loss of 1, and of trained methods one that a seed moves.

    Args:
        loss: of all trained methods, or of each.
    """
    path = runner.folder / f"sweeps/{unit.name}.jsonl"
    sweep = sweep_of(tomllib.loads(unit.toml(runner.materials)), runner.folder)
    results = open_results(sweep, path)
    path.with_suffix(".toml").write_text(unit.toml(runner.materials))
    for cell in cells_of(sweep):
        trained = cell.method.order is not None
        own = loss if isinstance(loss, float) else loss.get(cell.method.name, 1.0)
        of_seed = (own if trained else 1.0) + 0.001 * cell.seed
        made_up = {
            "items": [f"item {number}" for number in range(40)],
            "groups": [f"text {number}" for number in range(40)],
            "item_losses": [of_seed] * 40,
            "correct": "01" * 20,
            "accuracy": 0.5,
            "majority": 0.5,
            "loss": of_seed,
            "validation_loss": of_seed,
            "curve": [[0, of_seed]],
            "examples": {"train": 8, "validation": 4, "test": 40},
            "step_factor": 1.0 if trained else None,
        }
        plain = {"seconds": 1.0, "shots": 0.0, "cut_examples": 0, "on_edge": False}
        names = {"model": cell.model.name, "base": cell.base.value, "method": cell.method.name}
        of_cell = {"kind": "cell", "key": cell.key, "task": cell.task.value, "seed": cell.seed, **names}
        results.append({**dict.fromkeys(SUMMARY), **made_up, **plain, **of_cell})
