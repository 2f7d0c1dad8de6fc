"""Removal of control characters from every text that a command prints.

Packages, file names, notes and device names come from other people. A control character in them could move
the cursor, fill the clipboard (OSC 52) or reverse the line (U+202E). All commands print through this module
or through `permille.plain_console`.
"""

import logging
import re
import sys
import unicodedata
from io import TextIOWrapper
from typing import IO, Final

PLACEHOLDER: Final = "\N{REPLACEMENT CHARACTER}"
_OBEYED: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
# Keep the joiners. Persian, Hindi and emoji need them, and they do not move the cursor.
_KEPT: Final = frozenset("\n\t\u200c\u200d")


def printable(text: str) -> str:
    r"""Return `text` with U+FFFD in place of each character that a terminal would obey.

    These are control characters other than newline and tab, format characters other than joiners, line and
    paragraph separators, and lone surrogates.

    Example:
        >>> printable("a\x1b[2Jb")
        'a\ufffd[2Jb'
    """
    if text.isprintable():
        return text
    return "".join(letter if _is_shown(letter) else PLACEHOLDER for letter in text)


def reason(error: Exception) -> str:
    """Return the message of an error without its number, or the error's type if it has no message.

    Example:
        >>> reason(ConnectionRefusedError(111, "Connection refused"))
        'Connection refused'
    """
    return re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__


def echo(text: str = "", *, nl: bool = True, err: bool = False) -> None:
    """Print the printable form of a text and flush it, so that generated text appears as it is made."""
    stream = sys.stderr if err else sys.stdout
    lenient(stream)
    stream.write(printable(text) + ("\n" if nl else ""))
    stream.flush()


def lenient(stream: IO[str]) -> None:
    """Let a stream write `?` for a letter that its charset lacks, as of a terminal in ASCII or Latin-1."""
    if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
        stream.reconfigure(errors="replace")


def log_to_stderr(level: int, form: str) -> None:
    """Log printable lines of the format `form` to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(_PlainFormatter(form))
    logging.basicConfig(level=level, handlers=[handler])


class _PlainFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _is_shown(letter: str) -> bool:
    return letter in _KEPT or unicodedata.category(letter) not in _OBEYED
