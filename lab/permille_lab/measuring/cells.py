"""Finished measurements in `lab/results`, one JSON line each. The pages are made from them.

    cells = Cells(RESULTS / "engine.jsonl")
    result = cells.once("step", {"shape": "1.1B"}, measure)    # measures only if the cell is missing

A cell is one measurement. Its contenders run interleaved in one process, or in child processes one after the
other. Compare times only within a cell. A cell is written when it is finished, so a stopped benchmark
continues with the first unfinished cell. An incomplete last line, which a kill may leave, is cut off.

A cell is identified by its figure and its settings, not by the machine. All cells of a file are of one
machine, except those that `keep` added from elsewhere.
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
"""Folder of the results in a checkout."""
FOLDER = Path("build/bench")
"""Folder of the packages that benchmarks make."""

Settings = dict[str, Any]
Result = dict[str, Any]


class Cells:
    """The cells of one file. The file is created when its first cell is finished."""

    def __init__(self, path: Path) -> None:
        """Read the file if it exists.

        Raises:
            InputError: a complete line is not a cell.
        """
        self._path = path
        self._results: dict[str, Result] = {}
        if path.exists():
            self._read()

    def __iter__(self) -> Iterator[tuple[str, Settings, Result]]:
        """Yield (figure, settings, result) of each cell, in the order in which they were finished."""
        for key, result in self._results.items():
            figure, settings = json.loads(key)
            yield figure, settings, result

    def of(self, figure: str) -> list[tuple[Settings, Result]]:
        """Return the settings and results of the finished cells of a figure."""
        return [(settings, result) for name, settings, result in self if name == figure]

    def has(self, figure: str, settings: Settings) -> bool:
        """Return True if the cell is finished."""
        return _key(figure, settings) in self._results

    def once(self, figure: str, settings: Settings, measure: Callable[[], Result]) -> Result:
        """Return the result of a cell. If it is missing, measure and write it first."""
        key = _key(figure, settings)
        if key not in self._results:
            sys.stderr.write(f"{figure} {json.dumps(settings)}\n")
            self.keep(figure, settings, measure())
        return self._results[key]

    def keep(self, figure: str, settings: Settings, result: Result) -> None:
        """Write a finished cell, which may come from another machine."""
        self._append({"figure": figure, "settings": settings, "result": result})
        # Keep the form that a restart would read: JSON turns tuples into lists, for example.
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
    """Return a parser with the options of all benchmarks: `--folder`, `--cells` and `--threads`.

    Args:
        doc: the description, usually the docstring of the module.
        name: name of the file of cells in `RESULTS`, without its suffix.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder of the packages, made once")
    parser.add_argument("--cells", type=Path, default=RESULTS / f"{name}.jsonl", help="results file")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    return parser


def _key(figure: str, settings: Settings) -> str:
    return json.dumps([figure, settings], sort_keys=True)
