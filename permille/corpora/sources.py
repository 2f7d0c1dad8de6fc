"""Texts of a corpus: `.jsonl` and `.jsonl.gz` (field `text`), and `.txt`.

    texts = list(file_texts(Path("stories.jsonl"), ReadReport()))

Unusable rows are counted by reason in a `ReadReport`. A file that ends in the middle of a row is
refused. A file with more than a tenth of broken rows is refused, too, because a mask should come from
the whole corpus. `file_texts` is a generator, so that a file is never in memory as a whole.
"""

import gzip
import json
import zlib
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, Final, cast

from permille.errors import InputError

SUFFIXES: Final = (".jsonl", ".jsonl.gz", ".txt")
# In bytes. A whole row is held in memory, so its size needs a limit.
LARGEST_ROW = 8 << 20
HEAD_BYTES = 1 << 20
# Empty gzip members have 20 bytes each and no text, so a head is limited in the file, too.
_HEAD_FILE_BYTES = 2 * HEAD_BYTES
# A .txt file has no rows. It is cut at blank lines into texts of at least this many characters.
TEXT_CHARACTERS = 4096
_EXAMPLES = 5
_MOST_BROKEN = 0.1  # the largest share of broken rows
_JUDGED_FROM = 100  # the share is checked from this row on, and at the end of the corpus


class BadRow(StrEnum):
    """Reason for skipping a row."""

    NOT_UTF8 = "not-utf8"
    NOT_JSON = "not-json"
    NO_TEXT = "no-text-field"
    EMPTY = "empty"
    TOO_LONG = "too-long"


@dataclass(slots=True)
class ReadReport:
    """Number of rows read so far, and number of bad rows by reason, with the first bad rows as examples.

    Row numbers begin at 1.
    """

    rows: int = 0
    bad: Counter[BadRow] = field(default_factory=Counter)
    examples: dict[BadRow, list[int]] = field(default_factory=dict)

    def refuse(self, reason: BadRow) -> None:
        """Count the current row as bad. Raise InputError if too many are broken."""
        self.bad[reason] += 1
        shown = self.examples.setdefault(reason, [])
        if len(shown) < _EXAMPLES:
            shown.append(self.rows)
        if self.rows >= _JUDGED_FROM:
            self.check()

    def check(self) -> None:
        """Refuse a corpus with more than a tenth of broken rows. Empty rows do not count as broken.

        Raises:
            InputError: too many rows are broken. The message has the number of bad rows by reason, and the
                numbers of the first ones.
        """
        filled = self.rows - self.bad[BadRow.EMPTY]
        broken = self.bad.total() - self.bad[BadRow.EMPTY]
        if broken > _MOST_BROKEN * filled:
            reasons = ", ".join(
                f"{number} {reason} (first in rows {', '.join(map(str, self.examples[reason]))})"
                for reason, number in sorted(self.bad.items())
            )
            raise InputError(f"{broken} of {filled} rows are broken, more than {_MOST_BROKEN:.0%}: {reasons}")

    def as_json(self) -> dict[str, object]:
        """Return the counts for the job's report.

        Its form is {"rows": ..., "bad": {reason: {"count": ..., "first_rows": [...]}}}.
        """
        bad = {
            str(reason): {"count": number, "first_rows": self.examples[reason]}
            for reason, number in sorted(self.bad.items())
        }
        return {"rows": self.rows, "bad": bad}


def file_texts(path: Path, report: ReadReport) -> Iterator[str]:
    """Yield the usable texts of a file, in their order.

        texts = list(file_texts(Path("stories.jsonl"), ReadReport()))

    Raises:
        InputError: the name has another ending, the file is cut off or damaged, or too many rows are broken.
    """
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        yield from _json_texts(path, report)
    elif path.name.endswith(".txt"):
        yield from _plain_texts(path, report)
    else:
        raise InputError(f"{path.name!r:.200} must be a .jsonl, .jsonl.gz or .txt file.")
    report.check()


