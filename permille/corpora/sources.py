"""Texts of a corpus: `.jsonl`, `.jsonl.gz` (field `text`) and `.txt` below a root, or C4 by streaming.

Rows that cannot be used are counted by reason in the caller's `ReadReport`; none is dropped in silence. A
file that ends in the middle of a row is refused, and so is one of which more than a tenth is broken: a mask
or a calibration of what happens to be left would be another one than was asked for.
Reading is lazy and bounded: no row above `LARGEST_ROW` bytes is held, and nothing is read beyond what is
asked for.
"""

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO, cast

from permille.errors import InputError, RetryableError
from permille.models.sources import resolve_inside

LARGEST_ROW = 8 << 20
# A .txt has no rows: it is cut at blank lines into texts of at least this many characters.
TEXT_CHARACTERS = 4096
_EXAMPLES = 5
# Of broken rows, once so many rows were read or the corpus ends.
_MOST_BROKEN = 0.1
_JUDGED_FROM = 100


class StreamedDataset(StrEnum):
    """The public datasets that may be streamed; no other is ever asked for."""

    C4 = "c4"


# repository, configuration, commit: a dataset that moves would change a mask.
_STREAMS = {StreamedDataset.C4: ("allenai/c4", "en", "1588ec454efa1a09f29cd18ddd04fe05fc8653a2")}


@dataclass(frozen=True, slots=True, kw_only=True)
class FileCorpus:
    """`path` is relative to the root, with "/" between parts."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedCorpus:
    """A dataset of the allow-list; `split` is "train" or "validation"."""

    dataset: StreamedDataset
    split: str = "train"


CorpusRef = FileCorpus | StreamedCorpus


class BadRow(StrEnum):
    """Why a row was not used."""

    NOT_UTF8 = "not-utf8"
    NOT_JSON = "not-json"
    NO_TEXT = "no-text-field"
    EMPTY = "empty"
    TOO_LONG = "too-long"


@dataclass(slots=True)
class ReadReport:
    """What reading met so far: rows seen, and of these the bad ones by reason, with the first row numbers
    (from 1)."""

    rows: int = 0
    bad: Counter[BadRow] = field(default_factory=Counter)
    examples: dict[BadRow, list[int]] = field(default_factory=dict)

    def refuse(self, reason: BadRow) -> None:
        """Count the current row as bad (InputError: too many of them are broken)."""
        self.bad[reason] += 1
        shown = self.examples.setdefault(reason, [])
        if len(shown) < _EXAMPLES:
            shown.append(self.rows)
        if self.rows >= _JUDGED_FROM:
            self.check()

    def check(self) -> None:
        """Refuse a corpus of which more than a tenth is broken; empty rows are no damage.

        Raises:
            InputError: with the numbers by reason, and the first row numbers.
        """
        filled = self.rows - self.bad[BadRow.EMPTY]
        broken = self.bad.total() - self.bad[BadRow.EMPTY]
        if broken > _MOST_BROKEN * filled:
            reasons = ", ".join(
                f"{number} {reason} (first in rows {', '.join(map(str, self.examples[reason]))})"
                for reason, number in sorted(self.bad.items())
            )
            raise InputError(
                f"expected at most {_MOST_BROKEN:.0%} broken rows, got {broken} of {filled}: {reasons}"
            )

    def as_json(self) -> dict[str, object]:
        """For the job's report: {"rows": ..., "bad": {reason: {"count": ..., "first_rows": [...]}}}."""
        bad = {
            str(reason): {"count": number, "first_rows": self.examples[reason]}
            for reason, number in sorted(self.bad.items())
        }
        return {"rows": self.rows, "bad": bad}


def read_texts(ref: CorpusRef, root: Path, report: ReadReport) -> Iterator[str]:
    """The usable texts of a corpus, in their order, read as they are asked for.

    Raises:
        InputError: a path outside the root or with another ending, a damaged .gz, a last row that is cut,
            too many broken rows, or a dataset not on the list.
        RetryableError: the dataset's host cannot be reached.
    """
    if isinstance(ref, StreamedCorpus):
        return _checked_to_the_end(_streamed_texts(ref, report), report)
    path = resolve_inside(root, ref.path, what="file")
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return _checked_to_the_end(_json_texts(path, report), report)
    if path.name.endswith(".txt"):
        return _checked_to_the_end(_plain_texts(path, report), report)
    raise InputError(f"expected a .jsonl, .jsonl.gz or .txt file, got {path.name!r:.200}")


