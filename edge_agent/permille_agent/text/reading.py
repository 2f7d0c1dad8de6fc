"""Reading of the user's text from files and folders, without duplicates.

Formats:

- Plain text (`.txt`, `.org`, `.rst`) and Markdown in any charset. Front matter and the targets of links in
  Markdown are left out (`markdown.py`). A chat that WhatsApp exported becomes its messages (`chats.py`).
- PDF, Word, RTF, tables, HTML and mail, parsed in a child process (`permille.sandbox.documents`). The
  child also decodes text that is not UTF-8.
- Exported conversations of ChatGPT, Claude and Open WebUI (`exports.py`), and Telegram's `result.json`
  (`chats.py`).
- `.jsonl` with one object per line: `text`, `prompt` and `completion`, or chat `messages`. Rows with the
  same `group` always stay in the same split.

`sources.py` finds the files. A row or a file that cannot be read is counted and skipped (`report.py`).

`preparation.py` divides whole documents between the splits. A long plain text is cut at the ends of
paragraphs into blocks, and each block is a document. The first block is identified by its own beginning,
and each later block by the end of the block before it. So appended text leaves the identity of earlier blocks
unchanged, unless the file was shorter than `NAME_CHARACTERS` or begins like another file.

This module uses no tokenizer, so the same text gives the same documents for every package.
"""

import codecs
import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from permille.errors import InputError
from permille.sandbox.process import Sandbox, SandboxError
from permille_agent.text.chats import NOTICES, Chat, telegram_chats, whatsapp_chat
from permille_agent.text.documents import Content, Document, PlainText, characters, cleaned, parse_row
from permille_agent.text.exports import exported_conversations, parse_conversation
from permille_agent.text.markdown import split_front_matter, without_targets
from permille_agent.text.report import DataReport, shown
from permille_agent.text.sources import MAX_TOTAL_BYTES, text_files

MAX_ROW_BYTES = 4 << 20
BLOCK_CHARACTERS = 1500  # least size of a block of plain text, except the last one
PASSAGE_CHARACTERS = 300  # least size of a passage, on which two models are compared, except the last one
# Length of the beginning of a text, or of the end of the block before, that identifies a block.
NAME_CHARACTERS = 256
# Repeated paragraphs of at least this length are left out: they are signatures or quoted mails. A shorter
# paragraph, such as "Yes.", may be repeated by chance.
REPEATED_PARAGRAPH_CHARACTERS = 64
# The child process that parses a document has limited memory, and the document must fit into it.
MAX_DOCUMENT_BYTES = 64 << 20
_PDF = b"%PDF-"
_UTF_16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

Row = tuple[str | None, Content]


def read_documents(paths: Sequence[Path]) -> tuple[list[Document], DataReport]:
    """Read the documents of files and folders, without duplicates.

    For example:

        documents, report = read_documents([Path("notes"), Path("mail.jsonl")])

    Raises:
        InputError: there is no document. The message gives the reasons.
    """
    documents, report = survey(paths)
    if not documents and (missing := [path for path in paths if not path.exists()]):
        raise InputError(f"There is no file or folder {shown(missing[0])}.")
    if not documents:
        raise InputError(f"There is no text in {', '.join(map(shown, paths))}: {report.summary()}")
    return documents, report


def survey(paths: Sequence[Path]) -> tuple[list[Document], DataReport]:
    """Read the documents of files and folders, without duplicates. There may be none."""
    report = DataReport()
    rows: list[tuple[Path, Row]] = []
    # One child process for all files, because starting it takes longer than parsing most documents.
    with closing(Sandbox()) as sandbox:
        reader = _Reader(sandbox, report)
        for path, kind in text_files(paths, report):
            found = report.rows
            try:
                for row in reader.rows(path, kind):
                    report.rows += 1
                    report.read += 1
                    rows.append((path, row))
            except InputError as exc:
                report.bad(path, str(exc))
            except OSError as exc:
                report.bad(path, f"cannot be read: {exc.strerror}")
            if report.rows == found:
                report.bad(path, "empty")
    documents = _documents(_without_duplicates(rows, report))
    report.documents = len(documents)
    return documents, report


