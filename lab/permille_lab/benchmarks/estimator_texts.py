"""Three kinds of text for the comparison of estimators, of another person or slice for each seed.

Speeches of one of Shakespeare's speakers (users/shakespeare), tweets of one to three people
(users/lamp7_dev), sentences of film reviews (tasks/SST-2_sentences).
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from permille_lab.benchmarks.model_packages import Sources

SPEAKERS = ("GLOUCESTER", "DUKE VINCENTIO", "KING RICHARD II")
# Characters of tweets; below about so many there is too little for three splits.
TWEETS = 20_000
REVIEWS = 400


def write_text(sources: Sources, name: str, seed: int, path: Path) -> Path:
    """The text `name` of this seed as JSON lines of documents in `path`.

    Raises:
        OSError: the data is not there.
    """
    documents = TEXTS[name](sources.data, seed)
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return path


def public_sequences(tokenizer: Path, corpus: Path, count: int, length: int) -> NDArray[np.int64]:
    """The first `count` pieces of `length` tokens of a corpus (JSON lines with `text`), [count, length]."""
    encoder = Tokenizer.from_file(str(tokenizer))
    found: list[list[int]] = []
    for row in _rows(corpus):
        ids = encoder.encode(row["text"], add_special_tokens=False).ids
        found += [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
        if len(found) >= count:
            break
    return np.array(found[:count], dtype=np.int64)


def _speeches(data: Path, seed: int) -> list[str]:
    speaker = SPEAKERS[seed % len(SPEAKERS)]
    rows = _rows(data / "users/shakespeare/tinyshakespeare_by_speaker.jsonl")
    return next(list(row["text"]) for row in rows if row["user"] == speaker)


def _tweets(data: Path, seed: int) -> list[str]:
    """Of the people with most tweets, so many as give enough text; the next ones for the next seed."""
    rows = _rows(data / "users/lamp7_dev/lamp7_dev.jsonl")
    profiles = sorted((row["profile"] for row in rows), key=lambda tweets: -sum(map(len, tweets)))
    people = iter(profiles)
    for _ in range(seed % 3 + 1):
        chosen: list[str] = []
        while sum(map(len, chosen)) < TWEETS:
            chosen += next(people)
    return chosen


def _reviews(data: Path, seed: int) -> list[str]:
    lines = (data / "tasks/SST-2_sentences/train.tsv").read_text(encoding="utf-8").split("\n")
    sentences = [line.rpartition("\t")[0] for line in lines if "\t" in line]
    first = seed % 10 * REVIEWS
    return sentences[first : first + REVIEWS]


def _rows(path: Path) -> list[dict[str, Any]]:
    """Lines end at a newline only: some texts hold other separators. Rows that are broken are counted on
    standard error."""
    rows, bad = [], 0
    for line in path.read_bytes().split(b"\n"):
        try:
            if line.strip():
                rows.append(json.loads(line))
        except ValueError:
            bad += 1
    if bad:
        print(f"{path.name}: {bad} rows of {len(rows) + bad} are no JSON and are left out", file=sys.stderr)
    return rows


TEXTS: dict[str, Callable[[Path, int], list[str]]] = {
    "speeches": _speeches,
    "tweets": _tweets,
    "reviews": _reviews,
}
