"""Running a sweep: cell by cell, each result durable before the next begins.

The results file holds JSON lines: a `sweep` line with the digest of what is compared and the procedure, then
`tuning` and `cell` lines. A sweep that is killed goes on after the last whole line; a torn last line is cut
off. A file of another sweep or procedure is refused, never mixed; seeds may be added after those that a file
was begun with.
"""

import fcntl
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from typing import Any

from permille import __version__
from permille.errors import InputError, RetryableError
from permille.evaluate.cells import Bench, Cell, Json
from permille.evaluate.methods import Method
from permille.evaluate.specification import Sweep, TaskFiles
from permille.evaluate.tuning import tune, tuning_seed

PROCEDURE = 2
"""How cells are tuned and trained; results of another procedure are refused."""

Progress = Callable[[int, int, str], None]
"""Called with cells done, cells in all, and what is next. What it raises stops the sweep between cells."""


def cells_of(sweep: Sweep) -> list[Cell]:
    """All cells, those that share a tuning together."""
    return [
        Cell(model=model, base=base, method=method, task=task, seed=seed)
        for model in sweep.models
        for base in sweep.bases
        for task in sweep.tasks
        for method in sweep.methods
        for seed in sweep.seeds
    ]


def run_sweep(sweep: Sweep, results: Path, progress: Progress) -> list[Json]:
    """Run what the results file lacks; returns the records of all cells, in the order of `cells_of`.

    Raises:
        InputError: the file is of another sweep or damaged before its last line; or a cell's input is wrong
            (what is done is kept).
        RetryableError: another process is at it.
    """
    with _alone(results):
        return _run_missing(sweep, results, progress)


def _run_missing(sweep: Sweep, results: Path, progress: Progress) -> list[Json]:
    done = open_results(sweep, results)
    bench = Bench(sweep)
    with done.bad_rows_of(bench):
        bench.read()
    cells = cells_of(sweep)
    for number, cell in enumerate(cells):
        progress(number, len(cells), cell.key)
        if cell.key not in done.cells:
            record = _run(bench, cell, done)
            done.append({"kind": "cell", "key": cell.key, **record})
    progress(len(cells), len(cells), "")
    return [done.cells[cell.key] for cell in cells]


@contextmanager
def _alone(results: Path) -> Iterator[None]:
    """Two processes would measure each cell twice and write both."""
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise RetryableError(f"expected to be the only sweep on {results}, got another one") from exc
        yield


def open_results(sweep: Sweep, results: Path) -> "Results":
    """Open or begin the file of a sweep.

    A file that was begun with the first of the sweep's seeds is the sweep's own: what is in it is what the
    longer sweep measures first, with the same tuning.

    Raises:
        InputError: the file is of another sweep, or damaged before its last line.
    """
    return Results.open(results, *_digests(sweep))


def _run(bench: Bench, cell: Cell, done: "Results") -> Json:
    """The record of a cell; what it finds of bad rows is durable before its tuning and its record are."""
    order = cell.method.order
    if order is None:
        with done.bad_rows_of(bench):
            return bench.run(cell, cell.seed, None).record() | {"tuned_step_factor": None, "on_edge": False}
    if cell.tuning_key not in done.tunings:
        seed = tuning_seed(cell.seed)
        with done.bad_rows_of(bench):
            tuned = tune(
                *(
                    partial(bench.trial, cell, order, seed + number)
                    for number in range(bench.sweep.tuning_seeds)
                ),
                trials=bench.sweep.trials,
            )
        done.append(
            {
                "kind": "tuning",
                "key": cell.tuning_key,
                "seed": seed,
                "step_factor": tuned.step_factor,
                "losses": _by_power(tuned.losses),
                "medians": _by_power(tuned.medians),
                "runs": [
                    {
                        str(power): [_finite(trial.loss), trial.rose]
                        for power, trial in sorted(of_seed.items())
                    }
                    for of_seed in tuned.runs
                ],
                "on_edge": tuned.on_edge,
            }
        )
    tuning = done.tunings[cell.tuning_key]
    chosen = {"tuned_step_factor": tuning["step_factor"], "on_edge": tuning["on_edge"]}
    with done.bad_rows_of(bench):
        return bench.run(cell, cell.seed, tuning["step_factor"]).record() | chosen


