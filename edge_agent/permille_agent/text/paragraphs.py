"""Plain text in paragraphs and sections, and what makes two texts the same."""

import re
import unicodedata
from collections.abc import Iterator

SECTION_CHARACTERS = 1000


def normalised(text: str) -> str:
    """`text` without differences of case, width and white space: equal results are duplicates."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def sections(text: str) -> list[str]:
    """`text` in contiguous sections of about 1,000 characters: whole paragraphs, else lines, else words."""
    result: list[str] = []
    current = ""
    for piece in _pieces(text):
        if current and len(current) + len(piece) > SECTION_CHARACTERS:
            result.append(current)
            current = ""
        current += piece
    if current.strip():
        result.append(current)
    trimmed = [section.strip("\n") for section in result]
    return [section for section in trimmed if section.strip()]


def _pieces(text: str) -> Iterator[str]:
    for paragraph in paragraphs(text):
        for line in (
            [paragraph] if len(paragraph) <= SECTION_CHARACTERS else paragraph.splitlines(keepends=True)
        ):
            if len(line) <= SECTION_CHARACTERS:
                yield line
            else:
                yield from re.findall(
                    rf"(?s).{{1,{SECTION_CHARACTERS}}}(?:\s+|$)|.{{1,{SECTION_CHARACTERS}}}", line
                )


def paragraphs(text: str) -> list[str]:
    """The paragraphs of `text`, each with the blank lines that follow it: joined, they are `text` again."""
    return re.findall(r"(?s).+?(?:\n[ \t]*\n\s*|\Z)", text)
