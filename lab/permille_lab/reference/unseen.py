"""The text that the model must never see, string by string: tasks, users, held-out documents."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from permille.errors import InputError


def unseen_texts(data: Path, globs: Iterable[str]) -> Iterator[str]:
    """Every string in the files under `data`; `file.jsonl#last100` means the last 100 lines only.

    Lines of a table are divided at tabs, JSON yields each string in it; what does not parse as JSON counts as
    plain text, so that a broken line still forbids its words.

    Raises:
        InputError: a pattern finds no file (an empty list would pass every text in silence).
    """
    for pattern in globs:
        glob, _, tail = pattern.partition("#last")
        paths = sorted(path for path in data.glob(glob) if path.is_file())
        if not paths:
            raise InputError(f"expected files {glob} under {data} to keep out, found none")
        for path in paths:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            yield from _strings(path.suffix, lines[-int(tail) :] if tail else lines)


def _strings(suffix: str, lines: list[str]) -> Iterator[str]:
    if suffix == ".json":
        yield from _of_json("\n".join(lines))
    elif suffix == ".jsonl":
        for line in lines:
            yield from _of_json(line)
    elif suffix == ".xml":
        yield from re.split(r"<[^>]+>", "\n".join(lines))
    else:
        for line in lines:
            yield from line.split("\t")


def _of_json(text: str) -> Iterator[str]:
    try:
        value = json.loads(text)
    except ValueError:
        yield text
        return
    yield from _leaves(value)


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for child in value.values():
            yield from _leaves(child)
    elif isinstance(value, list):
        for child in value:
            yield from _leaves(child)
