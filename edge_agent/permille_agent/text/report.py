"""Account of the user's text: of each file below a folder, and of each message in a file."""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from permille.text_files import advice

MAX_EXAMPLES = 20


@dataclass(slots=True)
class DataReport:
    """Counts of the rows that were read and skipped, with examples of skipped rows.

    A row is a text file, a line of `.jsonl`, a conversation of an export, or a message of a mail file. A file
    that gives no row is one skipped row. Each path below a folder is in `files` or in `ignored`.

    Attributes:
        files: files and folders that were opened, or that could not be opened.
        ignored: files that are no text, by kind: the ending of the name, `link` or `hidden`.
        rows: rows that were read or skipped.
        read: rows that were read, with duplicates.
        bad_rows: rows that were skipped, by reason.
        charsets: rows that were decoded from another charset than UTF-8.
        left_out: parts of rows that nobody wrote as text, such as front matter or notices of a chat.
        examples: places of the first skipped rows, with the reasons.
        duplicates: rows that were read and left out, because an earlier one says the same.
        repeated_paragraphs: long paragraphs that were left out for the same reason.
        documents: documents that the rows gave.
    """

    files: int = 0
    ignored: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    read: int = 0
    bad_rows: Counter[str] = field(default_factory=Counter)
    charsets: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    duplicates: int = 0
    repeated_paragraphs: int = 0
    documents: int = 0

    def bad(self, place: str | Path, reason: str) -> None:
        """Count a skipped row, and keep the first ones as examples."""
        self.rows += 1
        self.bad_rows[reason] += 1
        # A folder may have a million bad rows, so only the first ones are kept.
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(f"{shown(place)}: {reason}")

    def refuse(self, place: str, reason: str) -> None:
        """Count a row as skipped that was counted as read before."""
        self.rows -= 1
        self.read -= 1
        self.bad(place, reason)

    def summary(self) -> str:
        """Describe the counts in one line.

        Example:
            >>> report = DataReport(files=3, read=2)
            >>> report.bad("notes.txt", "empty")
            >>> report.summary()
            '3 files: 2 read, 1 skipped: 1 x empty'
        """
        line = f"{_files(self.files)}: {self.read} read, {sum(self.bad_rows.values())} skipped"
        line += f": {_listed(self.bad_rows)}" if self.bad_rows else ""
        if repeated := self.duplicates + self.repeated_paragraphs:
            line += f" (duplicates left out: {repeated})"
        if self.ignored:
            ignored = sum(self.ignored.values())
            line += f"; {_files(ignored)} ignored: {_listed(self.ignored, advice)}"
        if self.charsets:
            line += f"; decoded from {_listed(self.charsets)}"
        return f"{line}; left out of the text: {_listed(self.left_out)}" if self.left_out else line


def shown(place: str | Path) -> str:
    r"""Return the name of a place as one line of text that any record can hold.

    Example:
        >>> shown("bad\udce9.txt")
        'bad\\xe9.txt'
    """
    text = os.fsencode(place).decode("utf-8", "backslashreplace")
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def _files(count: int) -> str:
    return f"{count} file{'' if count == 1 else 's'}"


def _listed(counts: Counter[str], more: Callable[[str], str] = lambda _: "") -> str:
    return ", ".join(f"{count} x {what}{more(what)}" for what, count in counts.most_common())
