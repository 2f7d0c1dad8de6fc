"""The parts of one person's text, and the agent's training on them.

The steps and the choice of the state are those of the agent. Only the division of the text differs. The
agent's three splits need at least 5,400 tokens, and it judges shorter text in parts. Here, the test and
select parts shrink with the text, so that all people have the same three parts.

# Legend: K masked weights.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from permille.engines.interface import Engine
from permille.errors import InputError
from permille.package.reader import Package
from permille_agent.embed import (
    Prepared,
    RunFailed,
    TextTokenizer,
    TokenizedDocument,
    TrainOptions,
    document_losses,
    document_rows,
    packed_rows,
    personalise,
    read_documents,
)
from permille_lab.measuring.cells import Result
from permille_lab.people.user_texts import Document, User, own_words

TEST_SHARE, MOST_TEST_TOKENS = 0.3, 4_000
SELECT_SHARE, MOST_SELECT_TOKENS = 0.15, 1_000
FEWEST_TOKENS = 30
"""Least number of tokens in each part. People with fewer are left out of the study."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """A user's tokenized documents. Each is in one part.

    Attributes:
        held_out_words: texts of the documents in `select` and `test`.
        test_words: texts of the documents in `test`.
    """

    name: str
    train: list[TokenizedDocument]
    select: list[TokenizedDocument]
    test: list[TokenizedDocument]
    held_out_words: frozenset[str]
    test_words: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The inputs that all runs with one package share. Runs are stored in `folder`."""

    package: Package
    engine: Engine
    tokenizer: TextTokenizer
    options: TrainOptions
    folder: Path

    def person(self, user: User) -> Person:
        """Divide a user's documents in the order of a hash of their text and the seed.

        Raises:
            InputError: there is too little text.
        """
        words = [own_words(row) for row in user.documents]
        order = sorted(range(len(words)), key=lambda index: self._position(words[index]))
        found = [self._tokens(user.documents[index]) for index in order]
        kept = [(words[index], tokens) for index, tokens in zip(order, found, strict=True) if tokens]
        total = targets(tokens for _, tokens in kept)
        test = _front(kept, min(TEST_SHARE * total, MOST_TEST_TOKENS))
        rest = kept[len(test) :]
        select = _front(rest[::-1], min(SELECT_SHARE * total, MOST_SELECT_TOKENS))
        train = rest[: len(rest) - len(select)]
        parts = [[tokens for _, tokens in part] for part in (train, select, test)]
        if min(map(targets, parts)) < FEWEST_TOKENS:
            raise InputError(
                f"expected {FEWEST_TOKENS} tokens in each part of {user.name}'s text, got "
                f"{', '.join(str(targets(part)) for part in parts)}"
            )
        return Person(
            name=user.name,
            train=parts[0],
            select=parts[1],
            test=parts[2],
            held_out_words=frozenset(words for words, _ in (*test, *select)),
            test_words=frozenset(words for words, _ in test),
        )

    def documents(self, user: User) -> list[TokenizedDocument]:
        """Return a user's tokenized documents in their own order."""
        return [tokens for tokens in map(self._tokens, user.documents) if tokens]

    def pooled(self, person: Person, others: Sequence[User]) -> Person:
        """Return the person with train text of other people, of the same number of tokens.

        Documents are taken in the order of a hash. None is in the person's test or select part, and none
        occurs twice. Step size and state are still selected by the person's own select part, so the train
        text is the only difference. A small select part of other people could change the result more than
        the train text does.

        Raises:
            InputError: the others wrote too little.
        """
        rows = {own_words(row): row for user in others if user.name != person.name for row in user.documents}
        order = sorted(
            rows.keys() - person.held_out_words,
            key=lambda words: self._position(f"pooled {person.name} {words}"),
        )
        train = self._filled((rows[words] for words in order), targets(person.train))
        return replace(person, name=f"pooled for {person.name}", train=train, test=[])

    def train(
        self, person: Person, kind: str, start_K: NDArray[np.float32] | None = None
    ) -> tuple[NDArray[np.float32], Result]:
        """Train, and return the selected values, float32 [K], with notes on the run.

        A killed run continues.

        Args:
            kind: a name that separates runs of the same person.
            start_K: values to start from, by default the package's. If they are given, the seed is increased
                by 1. Directions and batches then differ from those of the run that made the values.
        """
        options = self.options if start_K is None else replace(self.options, seed=self.options.seed + 1)
        prepared = self.prepared(person)
        start = b"" if start_K is None else start_K.tobytes()
        named = repr((kind, person.name, options, self.package.digest, prepared.digest)).encode()
        digest = hashlib.sha256(named + start)
        folder = self.folder / digest.hexdigest()[:16]
        try:
            found = personalise(self.package, self.engine, prepared, options, folder=folder, start_K=start_K)
        except RunFailed as exc:
            base_K = self.package.values() if start_K is None else start_K
            return base_K, {"step": 0, "learning_rate": None, "failed": str(exc)}
        return found.values_K, {"step": found.step, "learning_rate": found.learning_rate}

    def prepared(self, person: Person) -> Prepared:
        """Return the rows for training and for the selection of the state."""
        digest = hashlib.sha256()
        for document in (*person.train, *person.select):
            digest.update(document.ids_T.tobytes() + document.target_T.tobytes())
        return Prepared(
            train=packed_rows(person.train, self.options.row_tokens),
            select=document_rows(person.select, self.options.row_tokens),
            test=[],
            test_documents=[],
            counts={},
            digest=digest.hexdigest(),
        )

    def nats(self, person: Person, values_K: NDArray[np.float32]) -> tuple[float, int, int]:
        """Return the summed loss in nats, the targets and the bytes of the test part."""
        rows = document_rows(person.test, self.options.row_tokens)
        found = document_losses(self.engine, values_K, rows, len(person.test))
        return float(found.nats_D.sum()), int(found.tokens_D.sum()), int(found.bytes_D.sum())

    def _position(self, words: str) -> bytes:
        return hashlib.sha256(f"permille-study-1\0{self.options.seed}\0{words}".encode()).digest()

    def _tokens(self, row: Document) -> TokenizedDocument | None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "document.jsonl"
        path.write_text(json.dumps(dict(row)) + "\n")
        documents, _ = read_documents([path])
        if not documents:
            return None
        found = self.tokenizer.tokenize(documents[0].content, row_tokens=self.options.row_tokens)
        return found if found.targets else None

    def _filled(self, documents: Iterable[Document], wanted: int) -> list[TokenizedDocument]:
        """Return the first documents with `wanted` targets together. The last one may be cut."""
        found: list[TokenizedDocument] = []
        have = 0
        for row in documents:
            tokens = self._tokens(row)
            if tokens is not None:
                found.append(_cut(tokens, wanted - have))
                have += found[-1].targets
            if have == wanted:
                return found
        raise InputError(f"expected other people's text of {wanted} tokens, got {have}")


def targets(documents: Iterable[TokenizedDocument]) -> int:
    """Return the number of targets of documents."""
    return sum(document.targets for document in documents)


def _cut(document: TokenizedDocument, most: int) -> TokenizedDocument:
    """Return the beginning of a document, with at most `most` targets."""
    if document.targets <= most:
        return document
    end = int(np.flatnonzero(document.target_T)[most - 1]) + 1
    return replace(
        document, ids_T=document.ids_T[:end], target_T=document.target_T[:end], bytes_T=document.bytes_T[:end]
    )


def _front(
    documents: Sequence[tuple[str, TokenizedDocument]], wanted: float
) -> list[tuple[str, TokenizedDocument]]:
    taken: list[tuple[str, TokenizedDocument]] = []
    while len(taken) < len(documents) and targets(tokens for _, tokens in taken) < wanted:
        taken.append(documents[len(taken)])
    return taken
