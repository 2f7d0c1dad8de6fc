"""Text extraction from PDF, Word, HTML and mail.

Such documents may come from strangers, and some are compressed. So they are read in the child
process (`child.py`), within its limits. PDF and Word need one library each (the extra `documents`).
HTML and mail need only the standard library.
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
    """Return the texts of a document whose file name has this suffix. Mail gives one text per message.

    Raises:
        ModuleNotFoundError: the library that reads such documents is not installed.
        Exception: the document is damaged. The libraries raise errors of many types.
    """
    match suffix:
        case ".pdf":
            from pypdf import PdfReader

            return ["\n\n".join(page.extract_text() for page in PdfReader(BytesIO(data)).pages)]
        case ".docx":
            from docx import Document

            return ["\n\n".join(text for text in _paragraphs(Document(BytesIO(data))) if text.strip())]
        case ".html" | ".htm":
            return [html_text(data.decode("utf-8-sig"))]
        case ".mbox":
            return list(_mailbox(data))
    return [_mail(data)]


def html_text(source: str) -> str:
    r"""Return the visible text of a page, one paragraph per block.

    Example:
        >>> html_text("<h1>Hello</h1><p>big <b>world</b><script>1</script></p>")
        'Hello\n\nbig world'
    """
    page = _Page()
    page.feed(source)
    page.close()
    return page.text()


class _Page(HTMLParser):
    """A parser that collects the text outside of scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self._blocks = [""]
        self._silent = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:  # noqa: ARG002 - the name is html.parser's
        """Begin a paragraph with each block."""
        # Count the depth, because these elements may be nested: a template may contain a script.
        self._silent += _SILENT.fullmatch(tag) is not None
        if _BLOCKS.fullmatch(tag):
            self._blocks.append("")

    def handle_endtag(self, tag: str) -> None:
        """End the paragraph with each block."""
        # Do not count below 0, because a page may close an element that it never opened.
        self._silent = max(0, self._silent - (_SILENT.fullmatch(tag) is not None))
        if _BLOCKS.fullmatch(tag):
            self._blocks.append("")

    def handle_data(self, data: str) -> None:
        """Collect the text between tags."""
        if not self._silent:
            self._blocks[-1] += data

    def text(self) -> str:
        """Return the paragraphs. Runs of white space become single spaces."""
        found = (_SPACE.sub(" ", block).strip() for block in self._blocks)
        return "\n\n".join(block for block in found if block)


def _paragraphs(document: object) -> Iterator[str]:
    """Yield paragraphs, and rows of tables as lines of cells."""
    from docx.table import Table

    for part in document.iter_inner_content():  # type: ignore[attr-defined]
        if isinstance(part, Table):
            yield "\n".join("\t".join(cell.text for cell in row.cells) for row in part.rows)
        else:
            yield part.text


def _mailbox(data: bytes) -> Iterator[str]:
    """Yield the texts of messages.

    A message that is damaged or has an unknown charset gives an empty text.
    """
    # A message begins with a line `From `. Such lines within a message are quoted by `>` (RFC 4155).
    for message in _FROM_LINE.split(data):
        if message.strip():
            try:
                yield _mail(message.replace(b"\n>From ", b"\nFrom "))
            except (LookupError, RecursionError, TypeError, ValueError):
                yield ""


def _mail(data: bytes) -> str:
    """Return the text of a message without its quotations, or an empty text if it has none."""
    message = email.message_from_bytes(data, _class=EmailMessage, policy=default)
    body = message.get_body(preferencelist=("plain", "html"))
    if body is None:
        return ""
    text = str(body.get_content())
    if body.get_content_type() == "text/html":
        text = html_text(text)
    return _QUOTED.sub("", text.replace("\r\n", "\n"))
