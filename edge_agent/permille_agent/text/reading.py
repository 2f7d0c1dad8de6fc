"""Reading of the user's text from files and folders, without duplicates.

Formats:

- `.txt` and `.md` in UTF-8. Front matter of Markdown is removed.
- PDF, Word, HTML and mail, parsed in a child process (`permille.sandbox.documents`).
- ChatGPT's exported `conversations.json` (`exports.py`).
- `.jsonl` with one object per line: `text`, `prompt` and `completion`, or chat `messages`. Rows with the
  same `group` always stay in the same split.

Folders are read recursively in the order of names, without hidden files and links. A row or a file that
cannot be read is counted and skipped.

`preparation.py` divides whole documents between the splits. A long plain text is cut at the ends of
paragraphs into blocks, and each block is a document. The first block is identified by its own beginning,
and each later block by the end of the block before it. So appended text leaves the identity of earlier blocks
unchanged, unless the file was shorter than `NAME_CHARACTERS` or begins like another file.

This module uses no tokenizer, so the same text gives the same documents for every package.
"""

import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from permille.errors import InputError
from permille.files import TEXT_SUFFIXES
from permille.sandbox.process import Sandbox, SandboxError
from permille_agent.text.documents import Content, Document, PlainText, characters, parse_row
from permille_agent.text.exports import exported_conversations, parse_conversation

