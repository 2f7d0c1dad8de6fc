"""The results file of a sweep.

The file has JSON lines. The first is a `sweep` line with the sweep's digest and the number of the procedure.
Then follow lines of these kinds:

- `trial`: one run of a search for a step factor
- `tuning`: the step factor that the search chose
- `cell`: the record of a cell
- `bad-row`: a row or an example that was left out
- `list`: test items or their groups. Most cells share these lists, so a cell holds only the list's number

An incomplete last line is cut off. A file of another sweep or procedure is refused. Seeds may be added behind
the seeds with which the file was created.
"""

import fcntl
import hashlib
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from permille.errors import InputError, RetryableError
from permille.version import __version__
from permille_lab.evaluate.cells import Bench
from permille_lab.evaluate.methods import Method
from permille_lab.evaluate.outcomes import Json
from permille_lab.evaluate.specification import Sweep, TaskFiles
from permille_lab.tasks.examples import Task

PROCEDURE = 2
"""Version of how cells are tuned and trained. Results of another procedure are refused."""

_LISTED = ("items", "groups")
_FIELDS: dict[str, set[str]] = {
    "sweep": set(),
    "bad-row": set(),
    "list": {"values"},
    "trial": {"loss", "rose"},
    "tuning": {"step_factor", "losses", "on_edge"},
    "cell": {
        *("model", "base", "method", "task", "seed", "accuracy", "loss", "majority", "items", "correct"),
        *("shots", "cut_examples", "validation_loss", "on_edge"),
    },
}
"""Fields that a line of each kind must have beside kind and key, because code reads them."""


@contextmanager
def alone(results: Path) -> Iterator[None]:
    """Lock the file. Without a lock, two processes would measure each cell twice.

    Raises:
        RetryableError: another process has locked it.
    """
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise RetryableError(f"expected to be the only sweep on {results}, got another one") from exc
        yield


def open_results(sweep: Sweep, path: Path) -> "Results":
    """Open or create the file of a sweep. The file may be of the same sweep with fewer of its seeds.

    Raises:
        InputError: the file is of another sweep or procedure, or damaged before its last line.
    """
    known = digests(sweep)
    headers = [{"kind": "sweep", "key": digest, "procedure": PROCEDURE} for digest in known]
    found = path.read_bytes() if path.exists() else b""
    whole, newline, torn = found.rpartition(b"\n")
    if not newline:
        if not any(_line(header).startswith(found) for header in headers):
            raise InputError(f"expected results of a sweep in {path}, got {found[:60]!r}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")  # it was empty, or a part of our first line
        results = Results(path, [])
        results.append(headers[0])
        return results
    lines = list(_parsed(whole, path))
    if len(lines) == 1 and not torn and lines[0].get("kind") == "sweep" and lines[0] not in headers:
        # The sweep was refused before its first cell. Replace its header by that of the corrected sweep.
        path.write_bytes(_line(headers[0]))
        return Results(path, [headers[0]])
    if lines[0].get("procedure") != PROCEDURE:
        raise InputError(
            f"expected results of procedure {PROCEDURE} in {path}, got those of another version of "
            "permille: choose another file"
        )
    if lines[0] not in headers:
        raise InputError(
            f"expected results of the sweep {known[0][:19]} in {path}, got those of another one: "
            "choose another file, or give the sweep as it was"
        )
    if torn:
        with path.open("r+b") as file:
            file.truncate(len(found) - len(torn))
            os.fsync(file.fileno())
    return Results(path, lines)


def read_results(path: Path) -> "Results":
    """Read a results file of any sweep. An incomplete last line is left out.

    Raises:
        InputError: the file is damaged before its last line.
    """
    return Results(path, _parsed(path.read_bytes().rpartition(b"\n")[0], path))


