"""Text of Word and OpenDocument files, which are archives of XML.

The text is what a reader of the final document sees. It has tracked insertions, but no deleted text, comments
or codes of fields.
"""

import re
from collections.abc import Iterator
from io import BytesIO
from typing import Final
from xml.etree.ElementTree import Element, fromstring
from zipfile import ZipFile

# Word writes text in these elements only. OpenDocument writes it anywhere in a paragraph.
_WORD_TEXT: Final = "t"
_PARAGRAPHS: Final = frozenset({"p", "h"})
_ROWS: Final = frozenset({"tr", "table-row"})
_SPACES: Final = {
    "p": "\n",
    "br": "\n",
    "cr": "\n",
    "line-break": "\n",
    "tab": "\t",
    "s": " ",
    "noBreakHyphen": "-",
}
_UNSEEN: Final = frozenset(
    # Properties of Word, such as stops of tabs; and its second form of a drawing, for older programs.
    ("pPr", "rPr", "sectPr", "Fallback", "annotation", "tracked-changes", "note-citation", "moveFrom")
)


def word_text(data: bytes) -> str:
    """Return the paragraphs of a Word file, and its rows of tables as lines of cells, then its notes.

    Raises:
        KeyError: the archive is of another kind.
        Exception: the file is damaged.
    """
    # The page of Office 365 in a browser numbers the parts.
    parts = (r"word/document\d*\.xml", r"word/endnotes\d*\.xml", r"word/footnotes\d*\.xml")
    return _text(data, parts, is_word=True)


def open_document_text(data: bytes) -> str:
    """Return the paragraphs of an OpenDocument text file. Raises as `word_text`."""
    return _text(data, (r"content\.xml",), is_word=False)


def _text(data: bytes, parts: tuple[str, ...], *, is_word: bool) -> str:
    """Return the text of the parts with these names, of which the first must be there."""
    with ZipFile(BytesIO(data)) as archive:
        found = [[name for name in archive.namelist() if re.fullmatch(part, name)] for part in parts]
        if not found[0]:
            raise KeyError(parts[0])
        read = [archive.read(name) for names in found for name in names]
    # Expat bounds what entities may grow to, and this process bounds time and memory.
    return "\n\n".join(text for part in read for text in _blocks(fromstring(part), is_word=is_word))  # noqa: S314


def _name(element: Element) -> str:
    return str(element.tag).rpartition("}")[2]


def _blocks(element: Element, *, is_word: bool) -> Iterator[str]:
    """Yield each paragraph that has text, and each row of a table as one line of cells."""
    for child in element:
        name = _name(child)
        if name in _PARAGRAPHS:
            block = "".join(_pieces(child, is_word=is_word)).strip()
        elif name in _ROWS:
            cells = ("\n".join(_blocks(cell, is_word=is_word)) for cell in child)
            block = "\t".join(filter(None, cells))
        elif name in _UNSEEN:
            continue
        else:
            yield from _blocks(child, is_word=is_word)
            continue
        if block:
            yield block


def _pieces(element: Element, *, is_word: bool) -> Iterator[str]:
    name = _name(element)
    if name in _UNSEEN:
        return
    yield _SPACES.get(name, "")
    if name == _WORD_TEXT or not is_word:
        yield element.text or ""
    for child in element:
        yield from _pieces(child, is_word=is_word)
        if not is_word:
            yield child.tail or ""
