"""Count statements, comments, docstrings, sentences and commit subjects of revisions of this repository.

    make house BEFORE=7b479a96      # compare that revision with the working tree

Statements are counted by `ast` without docstrings, so comments and white space have no effect. The command
has no limits and never fails. People read the numbers.
"""

import argparse
import ast
import io
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from permille_lab.measuring.tables import markdown

PRODUCT = ("permille", "service", "workers", "edge_agent", "personal", "extensions")
_ROOMS = (*PRODUCT, "lab", "tests", "examples", "scripts")
_WH = {"what", "which", "whether", "who", "whose", "whom", "how", "why", "where", "when"}
_LONG_SENTENCE_WORDS = 25
_LONG_PAGE_WORDS = 600
_LONG_SUBJECT = 72
_NEWEST_COMMITS = 100
_NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
_WORDS = re.compile(r"[\w'`][\w'`./-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """Counts of Python sources. For example, `sources(["def f():\\n    pass\\n"]).statements` is 2."""

    statements: int = 0
    code_lines: int = 0
    comments: int = 0
    docstrings: tuple[str, ...] = ()

    @property
    def comments_percent(self) -> float:
        return 100 * self.comments / max(self.code_lines, 1)

    @property
    def wh_percent(self) -> float:
        """Return the percentage of docstrings that begin with a wh-word."""
        openings = [_WORDS.findall(text)[:1] for text in self.docstrings]
        return 100 * sum(words[0].lower() in _WH for words in openings if words) / max(len(openings), 1)

    @property
    def examples(self) -> float:
        """Return the number of examples (`for example` or `>>>`) in a thousand words of docstrings."""
        text = "\n".join(self.docstrings)
        found = len(re.findall(r"for example|>>>", text, flags=re.I))
        return 1000 * found / max(len(_WORDS.findall(text)), 1)


def sources(texts: Sequence[str]) -> Code:
    """Return the counts of these Python sources together."""
    statements = code_lines = comments = 0
    docstrings: list[str] = []
    for text in texts:
        tree = ast.parse(text)
        in_docstrings: set[int] = set()
        for node in ast.walk(tree):
            statements += isinstance(node, ast.stmt)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node)
                if docstring is not None:
                    docstrings.append(docstring)
                    statements -= 1
                    first = node.body[0]
                    in_docstrings.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
        lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            comments += token.type == tokenize.COMMENT
            if token.type not in _NOT_CODE and token.string:
                lines.update(range(token.start[0], token.end[0] + 1))
        code_lines += len(lines - in_docstrings)
    return Code(statements=statements, code_lines=code_lines, comments=comments, docstrings=tuple(docstrings))


def sentences(markdown: str) -> Iterator[str]:
    """Yield the sentences of a page's prose, without code, tables, headings and addresses of links."""
    prose = re.sub(r"^```.*?^```", "", markdown, flags=re.M | re.S)
    prose = re.sub(r"<!--.*?-->", "", prose, flags=re.S)
    prose = re.sub(r"\]\([^)]*\)", "]", prose)
    prose = re.sub(r"^\s*(#|\|).*$", "", prose, flags=re.M)
    for block in re.split(r"\n\s*\n|^\s*(?:[-*]|\d+\.)\s+", prose, flags=re.M):
        yield from filter(None, re.split(r"(?<=[.!?:])\s+", " ".join(block.split())))


def _modules(root: Path, rooms: Sequence[str]) -> list[str]:
    return [path.read_text() for room in rooms for path in sorted((root / room).rglob("*.py"))]


def _rows(root: Path, revision: str) -> dict[str, str]:
    """Return the counts of one checkout. Commit subjects are those of `revision` in this repository."""
    rows = {"statements: product": str(sources(_modules(root, PRODUCT)).statements)}
    rows |= {f"statements: {room}": str(sources(_modules(root, [room])).statements) for room in _ROOMS}
    for name, rooms in (("product", PRODUCT), ("lab", ["lab"]), ("tests", ["tests"])):
        code = sources(_modules(root, rooms))
        rows[f"comments in 100 code lines: {name}"] = f"{code.comments_percent:.1f}"
        rows[f"docstrings that open with a wh-word: {name}"] = f"{code.wh_percent:.1f} %"
        rows[f"examples in 1,000 docstring words: {name}"] = f"{code.examples:.2f}"
    pages = [path.read_text() for path in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]]
    lengths = [len(_WORDS.findall(sentence)) for page in pages for sentence in sentences(page)]
    long = sum(length > _LONG_SENTENCE_WORDS for length in lengths)
    rows["docs: sentences above 25 words"] = f"{long} of {len(lengths)}"
    above = sum(len(page.split()) > _LONG_PAGE_WORDS for page in pages)
    rows["docs: pages above 600 words"] = f"{above} of {len(pages)}"
    log = ["git", "log", f"-{_NEWEST_COMMITS}", "--no-merges", "--format=%s", revision]
    subjects = subprocess.run(log, capture_output=True, text=True, check=True).stdout.splitlines()
    above = sum(len(subject) > _LONG_SUBJECT for subject in subjects)
    rows["newest 100 subjects: above 72 characters"] = str(above)
    rows["newest 100 subjects: median"] = f"{statistics.median(map(len, subjects)):.0f}"
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table with a column for each given revision and one for the working tree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("revisions", nargs="*", help="revisions to compare with the working tree")
    columns: dict[str, dict[str, str]] = {}
    for revision in parser.parse_args(arguments).revisions:
        archive = subprocess.run(["git", "archive", revision], capture_output=True, check=True).stdout
        with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(folder, filter="data")
            columns[revision] = _rows(Path(folder), revision)
    columns["working tree"] = now = _rows(Path(), "HEAD")
    print(markdown({"": name} | {title: rows[name] for title, rows in columns.items()} for name in now))
    return 0


if __name__ == "__main__":
    sys.exit(main())
