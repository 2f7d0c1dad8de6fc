"""Files of a source as plain documents: one function a format. Knows nothing of cleaning or training."""

from __future__ import annotations

import html
import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from xml.etree import ElementTree

from permille.errors import InputError
from permille_lab.reference.sources import Source

_TITLE = re.compile(r"^ = [^=\n](?:.*[^=\n])? = $", flags=re.M)
_NOT_TEXT = ("math", "metadata", "table", "exercise", "glossary", "media", "note-ref")


def source_files(source: Source, root: Path) -> list[Path]:
    """The files of a source under `root`, sorted.

    Raises:
        InputError: no file is there.
    """
    found = {path for pattern in source.files for path in root.glob(pattern) if path.is_file()}
    kept = [
        path
        for path in found
        if not any(fnmatch(path.relative_to(root).as_posix(), pattern) for pattern in source.exclude)
    ]
    if not kept:
        raise InputError(f"{source.name}: expected files {', '.join(source.files)} under {root}, found none")
    return sorted(kept)


def documents(source: Source, path: Path) -> Iterator[str]:
    """The documents of one file of the source, as plain text with paragraphs divided by newlines."""
    for text in _members(path):
        if source.require is None or source.require in text:
            yield from _READERS[source.format](text)


def _members(path: Path) -> Iterator[str]:
    """The file's text, or that of each `.txt` in an archive (read-me files aside)."""
    if path.suffix != ".zip":
        yield path.read_text(encoding="utf-8", errors="replace")
        return
    with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith(".txt") and "readme" not in name.lower():
                yield archive.read(name).decode("utf-8", errors="replace")


def _plain(text: str) -> Iterator[str]:
    yield text


def _jsonl(text: str) -> Iterator[str]:
    for line in text.splitlines():
        yield json.loads(line)["text"]


def _stories(text: str) -> Iterator[str]:
    yield from text.split("<|endoftext|>")


def _wikitext(text: str) -> Iterator[str]:
    """Articles begin at a line ` = Title = `; the benchmark's spacing is kept, since it is measured so."""
    starts = [found.start() for found in _TITLE.finditer(text)]
    for first, end in zip(starts, [*starts[1:], len(text)], strict=True):
        yield text[first:end]


def _reviews(text: str) -> Iterator[str]:
    """Liu's files: `feature[+2]##sentence`; `[t]` begins a review. The labels are cut off."""
    for review in text.split("[t]")[1:]:
        yield " ".join(line.partition("##")[2].strip() for line in review.splitlines() if "##" in line)


def _markdown(text: str) -> Iterator[str]:
    body = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.S)
    body = re.sub(r"```.*?```|\{[{%].*?[%}]\}|<!--.*?-->", " ", body, flags=re.S)
    body = re.sub(r"!\[[^\]]*\]\([^)]*\)", " ", body)
    body = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", body)
    body = re.sub(r"<[^>\n]+>|\{[:#.][^}\n]*\}", " ", body)
    body = re.sub(r"^\s*(?:#+|>|[*+-] )\s*", "", body, flags=re.M)
    body = re.sub(r"[*`]|(?<!\w)_|_(?!\w)", "", body)
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", html.unescape(body))]
    yield "\n".join(part for part in paragraphs if re.search(r"[A-Za-z]", part))


def _cnxml(text: str) -> Iterator[str]:
    """Titles, paragraphs and list items of a module of a textbook; without formulas, tables and exercises."""
    root = ElementTree.fromstring(text)
    parts = [" ".join(part.split()) for part in _blocks(root)]
    yield "\n".join(part for part in parts if len(part.split()) > 3)


def _blocks(element: ElementTree.Element) -> Iterator[str]:
    name = element.tag.rpartition("}")[2]
    if name in _NOT_TEXT:
        return
    if name in ("para", "item", "caption"):
        yield _words(element)
        return
    for child in element:
        yield from _blocks(child)


def _words(element: ElementTree.Element) -> str:
    """The element's own words and those below it, without formulas."""
    parts = [element.text or ""]
    for child in element:
        if child.tag.rpartition("}")[2] not in _NOT_TEXT:
            parts.append(_words(child))
        parts.append(child.tail or "")
    return "".join(parts)


_READERS: dict[str, Callable[[str], Iterator[str]]] = {
    "cnxml": _cnxml,
    "jsonl": _jsonl,
    "markdown": _markdown,
    "reviews": _reviews,
    "stories": _stories,
    "text": _plain,
    "wikitext": _wikitext,
}
