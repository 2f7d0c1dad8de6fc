"""The finished cells of the evidence, the settings of their sweeps, and the number of missing cells.

`units.json` in the folder of the results has the settings of each file's sweep. Thus the page can be made
from this folder, without models and texts.
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
    """Write the settings of these sweeps to `units.json`, and keep those of others."""
    found = _read(folder)
    for unit in units:
        own = {name: unit.choices[name] for name in _CHOSEN}
        found[unit.name] = {"stage": unit.stage, "model": unit.model.name, "task": unit.task, **own}
    lines = ",\n".join(f'"{name}": {json.dumps(found[name])}' for name in sorted(found))
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / _UNITS, f"{{\n{lines}\n}}\n".encode())


def read_records(folder: Path) -> list[Json]:
    """Read every finished cell, with the settings, `stage` and `unit` of its sweep.

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
    """Return the numbers of finished and planned cells of each unfinished stage, model and task."""
    done = Counter(record["unit"] for record in records)
    found: dict[tuple[str, str, str], tuple[int, int]] = {}
    for name, own in _read(folder).items():
        key = (own["stage"], own["model"], own["task"])
        finished, planned = found.get(key, (0, 0))
        found[key] = finished + done[name], planned + len(own["methods"]) * len(own["seeds"])
    return {key: counts for key, counts in found.items() if counts[0] < counts[1]}


def by_density(records: Sequence[Json]) -> list[Json]:
    """Return the records of the stage `fractions`, then those of the table at `DENSITY`.

    The table's records are of the same models and tasks.
    """
    own = [r for r in records if r["stage"] == "fractions" and r["density"] != DENSITY]
    return own + [r for r in _of_table(records, own) if r["base"] == "bf16" and r["method"] in BY_DENSITY]


def by_scheme(records: Sequence[Json]) -> list[Json]:
    """Return the records of the stage `schemes`, after those of the table with bf16 and NF4."""
    own = [record for record in records if record["stage"] == "schemes" and record["base"] in SCHEMES]
    of_table = [record for record in _of_table(records, own) if record["method"] in SCHEME_METHODS]
    return sorted(of_table, key=lambda record: str(record["base"])) + own


def by_steps(records: Sequence[Json]) -> list[Json]:
    """Return the records of the table, then those of the stage `longer` with the same methods."""
    own = [record for record in records if record["stage"] == "longer"]
    having = {(record["model"], record["task"], record["method"]) for record in own}
    of_table = [record for record in _of_table(records, own) if record["base"] == "bf16"]
    return [r for r in of_table if (r["model"], r["task"], r["method"]) in having] + own


def _of_table(records: Sequence[Json], own: Sequence[Json]) -> list[Json]:
    """Return the table's records of the models and tasks of `own`, at `DENSITY` and for `SEEDS`."""
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