def _checked_to_the_end(texts: Iterator[str], report: ReadReport) -> Iterator[str]:
    yield from texts
    report.check()


def _json_texts(path: Path, report: ReadReport) -> Iterator[str]:
    for line in _lines(path):
        report.rows += 1
        text = _text_of(line)
        if text is BadRow.NOT_JSON and line and not line.endswith(b"\n"):
            raise InputError(
                f"expected {path.name!r:.200} to end with a whole row, got one cut in its middle"
            )
        if isinstance(text, BadRow):
            report.refuse(text)
        else:
            yield text


def _text_of(line: bytes | None) -> str | BadRow:
    if line is None:
        return BadRow.TOO_LONG
    if not line.strip():
        return BadRow.EMPTY
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return BadRow.NOT_UTF8
    except (ValueError, RecursionError):
        return BadRow.NOT_JSON
    return _checked(row.get("text") if isinstance(row, dict) else None)


def _checked(text: object) -> str | BadRow:
    if not isinstance(text, str):
        return BadRow.NO_TEXT
    if not text.strip():
        return BadRow.EMPTY
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # A lone surrogate, which JSON can escape and no tokenizer takes.
        return BadRow.NOT_UTF8
    return text


def _plain_texts(path: Path, report: ReadReport) -> Iterator[str]:
    """Whole paragraphs, joined as they stood, until `TEXT_CHARACTERS` are reached. A bad line counts as a
    row."""
    paragraphs = ""
    for line in _lines(path):
        text = _line_of(line)
        if isinstance(text, BadRow):
            report.rows += 1
            report.refuse(text)
            continue
        paragraphs += text
        if len(paragraphs) >= LARGEST_ROW or (not text.strip() and len(paragraphs) >= TEXT_CHARACTERS):
            report.rows += 1
            yield paragraphs
            paragraphs = ""
    if paragraphs.strip():
        report.rows += 1
        yield paragraphs


def _line_of(line: bytes | None) -> str | BadRow:
    if line is None:
        return BadRow.TOO_LONG
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        return BadRow.NOT_UTF8


def _lines(path: Path) -> Iterator[bytes | None]:
    """Lines with their ends; None for one above `LARGEST_ROW` bytes, which is passed over, never held."""
    compressed = path.name.endswith(".gz")
    try:
        with cast(BinaryIO, gzip.open(path, "rb")) if compressed else path.open("rb") as file:
            while line := file.readline(LARGEST_ROW + 1):
                if len(line) <= LARGEST_ROW:
                    yield line
                    continue
                while line and not line.endswith(b"\n"):
                    line = file.readline(LARGEST_ROW)
                yield None
    except (gzip.BadGzipFile, zlib.error, EOFError) as exc:
        raise InputError(f"expected a whole gzip file at {path.name!r:.200}: {exc}") from exc
    except OSError as exc:
        raise InputError(f"expected to read {path.name!r:.200}: {exc}") from exc


def _streamed_texts(ref: StreamedCorpus, report: ReadReport) -> Iterator[str]:
    if ref.dataset not in _STREAMS or ref.split not in ("train", "validation"):
        raise InputError(
            f"expected dataset c4, split train or validation, got {ref.dataset!r}, {ref.split!r}"
        )
    for row in _open_stream(ref):
        report.rows += 1
        text = _checked(row.get("text"))
        if isinstance(text, BadRow):
            report.refuse(text)
        else:
            yield text


def _open_stream(ref: StreamedCorpus) -> Iterable[dict[str, object]]:
    import datasets

    repository, configuration, commit = _STREAMS[ref.dataset]
    try:
        yield from datasets.load_dataset(
            repository, configuration, split=ref.split, streaming=True, revision=commit
        )
    except OSError as exc:
        raise RetryableError(f"expected to reach the host of {ref.dataset}: {exc}") from exc
