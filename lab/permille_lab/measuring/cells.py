"""Finished measurements, one JSON line each: a stopped benchmark continues where it was.

They are kept in `lab/results`, from which the pages are made.

A cell is a measurement whose contenders ran interleaved in one process (or in child processes, one after the
other). Its ratios hold within it. It is written once, whole, when all of it is done. Half a line that a kill
left behind is cut off. A cell is known by its figure and its settings, not by the machine. One file is one
machine's, except for cells that `keep` added.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from permille.errors import InputError

RESULTS = Path("lab/results")
"""Of every benchmark, in a checkout."""
FOLDER = Path("build/bench")
"""Of packages that benchmarks make."""

Settings = dict[str, Any]
Result = dict[str, Any]


class Cells:
    """The cells of one file, which is made when the first of them is finished."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            InputError: a line before the last is not a cell.
        """
        self._path = path
        self._results: dict[str, Result] = {}
        if path.exists():
            self._read()

    def __iter__(self) -> Iterator[tuple[str, Settings, Result]]:
        """(figure, settings, result), in the order in which they were finished."""
        for key, result in self._results.items():
            figure, settings = json.loads(key)
            yield figure, settings, result

    def of(self, figure: str) -> list[tuple[Settings, Result]]:
        """The finished cells of a figure."""
        return [(settings, result) for name, settings, result in self if name == figure]

    def has(self, figure: str, settings: Settings) -> bool:
        """Return True if the cell is finished."""
        return _key(figure, settings) in self._results

    def once(self, figure: str, settings: Settings, measure: Callable[[], Result]) -> Result:
        """Return the cell's result. If it is not there, measure and write it."""
        key = _key(figure, settings)
        if key not in self._results:
            sys.stderr.write(f"{figure} {json.dumps(settings)}\n")
            self.keep(figure, settings, measure())
        return self._results[key]

    def keep(self, figure: str, settings: Settings, result: Result) -> None:
        """Write a cell that was measured, here or elsewhere."""
        self._append({"figure": figure, "settings": settings, "result": result})
        # Keep the form that a restart will read. A value that JSON cannot hold would change then.
        self._results[_key(figure, settings)] = json.loads(json.dumps(result))

    def _read(self) -> None:
        data = self._path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(self._path, whole)
        for number, line in enumerate(data[:whole].splitlines(), start=1):
            try:
                cell = json.loads(line)
                self._results[_key(cell["figure"], cell["settings"])] = cell["result"]
            except (ValueError, KeyError, TypeError) as exc:
                raise InputError(
                    f"expected a cell in line {number} of {self._path}, got {line!r:.80}"
                ) from exc

    def _append(self, cell: dict[str, Any]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(json.dumps(cell).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def settings_parser(doc: str | None, name: str) -> argparse.ArgumentParser:
    """A parser with the options that all have: `--folder`, `--cells`, `--threads`.

    Args:
        name: of the file of cells in `RESULTS`.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="packages are made here, once")
    parser.add_argument("--cells", type=Path, default=RESULTS / f"{name}.jsonl", help="finished cells")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    return parser


def _key(figure: str, settings: Settings) -> str:
    return json.dumps([figure, settings], sort_keys=True)