def check_head(path: Path) -> None:
    """Check that the first rows of a file fit the ending of its name.

    It reads at most `HEAD_BYTES` of text, from at most twice as many bytes of the file.

    Raises:
        InputError: the name has another ending, the file cannot be read, too many rows are broken, or there
            is no text.
    """
    if not path.name.endswith(SUFFIXES):
        raise InputError(f"The name of {path.name!r:.200} must end with one of {', '.join(SUFFIXES)}.")
    with _opened(path, most=_HEAD_FILE_BYTES) as file:
        head = file.read(HEAD_BYTES)
    lines = BytesIO(head).readlines()  # lines end as in `_lines`, and not at a `\r` alone
    # If the file is longer than `HEAD_BYTES`, the last line may be cut off, so it is not checked.
    whole = len(head) < HEAD_BYTES
    report = ReadReport()
    for line in lines if whole else lines[:-1]:
        report.rows += 1
        text = _line_of(line) if path.name.endswith(".txt") else _text_of(line)
        if isinstance(text, BadRow):
            report.bad[text] += 1
            report.examples.setdefault(text, [report.rows])
    if report.bad.total() == report.rows or whole or report.rows >= _JUDGED_FROM:
        try:
            report.check()
        except InputError as exc:
            form = '{"text": "..."}'
            raise InputError(
                f"{exc}. Write each row of a .jsonl file like {form}, or give a file of plain text "
                "the ending .txt."
            ) from exc
    if whole and (report.bad.total() == report.rows or not head.strip()):
        raise InputError(f"There is no text in {path.name!r:.200}.")


def _json_texts(path: Path, report: ReadReport) -> Iterator[str]:
    for line in _lines(path):
        report.rows += 1
        text = _text_of(line)
        # If a broken row has no line end, copying the file was probably interrupted.
        if text is BadRow.NOT_JSON and line and not line.endswith(b"\n"):
            raise InputError(f"The last row of {path.name!r:.200} is cut in its middle. Copy the file again.")
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
    return checked_text(row.get("text") if isinstance(row, dict) else None)


def checked_text(text: object) -> str | BadRow:
    """Return a usable text unchanged, or the reason why it is not usable.

    >>> checked_text(" ").value
    'empty'
    """
    if not isinstance(text, str):
        return BadRow.NO_TEXT
    if not text.strip():
        return BadRow.EMPTY
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # a lone surrogate: JSON can escape it, but no tokenizer accepts it
        return BadRow.NOT_UTF8
    return text


def _plain_texts(path: Path, report: ReadReport) -> Iterator[str]:
    """Yield texts of whole paragraphs. Each has at least `TEXT_CHARACTERS`, except for the last.

    When a text reaches `LARGEST_ROW` characters, it ends after the current line, even inside a paragraph.
    In the report, a text counts as a row, and so does a bad line.
    """
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
    if b"\0" in line:  # UTF-16, whose lines may be valid UTF-8 with zero bytes, or no text at all
        return BadRow.NOT_UTF8
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        return BadRow.NOT_UTF8


def _lines(path: Path) -> Iterator[bytes | None]:
    """Yield the lines with their ends. Yield None for a line above `LARGEST_ROW` bytes, and skip it."""
    with _opened(path) as file:
        while line := file.readline(LARGEST_ROW + 1):
            if len(line) <= LARGEST_ROW:
                yield line
                continue
            # Skip the rest of the line in pieces, so that the whole line is never in memory.
            while line and not line.endswith(b"\n"):
                line = file.readline(LARGEST_ROW)
            yield None


@contextmanager
def _opened(path: Path, *, most: int | None = None) -> Iterator[BinaryIO]:
    """Open a file, and decompress it if its name says so. Give at most the first `most` bytes of the file.

    A byte order mark at the start of the text is passed over. Programs of Windows write it.
    """
    try:
        with path.open("rb") as whole:
            part = whole if most is None else BytesIO(whole.read(most))
            file = cast(BinaryIO, gzip.GzipFile(fileobj=part)) if path.name.endswith(".gz") else part
            if file.read(len(BOM_UTF8)) != BOM_UTF8:
                file.seek(0)
            yield file
    except (gzip.BadGzipFile, zlib.error, EOFError) as exc:
        raise InputError(
            f"{path.name!r:.200} is not a complete gzip file: {exc}. Copy the file again."
        ) from exc
    except OSError as exc:
        raise InputError(f"Cannot read {path.name!r:.200}: {exc}") from exc