class _Reader:
    """Readers of all kinds of files. They yield rows, and count the rows that they skip."""

    def __init__(self, sandbox: Sandbox, report: DataReport) -> None:
        self._sandbox = sandbox
        self._report = report

    def rows(self, path: Path, kind: str) -> Iterator[Row]:
        """Yield the rows of a file of this kind.

        Raises:
            InputError: the file cannot be read. The message is the reason.
            OSError: the file system failed.
        """
        with path.open("rb") as file:
            if file.read(len(_PDF)) == _PDF:  # its source would be learned as text if its name ends in .txt
                kind = ".pdf"
        match kind:
            case ".jsonl":
                return self._jsonl(path)
            case ".json":
                return self._export(path)
            case ".txt" | ".md":
                return self._plain(path, kind)
        return self._document(path, kind)

    def _plain(self, path: Path, kind: str) -> Iterator[Row]:
        text = self._decoded(path.read_bytes())
        if kind == ".md":
            front, text = split_front_matter(text)
            self._report.left_out.update(["front matter"] if front else [])
            text = without_targets(text)
        elif (chat := whatsapp_chat(text)) is not None:
            text = self._chat_text(chat)
        yield from self._row(path, text)

    def _document(self, path: Path, kind: str) -> Iterator[Row]:
        found = self._extracted(kind, path.read_bytes())
        for number, (text, charset, reason) in enumerate(found, start=1):
            place = f"{path}, message {number}" if len(found) > 1 else path
            if reason:
                self._report.bad(place, reason)
            else:
                self._count_charset(charset)
                yield from self._row(place, cleaned(text).strip())

    def _export(self, path: Path) -> Iterator[Row]:
        text = self._decoded(path.read_bytes())
        if not text.lstrip().startswith("["):
            for name, chat in telegram_chats(text):
                yield from self._row(f"{path}, {name}", self._chat_text(chat))
            return
        for number, conversation in enumerate(exported_conversations(text), start=1):
            try:
                yield parse_conversation(conversation)
            except InputError as exc:
                self._report.bad(f"{path}, conversation {number}", str(exc))

    def _jsonl(self, path: Path) -> Iterator[Row]:
        for number, line in enumerate(self._lines(path), start=1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            if len(line) > MAX_ROW_BYTES:
                self._report.bad(place, f"longer than {MAX_ROW_BYTES} bytes")
                continue
            try:
                yield parse_row(json.loads(self._decoded(line)))
            except (ValueError, RecursionError):  # not JSON, or a number of thousands of digits
                self._report.bad(place, "not JSON")
            except InputError as exc:
                self._report.bad(place, str(exc))

    def _lines(self, path: Path) -> Iterator[bytes]:
        with path.open("rb") as file:
            if file.read(2) in _UTF_16_MARKS:  # a line feed is not one byte
                file.seek(0)
                yield from self._decoded(file.read()).encode().splitlines()
                return
            file.seek(0)
            # Within a string of JSON, CR is escaped. So it is always an end of a line.
            yield from (row for line in file for row in line.rstrip(b"\r\n").split(b"\r"))

    def _row(self, place: str | Path, text: str) -> Iterator[Row]:
        if text.strip():
            yield None, PlainText(text.strip("\n"))
        else:
            self._report.bad(place, "empty")

    def _chat_text(self, chat: Chat) -> str:
        self._report.left_out.update({NOTICES: chat.notices} if chat.notices else {})
        return cleaned(chat.text())  # the strings of JSON may hold anything

    def _decoded(self, data: bytes) -> str:
        """Decode text. The child process decodes text that is not UTF-8, which takes libraries and time."""
        try:
            # UTF-16 of plain letters is valid UTF-8 with zeros, and Japanese mail is ASCII with escapes.
            if b"\0" not in data and b"\x1b$" not in data:
                return cleaned(data.decode("utf-8-sig"))
        except UnicodeDecodeError:
            pass
        ((text, charset, _),) = self._extracted(".txt", data)
        self._count_charset(charset)
        return cleaned(text)

    def _count_charset(self, charset: str) -> None:
        if charset != "utf-8":
            self._report.charsets[charset] += 1

    def _extracted(self, kind: str, data: bytes) -> list[tuple[str, str, str]]:
        """Return texts that the child process extracts, each with its charset, or the reason to skip it."""
        if len(data) > MAX_DOCUMENT_BYTES:
            raise InputError(f"longer than {MAX_DOCUMENT_BYTES} bytes")
        request = {"do": "extract", "kind": kind, "size": len(data), "limit": MAX_TOTAL_BYTES}
        try:
            answer = self._sandbox.ask(request, characters=len(data), data=data)
        # The child process is gone. The sandbox starts another one for the next document.
        except SandboxError as exc:
            raise InputError("takes too long or too much memory to read") from exc
        if "error" in answer:
            raise InputError(str(answer["error"]))
        return [(str(text), str(charset), str(reason)) for text, charset, reason in answer["texts"]]


def _without_duplicates(
    rows: Iterable[tuple[Path, Row]], report: DataReport
) -> list[tuple[Path, str | None, Content]]:
    seen: set[bytes] = set()
    known: set[bytes] = set()
    kept = []
    for source, (group, content) in rows:
        key = _key(characters(content))
        if key in seen:
            report.duplicates += 1
            continue
        seen.add(key)
        if isinstance(content, PlainText):
            content = PlainText(_new_paragraphs(content.text, known, report))
            if not content.text.strip():
                report.duplicates += 1
                continue
        kept.append((source, group, content))
    return kept


def _new_paragraphs(text: str, seen: set[bytes], report: DataReport) -> str:
    """Return `text` without long paragraphs that this text or an earlier one already contained."""
    kept = []
    for paragraph in paragraphs(text):
        plain = normalised(paragraph)
        if len(plain) >= REPEATED_PARAGRAPH_CHARACTERS:
            key = _key(plain)
            if key in seen:
                report.repeated_paragraphs += 1
                continue
            seen.add(key)
        kept.append(paragraph)
    return "".join(kept).strip("\n")


def _documents(rows: list[tuple[Path, str | None, Content]]) -> list[Document]:
    begins = Counter(_begin(content) for _, group, content in rows if group is None)
    documents = []
    for source, group, content in rows:
        if group is not None:
            documents.append(Document(_group("group", group), content, source=source))
            continue
        begin = _begin(content)
        # Texts that are made from one template have the same beginning, so their full text identifies them.
        name = _group("content", begin if begins[begin] == 1 else characters(content))
        if not isinstance(content, PlainText):
            documents.append(Document(name, content, source=source))
            continue
        blocks = sections(content.text, BLOCK_CHARACTERS)
        before = ["", *blocks[:-1]]
        documents += [
            Document(
                _group("after", last[-NAME_CHARACTERS:]) if last else name,
                PlainText(block),
                bool(last),
                source,
            )
            for last, block in zip(before, blocks, strict=True)
        ]
    return documents


def _begin(content: Content) -> str:
    return characters(content)[:NAME_CHARACTERS] if isinstance(content, PlainText) else characters(content)


def _group(kind: str, name: str) -> str:
    return hashlib.sha256(f"{kind}\0{name}".encode()).hexdigest()


def _key(text: str) -> bytes:
    return hashlib.sha256(normalised(text).encode()).digest()


def normalised(text: str) -> str:
    """Normalise case, width and white space. Texts with the same result are duplicates.

    Example:
        >>> normalised(" Hello  World") == normalised("hello world")
        True
    """
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def passages(documents: Sequence[Document]) -> list[Document]:
    """Cut plain text into passages of about 300 characters. Other documents stay whole."""
    found: list[Document] = []
    for document in documents:
        if isinstance(document.content, PlainText):
            texts = sections(document.content.text, PASSAGE_CHARACTERS)
            found += [
                replace(document, content=PlainText(text), continues=document.continues or place > 0)
                for place, text in enumerate(texts)
            ]
        else:
            found.append(document)
    return found


def sections(text: str, characters: int) -> list[str]:
    """Cut `text` into sections of at least `characters` characters, at the ends of paragraphs.

    A long paragraph is cut at the ends of lines, and a long line between words. The end of a section does
    not depend on later text.

    Example:
        >>> sections("one two three four", 8)
        ['one two three ', 'four']
    """
    result: list[str] = []
    current = ""
    for piece in _pieces(text, characters):
        current += piece
        if len(current.strip()) >= characters:
            result.append(current)
            current = ""
    if current.strip():
        result.append(current)
    trimmed = [section.strip("\n") for section in result]
    return [section for section in trimmed if section.strip()]


def _pieces(text: str, characters: int) -> Iterator[str]:
    for paragraph in paragraphs(text):
        for line in [paragraph] if len(paragraph) <= characters else paragraph.splitlines(keepends=True):
            if len(line) <= characters:
                yield line
            else:
                yield from re.findall(rf"(?s).{{1,{characters}}}(?:\s+|$)|.{{1,{characters}}}", line)


def paragraphs(text: str) -> list[str]:
    """Cut `text` into paragraphs, each with the blank lines after it. Joined, they give `text` again."""
    return re.findall(r"(?s).+?(?:\n[ \t]*\n\s*|\Z)", text)
