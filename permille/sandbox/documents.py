"""Text extraction from text in any charset, HTML, mail, tables, RTF, PDF, Word and OpenDocument.

Such documents may come from strangers, and some are compressed. So they are read in the child
process (`child.py`), within its limits. PDF and RTF need one library each (the extra `documents`).
The others need only the standard library.
"""

import codecs
import csv
import email
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from email.policy import compat32
from html.parser import HTMLParser
from io import BytesIO, StringIO
from typing import Final

from permille.sandbox.decoding import MARKS, UnreadableError, decode
from permille.sandbox.office import open_document_text, word_text

_BLOCKS: Final = re.compile(
    "address|article|blockquote|br|dd|div|dt|h[1-6]|hr|li|p|pre|section|table|t[dhr]|ul"
)
# The last ones are pictures, forms, and what a browser shows if it cannot show something else.
_SILENT: Final = re.compile(
    "script|style|template|title|svg|select|textarea|noscript|iframe|audio|video|canvas"
)
_OLE: Final = bytes.fromhex("d0cf11e0a1b11ae1")  # the container of encrypted and of old files of Office
_SPACE: Final = re.compile(r"[ \t\r\f\v\n]+")
# A page or a form of XML names its charset near its beginning.
_DECLARED: Final = re.compile(
    rb"""<(?:meta\b[^>]*?charset|\?xml\b[^>]*?encoding)\s*=\s*["']?\s*([\w.:-]+)""", re.IGNORECASE
)
_DECLARED_WITHIN: Final = 4096
MAIL_S: Final = 0.5
"""Processor time for one message of a mailbox, beside that for its size."""
_BYTES_A_S: Final = 1 << 20
_MAX_CELL: Final = 1 << 28  # characters; the default would refuse a long note in a table
_FROM_LINE: Final = re.compile(rb"^From ([^\n]{0,300})\n", re.MULTILINE)
_FROM_DATE: Final = re.compile(
    rb"\b[A-Z][a-z]{2},? +(?:[A-Z][a-z]{2} +\d|\d{1,2} +[A-Z][a-z]{2}).{1,20}\d:\d\d"
)
_HEADER: Final = re.compile(
    rb"(?:Return-Path|Received|Delivered-To|From|To|Cc|Date|Subject|Message-ID|MIME-Version|Status"
    rb"|(?:Content|DKIM|X)-[\w-]+):",
    re.IGNORECASE,
)
_QUOTED_FROM: Final = re.compile(rb"^>(>*From )", re.MULTILINE)
_LENGTH: Final = re.compile(rb"^Content-Length: *(\d+)\s*$", re.MULTILINE | re.IGNORECASE)
_QUOTED: Final = re.compile(r"^[ \t]*>.*\n?", re.MULTILINE)
# The words above a quotation: one or two lines with a date that end with a colon.
_ATTRIBUTION: Final = re.compile(
    r"^(?!>)[^\n]{0,120}\d[^\n]{0,120}(?:\n(?!>)[^\n]{1,120})?:[ \t]*\n\s*(?=>)", re.MULTILINE
)
# The header that some programs put above a whole quoted mail, in the language of its sender. A list of a
# person may look alike, so the names of the fields count. Without a rule above it, three fields are needed.
_FROM: Final = "From|Von|De|Da|Van|Fra|Från|Lähettäjä|Od|От|Від|Kimden|Feladó|差出人|发件人|寄件者|보낸 사람"
_FIELDS: Final = (
    "Sent|Date|To|Subject|Gesendet|Datum|An|Betreff|Envoyé|À|Objet|Enviado(?: el)?|Fecha|Para|Asunto|Inviato"
    "|Data|A|Oggetto|Verzonden|Aan|Onderwerp|Enviada(?: em)?|Assunto|Sendt|Dato|Til|Emne|Skickat|Till|Ämne"
    "|Lähetetty|Vastaanottaja|Aihe|Wysłano|Wysłane|Do|Temat|Odesláno|Komu|Předmět|Отправлено|Дата|Кому|Тема"
    "|送信日時|宛先|件名|发送时间|收件人|主题|寄件日期|收件者|主旨|보낸 날짜|받는 사람|제목"
)
_ORIGINAL: Final = re.compile(
    rf"^(?:[ \t]*(?:-{{3,20}}[^\n]{{3,40}}-{{3,20}}|_{{10,99}})[ \t]*\n\s*\*?(?:{_FROM}|{_FIELDS}) ?[:：]"
    rf"|\*?(?:{_FROM}) ?[:：][^\n]*\n{{1,2}}(?:\*?(?:{_FIELDS}|Cc|CC) ?[:：][^\n]*\n{{1,2}}){{2}}).*",
    re.MULTILINE | re.DOTALL,
)
# The lines that PGP puts around a text that it signs. A signature has few and short lines.
_SIGNED: Final = re.compile(
    r"^-----BEGIN PGP SIGNED MESSAGE-----\n(?:[\w-]{1,40}: [^\n]*\n){0,9}\n"
    r"|^-----BEGIN PGP SIGNATURE-----\n(?:[^-\n][^\n]{0,99}\n|\n){0,99}-----END PGP SIGNATURE-----\n?",
    re.MULTILINE,
)
# What PGP, PEM and uuencode make of a text or a file.
_CODED: Final = re.compile(
    r"^-----BEGIN ([A-Z0-9 ]{3,40})-----\n.*?^-----END \1-----(?:\n|\Z)"
    r"|^begin [0-7]{3,4} [^\n]{1,255}\n(?:[ -`]{1,90}\n)+end(?:\n|\Z)",
    re.MULTILINE | re.DOTALL,
)
# The last line of programs for phones.
_SENT_FROM: Final = re.compile(
    r"\n(?:Sent from my [^\n]{1,40}|Von meinem [^\n]{1,40} gesendet|Envoyé de(?:puis)? mon [^\n]{1,40}"
    r"|Enviado desde mi [^\n]{1,40}|Inviato da(?:l mio)? [^\n]{1,40}|Enviado do meu [^\n]{1,40}"
    r"|Verstuurd vanaf mijn [^\n]{1,40}|Get Outlook for [^\n]{1,80}|Outlook für [^\n]{1,80} beziehen)\s*\Z"
)


