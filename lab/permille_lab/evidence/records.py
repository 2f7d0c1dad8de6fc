"""The finished part of the evidence: cells, the choices of their sweeps, and how many are still planned.

`units.json` beside the results records the choice of each file's sweep. So the page is made from this folder
alone, without models and texts.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from permille.errors import InputError
from permille.files import write_atomic
from permille_lab.evaluate.outcomes import Json
from permille_lab.evaluate.results import read_results
from permille_lab.evidence.plan import (
    BY_DENSITY,
    DENSITY,
    SCHEME_METHODS,
    SCHEMES,
    SEEDS,
    Unit,
)

_UNITS = "units.json"
_CHOSEN = ("methods", "seeds", "density", "queries", "zo_steps", "fo_steps", "tuning_seeds")


def describe(folder: Path, units: Iterable[Unit]) -> None:
    """Write the choices of sweeps, and keep what is there of others."""
    found = _read(folder)
    for unit in units:
        own = {name: unit.choices[name] for name in _CHOSEN}
        found[unit.name] = {"stage": unit.stage, "model": unit.model.name, "task": unit.task, **own}
    lines = ",\n".join(f'"{name}": {json.dumps(found[name])}' for name in sorted(found))
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / _UNITS, f"{{\n{lines}\n}}\n".encode())


def read_records(folder: Path) -> list[Json]:
    """Read every finished cell, with its sweep's choices, `stage` and `unit`.

    Raises:
        InputError: a file is damaged before its last line.
    """
    return [
        {"bits_per_byte": None} | cell | own | {"unit": name}  # bits per byte: older cells lack them
        for name, own in _read(folder).items()
        if (path := folder / f"{name}.jsonl").exists()
        for cell in read_results(path).cells.values()
    ]


def lacking(folder: Path, records: Sequence[Json]) -> dict[tuple[str, str, str], tuple[int, int]]:
    """Finished and planned cells of each stage, model and task that is not finished."""
    done = Counter(record["unit"] for record in records)
    found: dict[tuple[str, str, str], tuple[int, int]] = {}
    for name, own in _read(folder).items():
        key = (own["stage"], own["model"], own["task"])
        finished, planned = found.get(key, (0, 0))
        found[key] = finished + done[name], planned + len(own["methods"]) * len(own["seeds"])
    return {key: counts for key, counts in found.items() if counts[0] < counts[1]}


def by_density(records: Sequence[Json]) -> list[Json]:
    """Records of the stage `fractions`, and the table's of the same models, tasks, methods and seeds, which
    are the cells of one more density."""
    own = [r for r in records if r["stage"] == "fractions" and r["density"] != DENSITY]
    return own + [r for r in _of_table(records, own) if r["base"] == "bf16" and r["method"] in BY_DENSITY]


def by_scheme(records: Sequence[Json]) -> list[Json]:
    """Records of the stage `schemes`, after the table's, of 16 bits and of NF4, of the same methods."""
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


def _read(folder: Path) -> dict[str, Json]:
    path = folder / _UNITS
    if not path.exists():
        return {}
    try:
        found: dict[str, Json] = json.loads(path.read_text(encoding="utf-8"))
        return {
            name: {key: own[key] for key in ("stage", "model", "task", *_CHOSEN)}
            for name, own in found.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise InputError(f"expected what sweeps chose in {path}, got {exc!r:.200}") from exc
