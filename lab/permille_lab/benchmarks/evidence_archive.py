"""The results that a page was made from, item by item: kept beside it, so that any clone can go on from them.

An archive is a results file without this machine's paths (those are in the sweep's file, which is made again)
and without repetition: a list of test items or of their passages stands once, in a line of its own before the
first cell that has it, and cells say its number. Expanded, it is the results file, byte for byte.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from permille.errors import InputError
from permille.files import write_atomic
from permille_lab.evaluate.outcomes import Json

FOLDER = "evidence"
_SHARED = ("items", "groups")


def archives(output: Path) -> dict[str, Path]:
    """The archives beside a page, by the name of their sweep."""
    return {path.stem: path for path in sorted((output / FOLDER).glob("*.jsonl"))}


def write_archives(sweeps: Path, output: Path, names: Iterable[str]) -> None:
    """Keep the results of sweeps."""
    (output / FOLDER).mkdir(parents=True, exist_ok=True)
    for name in names:
        whole = (sweeps / f"{name}.jsonl").read_bytes().rpartition(b"\n")[0]
        lines = _parsed(whole, sweeps / f"{name}.jsonl")
        write_atomic(output / FOLDER / f"{name}.jsonl", _text(_shortened(lines)))


def take_up(archive: Path, results: Path, check: Callable[[Path], object]) -> int:
    """Add what an archive has and the results of the same sweep lack: cells, searches and their trials.

    Args:
        check: given the restored file before it counts; raises InputError where it is not as expected.

    Returns:
        The cells that were not there; 0 where the results are of another sweep, which stay.

    Raises:
        InputError: it is no archive, or was refused.
    """
    lines = _lengthened(archive)
    own = _parsed(results.read_bytes().rpartition(b"\n")[0], results) if results.exists() else []
    if own and own[0] != lines[0]:
        return 0
    there = {(line["kind"], line["key"]) for line in own}
    new = [line for line in lines if (line["kind"], line["key"]) not in there]
    if not new:
        return 0
    results.parent.mkdir(parents=True, exist_ok=True)
    restored = results.with_suffix(".restored")
    write_atomic(restored, _text([*own, *new]))
    try:
        check(restored)
    except InputError as exc:
        restored.unlink()
        raise InputError(
            f"expected results of these files, choices and version in {archive}, got others: leave --restore "
            f"out to measure again ({exc})"
        ) from exc
    restored.replace(results)
    return sum(line["kind"] == "cell" for line in new)


def searches_lost(archive: Path, results: Path) -> list[str]:
    """Searches, finished or begun, that an archive knows more of than the results do."""
    own = results.read_bytes().rpartition(b"\n")[0] if results.exists() else b""
    here, there = _parsed(own, results), _lengthened(archive)
    known = _keys(here, "tuning")
    # Trials of a search that has chosen say no more.
    begun = {key for key in _keys(there, "trial") if key.rsplit("/", 2)[0] not in known}
    lost = _keys(there, "tuning") - known
    return sorted(lost | {key for key in begun - _keys(here, "trial") if key.rsplit("/", 2)[0] not in lost})


def _keys(lines: Iterable[Json], kind: str) -> set[str]:
    return {line["key"] for line in lines if line["kind"] == kind}


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


def _lengthened(archive: Path) -> list[Json]:
    data = archive.read_bytes()
    if not data.endswith(b"\n"):
        raise InputError(f"expected whole lines in {archive}, got an end in {data[-60:]!r}")
    lists: list[list[str]] = []
    found = []
    for number, line in enumerate(_parsed(data[:-1], archive), start=1):
        try:
            if line["kind"] == "list":
                lists.append(line["values"])
            else:
                found.append(line | {key: lists[line[key]] for key in _SHARED if key in line})
        except (KeyError, IndexError, TypeError) as exc:
            raise InputError(f"expected a line of an archive in line {number} of {archive}") from exc
    if found[0]["kind"] != "sweep":
        raise InputError(f"expected a sweep in the first line of {archive}, got {found[0]['kind']!r}")
    return found


def _parsed(whole: bytes, path: Path) -> list[Json]:
    """Lines that have a kind and a key, as those of results and archives have."""
    found = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            record = json.loads(line)
            record["kind"], record["key"]
        except (ValueError, KeyError, TypeError) as exc:
            raise InputError(f"expected a result in line {number} of {path}, got {line[:60]!r}") from exc
        found.append(record)
    return found


def _text(lines: Iterable[Json]) -> bytes:
    return b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)
