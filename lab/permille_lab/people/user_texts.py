"""Reader of people's texts in three public collections. Each speech, tweet or turn is a document.

    shakespeare     speakers of the plays and their speeches          users/shakespeare/...by_speaker.jsonl
    lamp7           authors of tweets and their profiles (LaMP-7)     users/lamp7_dev/lamp7_dev.jsonl
    personachat     personas and their turns in dialogues             users/personachat_valid/dialogues.jsonl

A document is a row as the agent reads it: `text`, or `prompt` and `completion`. The prompt is the turn of the
other person and is not learned. A persona is identified by its description, which is not part of the text. A
line that is no person becomes a `BadRow`. Only a newline ends a line, since tweets contain other separators.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from permille.errors import InputError
from permille_lab.tasks.examples import BadRow

MAX_LINE_BYTES = 4 << 20

Document = Mapping[str, str]


class Collection(StrEnum):
    """A collection of people's texts."""

    SHAKESPEARE = "shakespeare"
    LAMP7 = "lamp7"
    PERSONACHAT = "personachat"


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """One person.

    Attributes:
        name: unique in the collection.
        documents: rows with `text`, or with `prompt` and `completion`, without duplicates.
    """

    name: str
    documents: tuple[Document, ...]

    @property
    def characters(self) -> int:
        """Number of characters of the person's own words."""
        return sum(len(own_words(document)) for document in self.documents)


@dataclass(frozen=True, slots=True, kw_only=True)
class Users:
    """The people of a collection, and the lines that could not be read."""

    users: Sequence[User]
    bad: Sequence[BadRow]


def own_words(document: Document) -> str:
    """Return the person's own words in a document."""
    return document["text"] if "text" in document else document["completion"]


def read_users(data: Path, collection: Collection) -> Users:
    """Read all people of a collection.

    For example, the ten first people with at least 4,000 characters of tweets:

        people = cohort(read_users(data, Collection.LAMP7).users, least_characters=4_000)[:10]

    Args:
        data: folder with `users/`.

    Raises:
        InputError: the file does not exist, has a line above 4 MiB, or has no people.
    """
    path = data / _FILES[collection]
    if not path.is_file():
        raise InputError(f"expected the people of {collection.value} in {path}, got no file")
    documents: dict[str, dict[Any, Document]] = {}
    bad = []
    for number, line in _lines(path):
        try:
            name, found = _READERS[collection](json.loads(line))
        except (ValueError, KeyError, TypeError, RecursionError) as exc:
            bad.append(
                BadRow(name=f"{path.name}:{number}", reason=f"expected a person as JSON, got {exc!r:.120}")
            )
            continue
        documents.setdefault(name, {}).update(
            (tuple(sorted(document.items())), document) for document in found if own_words(document).strip()
        )
    users = [User(name=name, documents=tuple(found.values())) for name, found in documents.items() if found]
    if not users:
        raise InputError(f"expected people in {path}, got none and {len(bad)} lines that cannot be read")
    return Users(users=users, bad=bad)


def cohort(users: Sequence[User], *, least_characters: int) -> list[User]:
    """Return the people who wrote enough, in the order of a hash of their names.

    Thus nobody can choose who the first n people are.
    """
    eligible = [user for user in users if user.characters >= least_characters]
    return sorted(
        eligible, key=lambda user: hashlib.sha256(f"permille-users-1\0{user.name}".encode()).digest()
    )


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
            if len(line) > MAX_LINE_BYTES:
                raise InputError(
                    f"expected lines of at most {MAX_LINE_BYTES} bytes, got a longer one in {path}"
                )
            if line.strip():
                yield number, line


def _speaker(row: Any) -> tuple[str, list[Document]]:
    return _text(row["user"]), [{"text": _text(speech)} for speech in _listed(row["text"])]


def _author(row: Any) -> tuple[str, list[Document]]:
    return str(row["user"]), [{"text": _text(tweet)} for tweet in _listed(row["profile"])]


def _persona(row: Any) -> tuple[str, list[Document]]:
    name = hashlib.sha256(
        "\n".join(_text(sentence) for sentence in _listed(row["persona"])).encode()
    ).hexdigest()[:12]
    return name, [
        {"prompt": f"{_text(other)}\n", "completion": _text(own)} for other, own in _listed(row["turns"])
    ]


def _listed(value: Any) -> list[Any]:
    # Check the type, since a string is also iterable.
    if not isinstance(value, list):
        raise TypeError(f"expected a list, got {type(value).__name__}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {type(value).__name__}")
    return value


_FILES = {
    Collection.SHAKESPEARE: "users/shakespeare/tinyshakespeare_by_speaker.jsonl",
    Collection.LAMP7: "users/lamp7_dev/lamp7_dev.jsonl",
    Collection.PERSONACHAT: "users/personachat_valid/dialogues.jsonl",
}
_READERS: Mapping[Collection, Callable[[Any], tuple[str, list[Document]]]] = {
    Collection.SHAKESPEARE: _speaker,
    Collection.LAMP7: _author,
    Collection.PERSONACHAT: _persona,
}
