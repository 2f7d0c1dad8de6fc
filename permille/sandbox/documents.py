"""The text of documents that are more than text: PDF, Word, HTML and mail.

All of it is foreign and some of it compressed, so it is read in the child process (`child.py`), within its
limits. PDF and Word take a library each (the extra `documents`); the rest is the standard library's.
"""

import email
import re
from collections.abc import Iterator
from email.message import EmailMessage
from email.policy import default
from html.parser import HTMLParser
from io import BytesIO
from typing import Final

_BLOCKS: Final = re.compile(
    "address|article|blockquote|br|dd|div|dt|h[1-6]|hr|li|p|pre|section|table|t[dhr]|ul"
)
_SILENT: Final = re.compile("script|style|template|title")
_FROM_LINE: Final = re.compile(rb"^From .*\r?\n", re.MULTILINE)
_QUOTED: Final = re.compile(r"^>.*\n?", re.MULTILINE)
_SPACE: Final = re.compile(r"[ \t\r\f\v\n]+")


def texts_of(suffix: str, data: bytes) -> list[str]:
    """Return the texts of a document by the suffix of its name; of mail one a message.

    Raises:
        ModuleNotFoundError: the library that reads it is not installed.
        Exception: whatever a library says of a damaged document.
    """
    match suffix:
        case ".pdf":
            return [_pdf(data)]
        case ".docx":
            return [_word(data)]
        case ".html" | ".htm":
            return [html_text(data.decode("utf-8-sig"))]
        case ".mbox":
            return list(_mailbox(data))
    return [_mail(data)]


def html_text(source: str) -> str:
    """Return what a page shows, a paragraph for each block."""
    page = _Page()
    page.feed(source)
    page.close()
    return page.text()


class _Page(HTMLParser):
    """Collects the text outside of scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self._blocks = [""]
        self._silent = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:  # noqa: ARG002 - the name is html.parser's
        """A block begins a paragraph."""
        self._silent += _SILENT.fullmatch(tag) is not None
        if _BLOCKS.fullmatch(tag):
            self._blocks.append("")

    def handle_endtag(self, tag: str) -> None:
        """A block ends its paragraph; an end without a beginning is passed over."""
        self._silent = max(0, self._silent - (_SILENT.fullmatch(tag) is not None))
        if _BLOCKS.fullmatch(tag):
            self._blocks.append("")

    def handle_data(self, data: str) -> None:
        """Text between tags."""
        if not self._silent:
            self._blocks[-1] += data

    def text(self) -> str:
        """Return the paragraphs, with single spaces."""
        found = (_SPACE.sub(" ", block).strip() for block in self._blocks)
        return "\n\n".join(block for block in found if block)


def _pdf(data: bytes) -> str:
    from pypdf import PdfReader

    return "\n\n".join(page.extract_text() for page in PdfReader(BytesIO(data)).pages)


def _word(data: bytes) -> str:
    from docx import Document

    return "\n\n".join(text for text in _paragraphs(Document(BytesIO(data))) if text.strip())


def _paragraphs(document: object) -> Iterator[str]:
    """Yield paragraphs, and rows of tables as lines of cells."""
    from docx.table import Table

    for part in document.iter_inner_content():  # type: ignore[attr-defined]
        if isinstance(part, Table):
            yield "\n".join("\t".join(cell.text for cell in row.cells) for row in part.rows)
        else:
            yield part.text


def _mailbox(data: bytes) -> Iterator[str]:
    """Yield the texts of messages; empty where one is damaged or of an unknown charset, as some spam is."""
    # A message begins with a line `From ` and has `>` before such lines of its own (RFC 4155).
    for message in _FROM_LINE.split(data):
        if message.strip():
            try:
                yield _mail(message.replace(b"\n>From ", b"\nFrom "))
            except (LookupError, RecursionError, TypeError, ValueError):
                yield ""


def _mail(data: bytes) -> str:
    """Return a message's text without the lines that it quotes; empty where it has none."""
    message = email.message_from_bytes(data, _class=EmailMessage, policy=default)
    body = message.get_body(preferencelist=("plain", "html"))
    if body is None:
        return ""
    text = str(body.get_content())
    if body.get_content_type() == "text/html":
        text = html_text(text)
    return _QUOTED.sub("", text.replace("\r\n", "\n"))
