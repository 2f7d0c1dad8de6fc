"""The results file of a sweep: what it is of, and what it holds.

JSON lines: a `sweep` line with the digest of what is compared and the procedure, then `trial` (of a search),
`tuning` (what it chose), `cell` and `bad-row` lines. A torn last line is cut off. A file of another sweep or
procedure is refused, never mixed; seeds may be added after those that a file was begun with.
"""

import fcntl
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from permille.errors import InputError, RetryableError
from permille_lab.evaluate.cells import Bench
from permille_lab.evaluate.outcomes import Json
from permille_lab.evaluate.prompts import Task
from permille_lab.evaluate.specification import Sweep
from permille_lab.evaluate.sweep_digest import digests

PROCEDURE = 2
"""How cells are tuned and trained; results of another procedure are refused."""


@contextmanager
def alone(results: Path) -> Iterator[None]:
    """Hold the file: two processes would measure each cell twice and write both.

    Raises:
        RetryableError: another process holds it.
    """
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
    return Results.open(results, *digests(sweep))


def bad_rows(results: Path) -> list[str]:
    """Rows of task files that were left out, with the reasons, as a results file names them."""
    with results.open("rb") as file:
        lines = map(json.loads, file)
        return [line["key"] for line in lines if line["kind"] == "bad-row"]


class Results:
    """The file of a sweep, and what it holds."""

    def __init__(self, path: Path, lines: list[Json]) -> None:
        self._path = path
        self.cells: dict[str, Json] = {}
        self.tunings: dict[str, Json] = {}
        self.trials: dict[str, Json] = {}
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
        kinds = {"cell": self.cells, "tuning": self.tunings, "trial": self.trials}
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
        _NUMBERS[found["kind"]](found)
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as exc:
        raise InputError(f"expected a result in line {number} of {path}, got {line[:60]!r} ({exc})") from exc
    result: Json = found
    return result


def _check_tuning(line: Json) -> None:
    if not _number(line["step_factor"]) > 0:
        raise ValueError(f"step factor {line['step_factor']}")


def _check_trial(line: Json) -> None:
    if line["loss"] is not None:
        _number(line["loss"])
    if not isinstance(line["rose"], bool):
        raise ValueError(f"rose {line['rose']!r:.60}")


def _check_cell(line: Json) -> None:
    names = [line[name] for name in ("model", "base", "method", "task")]
    if line["key"] != "/".join([*names, str(line["seed"])]):
        raise ValueError(f"a cell of {names}")
    for name in ("loss", "cut_examples", "shots"):
        _number(line[name])
    for name in ("accuracy", "majority"):
        if line[name] is not None or line["task"] != Task.TEXT:
            _number(line[name])
    for name in ("bits_per_byte", "prior_loss"):  # of results of before they were measured, nothing
        if line.get(name) is not None:
            _number(line[name])


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r:.60} for a number")
    return float(value)


_NUMBERS: dict[str, Callable[[Json], None]] = {
    "sweep": lambda _: None,
    "bad-row": lambda _: None,
    "trial": _check_trial,
    "tuning": _check_tuning,
    "cell": _check_cell,
}
"""What is read again is checked: a file that somebody edited is refused with its line."""

_FIELDS: dict[str, set[str]] = {
    "sweep": set(),
    "bad-row": set(),
    "trial": {"loss", "rose"},
    "tuning": {"step_factor", "losses", "on_edge"},
    "cell": {
        *("model", "base", "method", "task", "seed", "accuracy", "loss", "majority", "items", "correct"),
        *("shots", "cut_examples", "validation_loss", "on_edge"),
    },
}
"""What a line of each kind holds beside kind and key, as far as it is read again."""