MAX_TOTAL_BYTES = 256 << 20  # all text is held in memory
MAX_ROW_BYTES = 4 << 20
MAX_EXAMPLES = 20
BLOCK_CHARACTERS = 1500  # least size of a block of plain text, except the last one
PASSAGE_CHARACTERS = 300  # least size of a passage, on which two models are compared, except the last one
# Length of the beginning of a text, or of the end of the block before, that identifies a block.
NAME_CHARACTERS = 256
# Repeated paragraphs of at least this length are left out: they are signatures or quoted mails. A shorter
# paragraph, such as "Yes.", may be repeated by chance.
REPEATED_PARAGRAPH_CHARACTERS = 64
# The child process that parses a document has limited memory, and the document must fit into it.
MAX_DOCUMENT_BYTES = 64 << 20
# In a folder, only `.json` files whose names match this are read, because others may be anything. A `.json`
# file that the user names is always read.
_EXPORT = re.compile(r"conversations[\w-]*\.json", re.IGNORECASE)
_FRONT_MATTER = re.compile(r"---[ \t]*\n.*?\n(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL)
_MAX_FRONT_MATTER = 1 << 14

Row = tuple[str | None, Content]


@dataclass(slots=True)
class DataReport:
    """Counts of the rows that were read and skipped, with examples of skipped rows.

    A row is a text file, a line of `.jsonl`, a conversation of an export, or a message of a mail file.
    """

    files: int = 0
    ignored_files: int = 0
    rows: int = 0
    read: int = 0
    bad_rows: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    duplicates: int = 0
    repeated_paragraphs: int = 0
    documents: int = 0

    def bad(self, place: str, reason: str) -> None:
        """Count a skipped row, and keep the first ones as examples."""
        self.bad_rows[reason] += 1
        # A folder may have a million bad rows, so only the first ones are kept.
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(f"{place}: {reason}")

    def summary(self) -> str:
        """Describe the counts in one line.

        Example:
            >>> report = DataReport(read=2)
            >>> report.bad("notes.txt", "empty")
            >>> report.summary()
            '2 read, 1 skipped: 1 x empty'
        """
        line = f"{self.read} read, {sum(self.bad_rows.values())} skipped"
        if self.bad_rows:
            line += ": " + ", ".join(f"{count} x {why}" for why, count in self.bad_rows.most_common())
        repeated = self.duplicates + self.repeated_paragraphs
        return f"{line} (duplicates left out: {repeated})" if repeated else line


def read_documents(paths: Sequence[Path]) -> tuple[list[Document], DataReport]:
    """Read the documents of files and folders, without duplicates.

    For example:

        documents, report = read_documents([Path("notes"), Path("mail.jsonl")])

    Raises:
        InputError: there is no document. The message gives the reasons.
    """
    documents, report = survey(paths)
    if not documents and (missing := [path for path in paths if not path.exists()]):
        raise InputError(f"There is no file or folder {missing[0]}.")
    if not documents:
        raise InputError(f"There is no text in {', '.join(map(str, paths))}: {report.summary()}")
    return documents, report


def survey(paths: Sequence[Path]) -> tuple[list[Document], DataReport]:
    """Read the documents of files and folders, without duplicates. There may be none."""
    report = DataReport()
    rows: list[Row] = []
    # One child process for all documents, because starting it takes longer than parsing most documents.
    with closing(Sandbox()) as sandbox:
        for path in _files(paths, report):
            report.files += 1
            try:
                # All other suffixes are documents, which the child parses.
                read = _READERS.get(path.suffix.lower()) or partial(_read_document, sandbox=sandbox)
                rows.extend(read(path, report))
            except OSError as exc:
                report.bad(str(path), f"cannot be read: {exc.strerror}")
    report.read = len(rows)
    documents = _documents(_without_duplicates(rows, report))
    report.documents = len(documents)
    return documents, report


def _files(paths: Sequence[Path], report: DataReport) -> Iterator[Path]:
    if not paths:
        raise InputError("Name at least one file or folder with text.")
    seen: set[Path] = set()
    size_bytes = 0
    for path in paths:
        try:
            files = [file for file in _source(path, report) if file.resolve() not in seen]
            for file in files:
                more_bytes = file.stat().st_size
                # A file may be named twice, by itself and by its folder.
                seen.add(file.resolve())
                if size_bytes + more_bytes > MAX_TOTAL_BYTES:
                    report.bad(str(file), f"over the limit of {MAX_TOTAL_BYTES} bytes in all")
                    continue
                size_bytes += more_bytes
                yield file
        except InputError as exc:
            report.bad(str(path), str(exc))
        except OSError as exc:
            report.bad(str(path), f"cannot be read: {exc.strerror}")


def _source(path: Path, report: DataReport) -> list[Path]:
    """Return the files with text at a path."""
    if path.is_dir():
        # Sort the files, because the order of the file system differs between machines.
        found = [file for file in sorted(path.rglob("*")) if _is_visible(file, path)]
        texts = [file for file in found if _is_text(file)]
        report.ignored_files += len(found) - len(texts)
        return texts
    if not path.exists():
        raise InputError("not found")
    if not path.is_file():  # a pipe or a device, which may have no end
        raise InputError("not a regular file")
    if path.suffix.lower() not in TEXT_SUFFIXES:
        raise InputError(f"not {', '.join(TEXT_SUFFIXES[:-1])} or {TEXT_SUFFIXES[-1]}")
    return [path]


def _is_text(path: Path) -> bool:
    suffix = path.suffix.lower()
    return suffix in TEXT_SUFFIXES and (suffix != ".json" or _EXPORT.fullmatch(path.name) is not None)


def _is_visible(path: Path, root: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
    # A link could lead out of the folder that the user has named.
    return path.is_file() and not path.is_symlink() and not hidden


def _read_text(path: Path, report: DataReport) -> Iterator[Row]:
    report.rows += 1
    if (text := _decoded(path, report)) is None:
        return
    if path.suffix.lower() == ".md" and (front := _FRONT_MATTER.match(text, 0, _MAX_FRONT_MATTER)):
        text = text[front.end() :]
    if text.strip():
        yield None, PlainText(text.strip("\n"))
    else:
        report.bad(str(path), "empty")


def _decoded(path: Path, report: DataReport) -> str | None:
    try:
        # Windows editors write a byte order mark, which is not part of the text.
        return _clean(path.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError:
        report.bad(str(path), "not UTF-8")
        return None


def _clean(text: str) -> str:
    # Fonts of some PDF files give half of a surrogate pair, which UTF-8 cannot encode.
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text.replace("\r\n", "\n").replace("\x00", "")


def _read_document(path: Path, report: DataReport, sandbox: Sandbox) -> Iterator[Row]:
    report.rows += 1
    size = path.stat().st_size
    if size > MAX_DOCUMENT_BYTES:
        report.bad(str(path), f"longer than {MAX_DOCUMENT_BYTES} bytes")
        return
    data = path.read_bytes()
    request = {
        "do": "extract",
        "suffix": path.suffix.lower(),
        "size": len(data),
        "limit": MAX_TOTAL_BYTES,
    }
    try:
        answer = sandbox.ask(request, characters=len(data), data=data)
    # The child process is gone. The sandbox starts another one for the next document.
    except SandboxError:
        answer = {"error": "takes too long or too much memory to read"}
    if "error" in answer:
        report.bad(str(path), str(answer["error"]))
        return
    texts = [_clean(str(text)).strip() for text in answer["texts"]]
    report.rows += len(texts) - 1  # the file itself was counted as one row
    for number, text in enumerate(texts, start=1):
        if text:
            yield None, PlainText(text)
        else:
            report.bad(f"{path}, message {number}" if len(texts) > 1 else str(path), "empty")


def _read_export(path: Path, report: DataReport) -> Iterator[Row]:
    if (text := _decoded(path, report)) is None:
        return
    try:
        for number, conversation in enumerate(exported_conversations(text), start=1):
            report.rows += 1
            try:
                yield parse_conversation(conversation)
            except InputError as exc:
                report.bad(f"{path}, conversation {number}", str(exc))
    except InputError as exc:
        report.bad(str(path), str(exc))


def _read_jsonl(path: Path, report: DataReport) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            report.rows += 1
            if len(line) > MAX_ROW_BYTES:
                report.bad(f"{path}:{number}", f"longer than {MAX_ROW_BYTES} bytes")
                continue
            try:
                yield parse_row(json.loads(line.decode("utf-8-sig")))
            except UnicodeDecodeError:
                report.bad(f"{path}:{number}", "not UTF-8")
            except (ValueError, RecursionError):  # not JSON, or a number of thousands of digits
                report.bad(f"{path}:{number}", "not JSON")
            except InputError as exc:
                report.bad(f"{path}:{number}", str(exc))


_READERS = {".txt": _read_text, ".md": _read_text, ".jsonl": _read_jsonl, ".json": _read_export}


def _without_duplicates(rows: Iterable[Row], report: DataReport) -> list[Row]:
    seen: set[bytes] = set()
    paragraphs: set[bytes] = set()
    kept: list[Row] = []
    for group, content in rows:
        key = _key(characters(content))
        if key in seen:
            report.duplicates += 1
            continue
        seen.add(key)
        if isinstance(content, PlainText):
            content = PlainText(_new_paragraphs(content.text, paragraphs, report))
            if not content.text.strip():
                report.duplicates += 1
                continue
        kept.append((group, content))
    return kept


def _new_paragraphs(text: str, seen: set[bytes], report: DataReport) -> str:
    """Return `text` without long paragraphs that this text or an earlier one already contained."""
    kept = []
    for paragraph in _paragraphs(text):
        plain = normalised(paragraph)
        if len(plain) >= REPEATED_PARAGRAPH_CHARACTERS:
            key = _key(plain)
            if key in seen:
                report.repeated_paragraphs += 1
                continue
            seen.add(key)
        kept.append(paragraph)
    return "".join(kept).strip("\n")


def _documents(rows: list[Row]) -> list[Document]:
    begins = Counter(_begin(content) for group, content in rows if group is None)
    documents = []
    for group, content in rows:
        if group is not None:
            documents.append(Document(_group("group", group), content))
            continue
        begin = _begin(content)
        # Texts that are made from one template have the same beginning, so their full text identifies them.
        name = _group("content", begin if begins[begin] == 1 else characters(content))
        if not isinstance(content, PlainText):
            documents.append(Document(name, content))
            continue
        blocks = sections(content.text, BLOCK_CHARACTERS)
        before = ["", *blocks[:-1]]
        documents += [
            Document(_group("after", last[-NAME_CHARACTERS:]) if last else name, PlainText(block), bool(last))
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
                Document(document.group, PlainText(text), document.continues or place > 0)
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
    for paragraph in _paragraphs(text):
        for line in [paragraph] if len(paragraph) <= characters else paragraph.splitlines(keepends=True):
            if len(line) <= characters:
                yield line
            else:
                yield from re.findall(rf"(?s).{{1,{characters}}}(?:\s+|$)|.{{1,{characters}}}", line)


def _paragraphs(text: str) -> list[str]:
    """Cut `text` into paragraphs, each with the blank lines after it. Joined, they give `text` again."""
    return re.findall(r"(?s).+?(?:\n[ \t]*\n\s*|\Z)", text)