@dataclass(frozen=True, slots=True)
class Extracted:
    """A text of a document, and the charset that was used. Without a text, the reason why it was skipped."""

    text: str = ""
    charset: str = "utf-8"
    reason: str = ""


def texts_of(kind: str, data: bytes) -> list[Extracted]:
    """Return the texts of a document of this kind (`permille.text_files`). Mail gives one per message.

    Raises:
        ModuleNotFoundError: the library that reads such documents is not installed.
        UnreadableError: the document cannot be read.
        Exception: the document is damaged. The libraries raise errors of many types.
    """
    if kind in (".eml", ".mbox"):
        data = data.removeprefix(codecs.BOM_UTF8)
        data = decode(data)[0].encode("utf-8", "replace") if data.startswith(MARKS) else data
        data = data if b"\n" in data else data.replace(b"\r", b"\n")  # as mail programs of old Macs
    if kind == ".mbox":
        return [_extracted(_mail, message) for message in _messages(data)]
    return [_READERS.get(kind, decode_extracted)(data)]


def decode_extracted(data: bytes) -> Extracted:
    """Return the text of a file of plain text."""
    return Extracted(*decode(data))


def _extracted(read: Callable[[bytes], Extracted], data: bytes) -> Extracted:
    """Read one message. An unreadable message does not affect the others of its mailbox."""
    try:
        with _limited(MAIL_S + len(data) / _BYTES_A_S):
            return read(data)
    except UnreadableError as exc:
        return Extracted(reason=str(exc))
    except (AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return Extracted(reason="a damaged mail")


@contextmanager
def _limited(cpu_s: float) -> Iterator[None]:
    """Limit the processor time of a message. The parser of pages is quadratic on pages of unclosed tags."""

    def end(_signal: int, _frame: object) -> None:
        raise UnreadableError("takes too long to read")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _pdf(data: bytes) -> Extracted:
    from pypdf import PdfReader

    reader = PdfReader(BytesIO(data))
    if reader.is_encrypted and not reader.decrypt(""):
        raise UnreadableError("has a password")
    if not reader.pages:  # the list of pages is damaged
        raise UnreadableError("damaged: it has no pages")
    text = "\n\n".join(page.extract_text() for page in reader.pages)
    return Extracted(text, reason="" if text.strip() else "has no text, only pictures: perhaps a scan")


def _word(data: bytes) -> Extracted:
    if data.startswith(_OLE):
        raise UnreadableError("has a password, or is in the old format of Word (save it as .docx)")
    return Extracted(word_text(data))


def _open_document(data: bytes) -> Extracted:
    return Extracted(open_document_text(data))


def _rtf(data: bytes) -> Extracted:
    from striprtf.striprtf import rtf_to_text

    if not data.lstrip().startswith(b"{\\rtf"):
        return decode_extracted(data)
    # The file is ASCII and names the charset of its escapes itself.
    return Extracted(rtf_to_text(data.decode("latin-1"), errors="replace"))


def _table(data: bytes) -> Extracted:
    """Return the rows of a table as lines of cells."""
    text, charset = decode(data)
    text = text.replace("\r\n", "\n").replace("\r", "\n")  # the parser refuses a CR alone
    csv.field_size_limit(_MAX_CELL)
    try:
        dialect: type[csv.Dialect] = csv.Sniffer().sniff(text[:_DECLARED_WITHIN], ",;\t|")
    except csv.Error:
        dialect = csv.excel
    try:
        rows = [[cell.strip() for cell in row] for row in csv.reader(StringIO(text), dialect)]
    except csv.Error as exc:
        raise UnreadableError("not a table of comma-separated values") from exc
    return Extracted("\n".join("\t".join(filter(None, row)) for row in rows if any(row)), charset)


def _html(data: bytes) -> Extracted:
    declared = _DECLARED.search(data[:_DECLARED_WITHIN])
    text, charset = decode(data, declared[1].decode("ascii") if declared else None)
    if 'class="message default' in text:
        chat = _TelegramPage()
        chat.feed(text)
        return Extracted("\n".join(line.strip() for line in "".join(chat.pieces).split("\n")), charset)
    return Extracted(html_text(text), charset)


def html_text(source: str, *, marks_quotations: bool = False) -> str:
    r"""Return the visible text of a page, one paragraph per block.

    Example:
        >>> html_text("<h1>Hello</h1><p>big <b>world</b><script>1</script></p>")
        'Hello\n\nbig world'

    Args:
        source: the page.
        marks_quotations: write `> ` before quotations, as mail does.
    """
    page = _Page(marks_quotations=marks_quotations)
    page.feed(source)
    page.close()
    return page.text()


class _Page(HTMLParser):
    """A parser that collects the text outside of scripts and styles."""

    def __init__(self, *, marks_quotations: bool) -> None:
        super().__init__()
        self._blocks = [""]
        self._silent = 0
        self._quoted: list[bool] = [False]
        self._depth = 0
        self._marks_quotations = marks_quotations

    def parse_html_declaration(self, i: int) -> int:
        """Skip a declaration. The base class fails on one such as `<![FOR]>`, which Word writes."""
        try:
            return super().parse_html_declaration(i)
        except AssertionError:
            return self.parse_bogus_comment(i)

    def handle_starttag(self, tag: str, attrs: object) -> None:  # noqa: ARG002 - the name is html.parser's
        """Begin a paragraph with each block."""
        # Count the depth, because these elements may be nested: a template may contain a script.
        self._silent += _SILENT.fullmatch(tag) is not None
        self._depth += tag == "blockquote"
        self._begin_block(tag)

    def handle_endtag(self, tag: str) -> None:
        """End the paragraph with each block."""
        # Do not count below 0, because a page may close an element that it never opened.
        self._silent = max(0, self._silent - (_SILENT.fullmatch(tag) is not None))
        self._depth = max(0, self._depth - (tag == "blockquote"))
        self._begin_block(tag)

    def handle_data(self, data: str) -> None:
        """Collect the text between tags."""
        if not self._silent:
            self._blocks[-1] += data

    def _begin_block(self, tag: str) -> None:
        if _BLOCKS.fullmatch(tag):
            self._blocks.append("")
            self._quoted.append(self._marks_quotations and self._depth > 0)

    def text(self) -> str:
        """Return the paragraphs. Runs of white space become single spaces."""
        found = zip((_SPACE.sub(" ", block).strip() for block in self._blocks), self._quoted, strict=True)
        return "\n\n".join(f"> {block}" if quoted else block for block, quoted in found if block)


class _TelegramPage(HTMLParser):
    """A parser that collects the messages of a chat that Telegram exported as a page, with their senders."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self._open: list[frozenset[str]] = []  # the classes of the elements around

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begin a line with each message, and a paragraph with each notice, such as a new day."""
        if tag == "br" and self._is_in("text"):
            self.pieces.append("\n")
        if tag != "div":
            return
        classes = frozenset((dict(attrs).get("class") or "").split())
        self._open.append(classes)
        if "message" in classes:
            self.pieces.append("\n\n" if "service" in classes else "\n")

    def handle_endtag(self, tag: str) -> None:
        """End an element."""
        if tag == "div" and self._open and "from_name" in self._open.pop() and not self._is_in("forwarded"):
            self.pieces.append(": ")

    def handle_data(self, data: str) -> None:
        """Collect senders and messages. What was forwarded is by somebody else."""
        if self._is_in("forwarded"):
            return
        if self._is_in("from_name"):
            self.pieces.append(data.strip())
        elif self._is_in("text"):
            begins = not self.pieces or self.pieces[-1].endswith((" ", "\n"))
            self.pieces.append(_SPACE.sub(" ", data.lstrip() if begins else data))

    def _is_in(self, name: str) -> bool:
        return any(name in classes for classes in self._open)


def _messages(data: bytes) -> Iterator[bytes]:
    """Yield the messages of a mailbox.

    `mailbox` of the standard library cuts a message at each line that begins with `From `. Such lines within
    a message are quoted by `>` (RFC 4155), left as they are, or hidden behind a header with the length.
    """
    lines = [line for line in _FROM_LINE.finditer(data) if _separates(data, line)]
    begin = end = 0
    for line in lines:
        if line.start() < end:  # a line within the message before, whose length is known
            continue
        yield from _message(data, begin, line.start())
        begin = line.end()
        end = _end_by_length(data, begin)
    yield from _message(data, begin, len(data))


def _message(data: bytes, begin: int, end: int) -> Iterator[bytes]:
    if message := data[begin:end].strip(b"\r\n"):
        yield _QUOTED_FROM.sub(rb"\1", message)


def _separates(data: bytes, line: re.Match[bytes]) -> bool:
    """Return whether a line that begins with `From ` stands above a message, not within one."""
    # Some programs write no date, but an empty line before and the header of the message after it.
    before = data[max(0, line.start() - 4) : line.start()].replace(b"\r", b"")
    return _FROM_DATE.search(line[1]) is not None or (
        (not before or before.endswith(b"\n\n")) and _HEADER.match(data, line.end()) is not None
    )


def _end_by_length(data: bytes, begin: int) -> int:
    """Return the end of a message by its header `Content-Length`, or 0 if this is missing or wrong."""
    head = re.compile(rb"\r?\n\r?\n").search(data, begin)
    length = _LENGTH.search(data, begin, head.start() + 1) if head else None
    if head is None or length is None or len(length[1]) > 12:
        return 0
    end = head.end() + int(length[1])
    rest = data[end : end + 8].lstrip(b"\r\n")
    return end if end <= len(data) and (not rest or rest.startswith(b"From")) else 0


def _emlx(data: bytes) -> Extracted:
    """Read a message of Apple Mail: the number of its bytes, the message, and a list of properties."""
    length, _, rest = data.partition(b"\n")
    return _mail(rest[: int(length)] if length.strip().isdigit() else data)


def _mail(data: bytes) -> Extracted:
    """Return the text of a message without its quotations."""
    # `policy.default` raises errors of many types for headers that break the rules. Only the type of content
    # and its charset are needed here, and `compat32` reads these from any header.
    message = email.message_from_bytes(data, policy=compat32)
    if "X-IMAP" in message:
        return Extracted(reason="a note of a mail program to itself")
    parts = list(_bodies(message))
    if not parts:
        return Extracted(reason="a mail without text")
    text = "\n\n".join(part.text for part in parts).replace("\r\n", "\n")
    text = _CODED.sub("", _SIGNED.sub("", text))
    text = _ORIGINAL.sub("", _QUOTED.sub("", _ATTRIBUTION.sub("", text)))
    text = _SENT_FROM.sub("\n", text)
    text = re.sub(r"\n{3,}", "\n\n", text)
    charset = next((part.charset for part in parts if part.charset != "utf-8"), "utf-8")
    return Extracted(text, charset, "" if text.strip() else "a mail without own text")


def _bodies(part: Message) -> Iterator[Extracted]:
    """Yield the texts that a mail shows: the plain one of several alternatives, and all other parts."""
    kind = part.get_content_type()
    # A forwarded mail is by somebody else.
    if part.get_content_disposition() == "attachment" or kind.startswith("message/"):
        return
    if part.is_multipart():
        parts = [one for one in part.get_payload() if isinstance(one, Message)]
        found = [list(_bodies(one)) for one in parts]
        if kind == "multipart/alternative":
            # The order is from the plainest to the richest.
            yield from next((texts for texts in found if any(one.text.strip() for one in texts)), [])
        else:
            yield from (text for texts in found for text in texts)
    elif kind in ("text/plain", "text/html", "text/markdown"):
        if (coding := part["Content-Transfer-Encoding"]) is not None:
            # The parser does not know a name with white space behind it.
            part.replace_header("Content-Transfer-Encoding", str(coding).strip())
        data = part.get_payload(decode=True)
        text, charset = decode(data if isinstance(data, bytes) else b"", part.get_content_charset())
        if kind == "text/html":
            text = html_text(text, marks_quotations=True)
        elif str(part.get_param("format", "")).lower() == "flowed":
            # RFC 3676: soft line breaks. Apple's program and Japanese ones add a space for them.
            space = "" if str(part.get_param("delsp", "")).lower() == "yes" else " "
            text = re.sub(r"(?m)^(?!-- $)(.*) \r?\n(?!>)", rf"\1{space}", text)
        yield Extracted(text, charset)


_READERS: Final[dict[str, Callable[[bytes], Extracted]]] = {
    ".csv": _table,
    ".docx": _word,
    ".eml": _mail,
    ".emlx": _emlx,
    ".html": _html,
    ".odt": _open_document,
    ".pdf": _pdf,
    ".rtf": _rtf,
}
