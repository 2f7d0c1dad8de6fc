"""Full-text index of the user's text, and the search for passages that fit a question.

The index is `notes.sqlite` in the home folder, an FTS5 table of SQLite. It holds a copy of the text, so only
the user can read it, and no report, share or saved copy contains it.

- `data add` and training index the text that they read. Passages of files that are gone, and of a text that
  has changed, are replaced.
- A passage is a paragraph, or a part of a long one: some 300 characters, such as the next messages of a chat.
- Words match by their beginnings, without accents and English endings. In scripts without spaces, such as
  Chinese, pairs of neighbouring characters match.
- A passage fits a question if it has four tenths of the question's words. Rare words count more.
- SQLite's locks let a training write while a server searches.

This module uses no tokenizer and no model.
"""

import math
import os
import re
import sqlite3
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from permille.errors import OperatorError
from permille_agent.state.home import Home, erase, path_of, stored_path
from permille_agent.text.documents import Document, characters
from permille_agent.text.reading import PASSAGE_CHARACTERS, paragraphs, sections

MOST_PASSAGES: Final = 3
LEAST_CHARACTERS: Final = 40
MOST_CHARACTERS: Final = 600
MOST_WORDS: Final = 64
"""Largest number of words of a question. A longer message has its own context, so it gets no passages."""
LEAST_COVERED: Final = 0.4
"""Share of a question's words that a passage must have, where rare words count more than frequent ones.

With a larger share, more questions about the notes find nothing, and a model then invents an answer. With a
smaller one, more general questions get a passage. Their answers stay right, but reading it takes time."""
CLOSE: Final = 0.7
"""Share of the best passage's words of the question that each other passage must have."""
OTHER_PASSAGES: Final = 100
"""Passages of other text, without the question's words, that count when the rarity of a word is estimated.

In a small text, each word that stands in one passage alone would outweigh the question's subject."""
_WAIT_S: Final = 30.0  # for another process that writes
_TABLE: Final = (
    "CREATE VIRTUAL TABLE IF NOT EXISTS passages USING fts5(text, source UNINDEXED, "
    "tokenize = \"porter unicode61 remove_diacritics 2 categories 'L* N* Co M*'\")"
)
_REPAIR: Final = "Run `permille-agent data repair` to build it again."
_ELSE_REPAIR: Final = "If that does not help, run `permille-agent data repair`."
_UNDAMAGED: Final = {
    "SQLITE_FULL": "Free some space, and run the command again.",
    "SQLITE_BUSY": "Another process is writing to it. Run the command again later.",
    "SQLITE_READONLY": "Make the file and its folder writable, and run the command again.",
    "SQLITE_CANTOPEN": f"Make the file and its folder writable, and run the command again. {_ELSE_REPAIR}",
    "SQLITE_IOERR": f"Check the disk, and run the command again. {_ELSE_REPAIR}",
}
"""Advice for errors after which the index is probably whole, by the beginning of their names."""
# Thai, Lao, Burmese and Khmer, Japanese and Chinese, and Korean, which joins particles to its words.
_NO_SPACES: Final = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
    "\U00020000-\U0003ffff]"
)
_BREAK: Final = "\u200b"  # the zero width space separates words, and nobody sees it
# Words of questions that say nothing about their subject, in the languages of most users. Words that are a
# subject in another language are left out: `die`, `man`, `war`, `son`. A greeting would find any "his".
_LITTLE_WORDS: Final = """
a about all also am an and any are as at be been but by call called can could did do does for from had
has have he her him his how i if in is it its kind know long many me much my name named no not of old on
or our please say says she should so some tell than that the their them then there they this to type us
was we were what when where which who whom whose why will with would you your hello hey hi thanks
aber am an auch auf aus bei bin bist das dein deine dem den der des du ein eine einem einen
einer er es für hat hatte heißt ich ihr im in ist ja kann mein meine meinem meinen meiner mit nach
nicht oder sein seine sie sind so um und uns von waren was wann warum wem wen wer wie wieso wird wo
woher wohin wurde zu zum zur
au aux ce ces cette combien comment dans de des du elle elles en est et il ils je la le les leur lui ma
mes mon nous où par pas pourquoi quand que quel quelle quels quelles qui quoi sa ses sont
ta tes ton un une vous
al como con cuál cuáles cuándo cuánto cuántos de del dónde el ella ellos en es está esta este fue la las
lo los me mi mis no nos para pero por porque qué quién se ser si su sus tu tus un una y yo
che chi cosa da della di dove e gli ho il io lo mia mio nel nella perché più quale quando quanto quanti
sono suo sua tuo un uno una
diary journal note notes notas notizen tagebuch appunti
"""
_STOP_WORDS: Final = frozenset(_LITTLE_WORDS.split())
# The same for scripts without spaces: Chinese, Japanese, Korean and Thai.
_ASKING: Final = re.compile(
    "什[么麼]|哪[里裡儿]|[谁誰]|多少|怎[么麼]|[为為]什[么麼]|[吗嗎呢的是我你]|何?ですか|どこ|だれ|いつ|なに|何"
    "|뭐예요|무엇|어디|누구|언제|인가요|입니까|อะไร|ที่ไหน|ใคร|เมื่อไหร่"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A passage of the user's text, and the name of its file."""

    source: str
    text: str


def index_text(home: Home, documents: Iterable[Document], paths: Sequence[Path]) -> None:
    """Index documents in place of everything that was read from these files and folders before.

    For example:

        documents, report = survey([Path("notes")])
        index_text(home, documents, [Path("notes")])

    Raises:
        OperatorError: the index is damaged, the disk is full, or this Python's SQLite has no FTS5.
    """
    rows = (
        (_spaced(passage), stored_path(_absolute(document.source)))
        for document in documents
        if document.source is not None
        for passage in _passages(characters(document.content))
    )
    with _opened(home) as index:
        _drop(index, paths)
        index.executemany("INSERT INTO passages (text, source) VALUES (?, ?)", rows)


def remove_text(home: Home, paths: Sequence[Path], kept: Sequence[Path] = ()) -> int:
    """Erase the passages of these files and folders, except those below the paths in `kept`.

    Returns:
        The number of files whose passages were erased.

    Raises:
        OperatorError: as for `index_text`.
    """
    if not home.notes.exists():
        return 0
    with _opened(home) as index:
        # A journal on the disk would be one more copy of the erased text.
        index.execute("PRAGMA journal_mode = MEMORY")
        return _drop(index, paths, kept)


def erase_index(home: Home) -> None:
    """Overwrite and remove the index, also a damaged one.

    Raises:
        OSError: the file system failed.
    """
    for path in home.root.glob(f"{home.notes.name}*"):  # with SQLite's journal
        erase(path)


def find_passages(home: Home, question: str) -> tuple[Passage, ...]:
    """Return the passages that fit a question, the best last.

    Raises:
        OperatorError: as for `index_text`.
    """
    words = _words(question)
    if not 0 < len(words) <= MOST_WORDS:
        return ()
    rank, covered, total = defaultdict[int, float](float), defaultdict[int, float](float), 0.0
    with _opened(home) as index:
        ((passages,),) = index.execute("SELECT count(*) FROM passages")
        for word in words:
            # The rank of a question is the sum of the ranks of its words (BM25).
            found = index.execute(
                "SELECT rowid, rank FROM passages WHERE passages MATCH ?", (word,)
            ).fetchall()
            weight = math.log1p((passages + OTHER_PASSAGES) / max(1, len(found)))
            total += weight
            for row, below_zero in found:
                rank[row] -= below_zero
                covered[row] += weight
        # A passage with half of what the best one has would only distract the model.
        least = max(LEAST_COVERED * total, CLOSE * max(covered.values(), default=0.0))
        fitting = [row for row in rank if covered[row] >= least]
        best: dict[str, Passage] = {}  # by text, since a file may have copies
        for row in sorted(fitting, key=lambda row: (-rank[row], row)):
            stored = index.execute("SELECT source, text FROM passages WHERE rowid = ?", (row,))
            for source, text in stored:
                plain = text.replace(_BREAK, "")
                best.setdefault(plain, Passage(source=path_of(source).name, text=plain))
            if len(best) == MOST_PASSAGES:
                break
        return tuple(reversed(best.values()))


@contextmanager
def _opened(home: Home) -> Iterator[sqlite3.Connection]:
    """Open the index, or create it. What was written is committed at the end."""
    try:
        if not home.notes.exists():
            home.notes.touch(mode=0o600)  # SQLite gives its journals the same mode
    except OSError as exc:
        raise OperatorError(f"Cannot write {home.notes}: {exc}") from exc
    try:
        with closing(sqlite3.connect(home.notes, timeout=_WAIT_S)) as index, index:
            # Deleted text is overwritten by zeros.
            index.execute("PRAGMA secure_delete = ON")
            index.execute(_TABLE)
            yield index
    except sqlite3.Error as exc:
        if "no such module" in str(exc):
            with suppress(OSError):
                if home.notes.stat().st_size == 0:
                    home.notes.unlink()  # else `data remove` would look for text in it for ever
            raise OperatorError(
                "Your notes are not searched, because this Python's SQLite lacks FTS5. Use another Python "
                "to search them."
            ) from exc
        name = getattr(exc, "sqlite_errorname", "")  # an error of Python's own module has none
        advice = next((words for begin, words in _UNDAMAGED.items() if name.startswith(begin)), _REPAIR)
        raise OperatorError(
            f"The index of your notes, {home.notes}, cannot be used: {exc}. {advice}"
        ) from exc


def _drop(index: sqlite3.Connection, paths: Sequence[Path], kept: Sequence[Path] = ()) -> int:
    """Delete the passages of all files below `paths`, and return the number of files."""
    known = [source for (source,) in index.execute("SELECT DISTINCT source FROM passages")]
    gone = [source for source in known if _is_below(source, paths) and not _is_below(source, kept)]
    if gone:
        # One by one: a list in JSON would end at the NUL that stands for a byte that is no UTF-8.
        index.executemany("DELETE FROM passages WHERE source = ?", ((source,) for source in gone))
        # FTS5 keeps the words of deleted text until it merges its segments.
        index.execute("INSERT INTO passages (passages) VALUES ('optimize')")
    return len(gone)


def _is_below(source: str, paths: Sequence[Path]) -> bool:
    return any(path_of(source).is_relative_to(_absolute(path)) for path in paths)


def _absolute(path: Path) -> Path:
    """Return the path without `..`, so that a file has one name however it was given."""
    return Path(os.path.abspath(path))  # noqa: PTH100 - `resolve` would follow links


def _passages(text: str) -> Iterator[str]:
    """Cut a text into paragraphs, and long ones further. A short one, such as a heading, joins the next."""
    short = ""
    for paragraph in paragraphs(text):
        short += paragraph
        if len(short.strip()) >= LEAST_CHARACTERS:
            yield from (
                sections(short, PASSAGE_CHARACTERS) if len(short) > MOST_CHARACTERS else [short.strip()]
            )
            short = ""
    if short.strip():
        yield short.strip()


def _spaced(text: str) -> str:
    """Separate the characters of scripts without spaces, so that each of them is a word."""
    normal = unicodedata.normalize("NFC", text).replace(_BREAK, "")
    return _NO_SPACES.sub(rf"{_BREAK}\g<0>{_BREAK}", normal)


def _words(question: str) -> list[str]:
    """Return one FTS5 query for each different word of a question that says something."""
    normal = _ASKING.sub(" ", unicodedata.normalize("NFC", question).lower())
    letters = "".join(letter if unicodedata.category(letter)[0] in "LNM" else " " for letter in normal)
    words: dict[str, None] = {}
    for word in letters.split():
        if _NO_SPACES.search(word):
            words |= {
                f'"{" ".join(word[place : place + 2])}"': None for place in range(max(1, len(word) - 1))
            }
        elif len(word) > 1 and word not in _STOP_WORDS:  # one letter is an ending, as in "Anna's"
            words[_endings_of(word)] = None
    return list(words)


def _endings_of(word: str) -> str:
    """Return the query of a word. Long words match with other endings, for their case or number."""
    if len(word) < 5 or any(map(str.isdigit, word)):
        return f'"{word}"'
    # FTS5 takes an English ending off each word of a query, too. What is left may be short, or not English.
    return f'"{word}"* OR "{word[: -1 if len(word) < 8 else -2]}"*' if len(word) > 5 else f'"{word}"*'
