"""Records of the evidence: what is finished, what is not, and where the curve over densities is flat."""

import json
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from permille_lab.benchmarks.evidence_plan import (
    BY_DENSITY,
    DENSITY,
    SCHEME_METHODS,
    SCHEMES,
    SEEDS,
    Unit,
)
from permille_lab.evaluate.claims import DECIDING
from permille_lab.evaluate.outcomes import Json
from permille_lab.evaluate.paper_claims import CLAIMS
from permille_lab.evaluate.sweep_results import PROCEDURE

SUMMARY = (
    *("stage", "model", "base", "method", "task", "seed", "density", "queries", "batch_size", "zo_steps"),
    *("fo_steps", "accuracy", "loss", "bits_per_byte", "majority", "validation_loss", "best_step"),
    *("step_factor", "on_edge", "examples", "shots", "cut_examples", "seconds", "attempts"),
    *("tuned_step_factor", "tuning_seeds", "max_tokens"),
)
"""What a page's data say of a record; outcomes item by item are in the results files and their archives."""

_IDENTITY = ("stage", "model", "task", "base", "method", "density", "queries", "batch_size", "seed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Cells of one stage, model and task."""

    stage: str
    model: str
    task: str
    done: int
    planned: int
    hours: float


def read_records(folder: Path) -> list[Json]:
    """Every finished cell below `folder/sweeps`, with what its sweep chose; torn last lines are ignored."""
    # Those of before bits per byte were measured lack them.
    return [{"bits_per_byte": None} | record for record in _lines(folder, "cell")]


def read_tunings(folder: Path) -> list[Json]:
    """Every finished search: losses by power of the grid's factor, and what its sweep chose."""
    return [{key: value for key, value in line.items() if key != "kind"} for line in _lines(folder, "tuning")]


def read_trials(folder: Path) -> list[Json]:
    """Every trial of every search."""
    return _lines(folder, "trial")


def progress(planned: Iterable[Unit], records: Sequence[Json]) -> list[Progress]:
    """What is finished of each stage, model and task."""
    found: dict[tuple[str, str, str], list[Unit]] = {}
    for unit in planned:
        found.setdefault((unit.stage, unit.model.name, unit.task), []).append(unit)
    rows = []
    for (stage, model, task), units in found.items():
        names = {unit.name for unit in units}
        own = [record for record in records if record["unit"] in names]
        rows.append(
            Progress(
                stage=stage,
                model=model,
                task=task,
                done=len(own),
                planned=sum(len(unit.choices["methods"]) * len(unit.choices["seeds"]) for unit in units),
                hours=sum(record["seconds"] for record in own) / 3600,
            )
        )
    return rows


def by_density(records: Sequence[Json]) -> list[Json]:
    """Records of the stage `fractions`, and the table's of the same models, tasks, methods and seeds, which
    are the cells of one more density."""
    own = [r for r in records if r["stage"] == "fractions" and r["density"] != DENSITY]
    return own + [r for r in _of_table(records, own) if r["base"] == "bf16" and r["method"] in BY_DENSITY]


def by_scheme(records: Sequence[Json]) -> list[Json]:
    """Records of the stage `schemes`, after the table's of the same models, tasks and methods.

    These are of 16 bits, then of NF4.
    """
    own = [record for record in records if record["stage"] == "schemes" and record["base"] in SCHEMES]
    of_table = [record for record in _of_table(records, own) if record["method"] in SCHEME_METHODS]
    return sorted(of_table, key=lambda record: str(record["base"])) + own


def by_steps(records: Sequence[Json]) -> list[Json]:
    """Records of the stage `longer`, and the table's of the same models, tasks, methods and seeds."""
    own = [record for record in records if record["stage"] == "longer"]
    having = {(record["model"], record["task"], record["method"]) for record in own}
    of_table = [record for record in _of_table(records, own) if record["base"] == "bf16"]
    return [r for r in of_table if (r["model"], r["task"], r["method"]) in having] + own


def _of_table(records: Sequence[Json], own: Sequence[Json]) -> list[Json]:
    """The table's records of the models and tasks of others, of the seeds that other stages have."""
    having = {(record["model"], record["task"]) for record in own}
    return [
        record
        for record in records
        if record["stage"] == "table"
        and (record["model"], record["task"]) in having
        and record["density"] == DENSITY
        and record["seed"] in SEEDS
    ]


def flat_density(records: Sequence[Json], model: str, task: str) -> float | None:
    """The smallest density from which the curve of sensitive weights is flat.

    Flat: the validation loss, mean over seeds, is within one standard error (of the differences, seed by
    seed) of the lowest density's that is best. Test items choose nothing. None where fewer than two densities
    have two seeds.
    """
    losses: dict[float, dict[int, float]] = {}
    for record in by_density(records):
        if (record["model"], record["task"], record["method"]) == (model, task, "zo:sensitive-c4"):
            losses.setdefault(record["density"], {})[record["seed"]] = record["validation_loss"]
    whole = {density: by_seed for density, by_seed in losses.items() if len(by_seed) > 1}
    if len(whole) < 2:
        return None
    best = min(whole, key=lambda density: float(np.mean(list(whole[density].values()))))
    for density in sorted(whole):
        seeds = sorted(whole[density].keys() & whole[best].keys())
        differences = np.array([whole[density][seed] - whole[best][seed] for seed in seeds])
        error = differences.std(ddof=1) / np.sqrt(len(seeds)) if len(seeds) > 1 else 0.0
        if density == best or differences.mean() <= error:
            return density
    return best


def unfinished_claims(planned: Iterable[Unit], records: Sequence[Json]) -> set[str]:
    """Keys of the claims that cells are planned for, but not finished."""
    done = Counter((record["unit"], record["method"]) for record in records)
    missing = [
        (unit.stage, method)
        for unit in planned
        for method in unit.choices["methods"]
        if done[unit.name, method] < len(unit.choices["seeds"])
    ]
    return {
        claim.key
        for claim in CLAIMS
        for stage, method in missing
        if method in (claim.first.method, claim.second.method)
        and stage in (DECIDING if claim.stage is None else (claim.stage,))
    }


def summary(records: Iterable[Json]) -> list[Json]:
    """Records without their items."""
    return [{key: record[key] for key in SUMMARY} for record in records]


def identity(record: Json) -> tuple[object, ...]:
    """What a record is of: no two of a page have the same."""
    return tuple(record[key] for key in _IDENTITY)


def _lines(folder: Path, kind: str) -> list[Json]:
    """Lines of results of the present procedure; those of another one are as good as none."""
    found = []
    for path in sorted((folder / "sweeps").glob("*.jsonl")):
        whole = path.read_bytes().rpartition(b"\n")[0].splitlines()
        if not whole or json.loads(whole[0]).get("procedure") != PROCEDURE:
            continue
        if not path.with_suffix(".toml").exists():
            continue
        chosen = tomllib.loads(path.with_suffix(".toml").read_text(encoding="utf-8"))
        labels: dict[str, Any] = {"stage": path.name.partition("-")[0], "unit": path.stem}
        settings = ("density", "queries", "batch_size", "zo_steps", "fo_steps", "tuning_seeds", "max_tokens")
        labels |= {key: chosen[key] for key in settings}
        found += [line | labels for line in map(json.loads, whole) if line["kind"] == kind]
    return found
