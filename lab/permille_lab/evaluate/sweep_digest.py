"""What a results file is of: the digest of a sweep's choices, its files' bytes and our version."""

import hashlib
import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from permille import __version__
from permille_lab.evaluate.methods import Method
from permille_lab.evaluate.specification import Sweep, TaskFiles


def sweep_digest(sweep: Sweep) -> str:
    """Of the choices, the bytes of the files, wherever these are, and our version.

    A choice at its default is left out: what a sweep can choose may grow, and results stay its own.
    """
    return digests(sweep)[0]


def digests(sweep: Sweep) -> list[str]:
    """Of the sweep, then of the same one with ever fewer of its first seeds."""
    chosen = {
        field.name: getattr(sweep, field.name)
        for field in fields(sweep)
        if field.default is MISSING or getattr(sweep, field.name) != field.default
    }
    plain = json.loads(json.dumps(chosen, default=_content))
    found = []
    for count in range(len(sweep.seeds), 0, -1):
        seeds = sweep.seeds[:count]
        plain["seeds"] = list(seeds)
        if seeds == Sweep.__dataclass_fields__["seeds"].default:
            del plain["seeds"]
        definition = json.dumps([__version__, plain], sort_keys=True)
        found.append(f"sha256:{hashlib.sha256(definition.encode()).hexdigest()}")
    return found


def _content(value: Any) -> Any:
    if isinstance(value, Method):
        return value.name
    if isinstance(value, TaskFiles):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if not isinstance(value, Path):
        raise TypeError(f"expected a path, got {type(value).__name__}")
    files = sorted(value.iterdir()) if value.is_dir() else [value]
    return [value.name, *(f"{file.name} {_file_digest(file)}" for file in files if file.is_file())]


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
