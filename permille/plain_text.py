"""Removal of control characters from every text that a command prints.

Packages, file names, notes and the names of devices come from others. A control character in them could move
the cursor, fill the clipboard (OSC 52) or turn the line around (U+202E). Commands print through this module
and `permille.plain_console`, so that no command has to think of it.
"""

import logging
import sys
import unicodedata
from typing import Final

PLACEHOLDER: Final = "\N{REPLACEMENT CHARACTER}"
_OBEYED: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
# The joiners are part of how Persian, Hindi and emoji are written, and move nothing.
_KEPT: Final = frozenset("\n\t\u200c\u200d")


def printable(text: str) -> str:
    r"""Return `text` with each character that a terminal obeys replaced by U+FFFD.

    These are control characters but newline and tab, format characters but the joiners, separators of lines
    and paragraphs, and lone surrogates, which no output can encode.

    Example:
        >>> printable("a\x1b[2Jb")
        'a\ufffd[2Jb'
    """
    if text.isprintable():
        return text
    return "".join(letter if _is_shown(letter) else PLACEHOLDER for letter in text)


def echo(text: str = "", *, nl: bool = True, err: bool = False) -> None:
    """Print what is printable of a text, and flush it: a generated text appears piece by piece."""
    stream = sys.stderr if err else sys.stdout
    stream.write(printable(text) + ("\n" if nl else ""))
    stream.flush()


def log_to_stderr(level: int, form: str) -> None:
    """Set the log of a command up: lines of `form` on standard error, as far as they are printable."""
    handler = logging.StreamHandler()
    handler.setFormatter(_PlainFormatter(form))
    logging.basicConfig(level=level, handlers=[handler])


class _PlainFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _is_shown(letter: str) -> bool:
    return letter in _KEPT or unicodedata.category(letter) not in _OBEYED