class Results:
    """The results file of a sweep, and its contents."""

    def __init__(self, path: Path, lines: "list[Json] | Iterator[Json]") -> None:
        self._path = path
        self.cells: dict[str, Json] = {}
        self.tunings: dict[str, Json] = {}
        self.trials: dict[str, Json] = {}
        self.bad_rows: dict[str, None] = {}
        self._lists: dict[str, int] = {}
        for line in lines:
            self._take(line)

    @contextmanager
    def bad_rows_of(self, bench: Bench) -> Iterator[None]:
        """Append the bench's new bad rows to the file when the `with` block ends, even with an error."""
        try:
            yield
        finally:
            for line in bench.bad_rows():
                if line not in self.bad_rows:
                    self.append({"kind": "bad-row", "key": line})

    def append(self, line: Json) -> None:
        """Write a line durably, then add it to the records in memory."""
        short = dict(line)
        data = b""
        for name in _LISTED:
            if name in line:
                text = json.dumps(line[name])
                if text not in self._lists:
                    self._lists[text] = len(self._lists)
                    data += _line({"kind": "list", "key": str(self._lists[text]), "values": line[name]})
                short[name] = self._lists[text]
        with self._path.open("ab") as file:
            file.write(data + _line(short))
            file.flush()
            os.fsync(file.fileno())
        self._take(line)

    def _take(self, line: Json) -> None:
        kinds = {"cell": self.cells, "tuning": self.tunings, "trial": self.trials}
        if line["kind"] in kinds:
            kinds[line["kind"]][line["key"]] = line
        elif line["kind"] == "bad-row":
            self.bad_rows[line["key"]] = None
        elif line["kind"] == "list":
            self._lists[json.dumps(line["values"])] = int(line["key"])


def digests(sweep: Sweep) -> list[str]:
    """Return the digest of the sweep, then those of the same sweep with one seed fewer each time.

    A digest covers the settings, the names and bytes of the files (not their folders), and the version of
    permille. Settings with default values are left out. Thus a new setting does not invalidate old results.
    """
    chosen = {
        name: getattr(sweep, name)
        for name, field in Sweep.model_fields.items()
        if getattr(sweep, name) != field.default
    }
    plain = json.loads(json.dumps(chosen, default=_content))
    found = []
    for count in range(len(sweep.seeds), 0, -1):
        seeds = sweep.seeds[:count]
        plain["seeds"] = list(seeds)
        if seeds == Sweep.model_fields["seeds"].default:
            del plain["seeds"]
        definition = json.dumps([__version__, plain], sort_keys=True)
        found.append(f"sha256:{hashlib.sha256(definition.encode()).hexdigest()}")
    return found


def _content(value: Any) -> Any:
    if isinstance(value, Method):
        return value.name
    if isinstance(value, TaskFiles):
        return {"train": value.train, "test": value.test}
    if not isinstance(value, Path):
        raise TypeError(f"expected a path, got {type(value).__name__}")
    files = sorted(value.iterdir()) if value.is_dir() else [value]
    return [value.name, *(f"{file.name} {_file_digest(file)}" for file in files if file.is_file())]


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _line(record: Json) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def _parsed(whole: bytes, path: Path) -> Iterator[Json]:
    """Parse the lines. Replace the numbers of lists by the lists."""
    lists: list[list[str]] = []
    for number, line in enumerate(whole.split(b"\n"), start=1):
        try:
            found = json.loads(line)
            if type(found["key"]) is not str or not _FIELDS[found["kind"]] <= found.keys():
                raise ValueError(f"fields {sorted(found)}")
            if found["kind"] == "list":
                lists.append(found["values"])
            _check_numbers(found)
            if found["kind"] == "cell":
                found |= {name: lists[found[name]] for name in _LISTED if name in found}
                names = [found[name] for name in ("model", "base", "method", "task")]
                if found["key"] != "/".join([*names, str(found["seed"])]):
                    raise ValueError(f"a cell of {names}")
        except (ValueError, TypeError, KeyError, IndexError, RecursionError, OverflowError) as exc:
            raise InputError(
                f"expected a result in line {number} of {path}, got {line[:60]!r} ({exc})"
            ) from exc
        yield found


_NUMBERS = {
    "trial": ("loss",),
    "tuning": ("step_factor",),
    "cell": ("loss", "cut_examples", "shots", "accuracy", "majority", "bits_per_byte", "prior_loss"),
}
_MAY_LACK = {"accuracy", "majority", "bits_per_byte", "prior_loss"}
"""Numbers that may be missing.

Language modelling has no accuracy, other tasks have no bits per byte, and older results have no prior loss.
"""


def _check_numbers(line: Json) -> None:
    """Refuse fields that are no finite numbers, for example after a manual edit."""
    for name in _NUMBERS.get(line["kind"], ()):
        value = line.get(name)
        if value is None and (name in _MAY_LACK or line["kind"] == "trial"):
            if name == "accuracy" and line["task"] != Task.TEXT:
                raise ValueError("no accuracy")
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{value!r:.60} for the number {name}")
    if not isinstance(line.get("rose", False), bool):
        raise ValueError(f"rose {line['rose']!r:.60}")