class Results:
    """The file of a sweep, and what it holds."""

    def __init__(self, path: Path, lines: list[Json]) -> None:
        self._path = path
        self.cells: dict[str, Json] = {}
        self.tunings: dict[str, Json] = {}
        self._bad_rows: set[str] = set()
        for line in lines:
            self._take(line)

    @classmethod
    def open(cls, path: Path, digest: str, *older: str) -> "Results":
        """Open or begin the file.

        Args:
            digest: that a new file begins with.
            older: digests of results that are as good.

        Raises:
            InputError: the file is of another sweep or procedure, or damaged before its last line.
        """
        headers = [{"kind": "sweep", "key": known, "procedure": PROCEDURE} for known in (digest, *older)]
        found = path.read_bytes() if path.exists() else b""
        whole, newline, torn = found.rpartition(b"\n")
        if not newline:
            if not any(_line(header).startswith(found) for header in headers):
                raise InputError(f"expected results of a sweep in {path}, got {found[:60]!r}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")  # nothing, or the torn beginning of our own first line
            results = cls(path, [])
            results.append(headers[0])
            return results
        lines = [_parsed(line, number, path) for number, line in enumerate(whole.split(b"\n"), start=1)]
        if lines[0].get("procedure") != PROCEDURE:
            raise InputError(
                f"expected results of procedure {PROCEDURE} in {path}, got those of another version of "
                "permille: choose another file"
            )
        if lines[0] not in headers:
            raise InputError(
                f"expected results of the sweep {digest[:19]} in {path}, got those of another one: "
                "choose another file, or give the sweep as it was"
            )
        if torn:
            with path.open("r+b") as file:
                file.truncate(len(found) - len(torn))
                os.fsync(file.fileno())
        return cls(path, lines)

    @contextmanager
    def bad_rows_of(self, bench: Bench) -> Iterator[None]:
        """Append what the bench meets and the file does not name, however the work ends."""
        try:
            yield
        finally:
            for line in bench.bad_rows():
                if line not in self._bad_rows:
                    self.append({"kind": "bad-row", "key": line})

    def append(self, line: Json) -> None:
        """Make a line durable, then known."""
        with self._path.open("ab") as file:
            file.write(_line(line))
            file.flush()
            os.fsync(file.fileno())
        self._take(line)

    def _take(self, line: Json) -> None:
        kinds = {"cell": self.cells, "tuning": self.tunings}
        if line["kind"] in kinds:
            kinds[line["kind"]][line["key"]] = line
        elif line["kind"] == "bad-row":
            self._bad_rows.add(line["key"])


def _line(record: Json) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def _parsed(line: bytes, number: int, path: Path) -> Json:
    try:
        found = json.loads(line)
        fields = _FIELDS[found["kind"]]
        if type(found["key"]) is not str or not fields <= found.keys():
            raise ValueError(f"fields {sorted(found)}")
    except (ValueError, TypeError, KeyError, RecursionError) as exc:
        raise InputError(f"expected a result in line {number} of {path}, got {line[:60]!r}") from exc
    result: Json = found
    return result


_FIELDS: dict[str, set[str]] = {
    "sweep": set(),
    "bad-row": set(),
    "tuning": {"step_factor", "losses", "on_edge"},
    "cell": {
        *("model", "base", "method", "task", "seed", "accuracy", "loss", "majority", "items", "correct"),
        *("shots", "cut_examples", "validation_loss", "on_edge"),
    },
}
"""What a line of each kind holds beside kind and key, as far as it is read again."""


def sweep_digest(sweep: Sweep) -> str:
    """Of the choices, the bytes of the files, wherever these are, and our version.

    A choice at its default is left out: what a sweep can choose may grow, and results stay its own.
    """
    return _digests(sweep)[0]


def _digests(sweep: Sweep) -> list[str]:
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


def _by_power(losses: Mapping[int, float]) -> dict[str, float | None]:
    return {str(power): _finite(loss) for power, loss in sorted(losses.items())}


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


__all__ = ["PROCEDURE", "Progress", "Results", "cells_of", "open_results", "run_sweep", "sweep_digest"]
