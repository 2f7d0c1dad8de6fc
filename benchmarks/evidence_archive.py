"""The results that a page was made from, item by item: kept beside it, so that any clone can go on from them.

An archive is a results file without this machine's paths (those are in the sweep's file, which is made again)
and without repetition: a list of test items or of their passages stands once, in a line of its own before the
first cell that has it, and cells say its number. Expanded, it is the results file, byte for byte.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from permille.errors import InputError
from permille.evaluate.cells import Json

FOLDER = "evidence"
_SHARED = ("items", "groups")


def archived(output: Path) -> list[Path]:
    """The archives beside a page."""
    return sorted((output / FOLDER).glob("*.jsonl"))


def check_kept(sweeps: Path, output: Path) -> None:
    """That a page of these results would say no less than the one that is there.

    Raises:
        InputError: an archive has cells that the results lack, or cannot be read.
    """
    for path in archived(output):
        lacking = {line["key"] for line in _cells(path)} - {
            line["key"] for line in _cells(sweeps / path.name)
        }
        if lacking:
            raise InputError(
                f"expected every cell of {path} in {sweeps}, {len(lacking)} are not there, such as "
                f"{min(lacking)}: take them up with --restore {output}, or choose another --output"
            )


def write_archives(sweeps: Path, output: Path, names: Iterable[str]) -> None:
    """Keep the results of sweeps; those that have none yet are left out."""
    (output / FOLDER).mkdir(parents=True, exist_ok=True)
    for name in names:
        if lines := _lines(sweeps / f"{name}.jsonl"):
            _write(output / FOLDER / f"{name}.jsonl", _shortened(lines))


def expand(archive: Path, results: Path) -> None:
    """Write the results file that an archive was made from.

    Raises:
        InputError: it is no archive.
    """
    _write(results, _lengthened(archive))


def _shortened(lines: Iterable[Json]) -> Iterator[Json]:
    numbers: dict[str, int] = {}
    for line in lines:
        short = dict(line)
        for key in _SHARED:
            if key in line:
                text = json.dumps(line[key])
                if text not in numbers:
                    numbers[text] = len(numbers)
                    yield {"kind": "list", "key": str(numbers[text]), "values": line[key]}
                short[key] = numbers[text]
        yield short


def _lengthened(archive: Path) -> Iterator[Json]:
    lists: list[list[str]] = []
    for number, line in enumerate(_lines(archive), start=1):
        try:
            if line["kind"] == "list":
                lists.append(line["values"])
                continue
            shared = {key: lists[line[key]] for key in _SHARED if key in line}
        except (KeyError, IndexError, TypeError) as exc:
            raise InputError(f"expected a line of an archive in line {number} of {archive}") from exc
        yield line | shared


def _cells(path: Path) -> Iterator[Json]:
    return (line for line in _lines(path) if line.get("kind") == "cell")


def _lines(path: Path) -> list[Json]:
    """Whole lines; none where there is no file.

    Raises:
        InputError: one is no JSON object with a key, as those of results and archives are.
    """
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_bytes().rpartition(b"\n")[0].splitlines(), start=1):
        try:
            record = json.loads(line)
            record["key"]
        except (ValueError, KeyError, TypeError) as exc:
            raise InputError(f"expected a result in line {number} of {path}, got {line[:60]!r}") from exc
        found.append(record)
    return found


def _write(path: Path, lines: Iterable[Json]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        file.writelines(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)
    part.replace(path)
