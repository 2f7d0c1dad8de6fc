"""One person's text, divided, and the state that the agent's training makes of such a text.

Search, steps and the choice of the state are the agent's, with its defaults. Only the division differs. The
agent refuses people with less than 4,800 tokens, and a study of people cannot. So test and select parts
shrink with the text.

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
    SearchFailed,
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
"""Of each part; who has fewer is no part of the study."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """A user's documents in tokens, each in one part; the words of those that do not train, or that judge."""

    name: str
    train: list[TokenizedDocument]
    select: list[TokenizedDocument]
    test: list[TokenizedDocument]
    held_out_words: frozenset[str]
    test_words: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The data that all runs of one model share; `folder` holds what is durable."""

    package: Package
    engine: Engine
    tokenizer: TextTokenizer
    options: TrainOptions
    folder: Path

    def person(self, user: User) -> Person:
        """Divide a user's documents by the hash of their words and the seed.

        Raises:
            InputError: too little text.
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

    def pooled(self, person: Person, others: Sequence[User]) -> Person:
        """Return as much text of other people to train on, in an order by hash.

        Nothing in it stands in the person's test or select part, and nothing stands twice. Step size and
        state are selected on the person's own select part, as for the own state. So the text that trains is
        the only difference. A select part of strangers' few words would decide more than that text.

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
        """Return the values that training chooses, float32 [K], and the notes about the run.

        A killed run continues where it was.

        Args:
            start_K: train on from these values instead of the package's, with other directions and batches
                than those of the run that made them.
        """
        options = self.options if start_K is None else replace(self.options, seed=self.options.seed + 1)
        prepared = self.prepared(person)
        start = b"" if start_K is None else start_K.tobytes()
        named = repr((kind, person.name, options, self.package.digest, prepared.digest)).encode()
        digest = hashlib.sha256(named + start)
        folder = self.folder / digest.hexdigest()[:16]
        try:
            found = personalise(self.package, self.engine, prepared, options, folder=folder, start_K=start_K)
        except SearchFailed as exc:
            base_K = self.package.values() if start_K is None else start_K
            return base_K, {"step": 0, "learning_rate": None, "failed": str(exc)}
        return found.values_K, {"step": found.step, "learning_rate": found.learning_rate}

    def prepared(self, person: Person) -> Prepared:
        """The rows that train, and those that select the state."""
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
        """Return summed loss, tokens and bytes of the test part."""
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
        """Return documents in this order with as many targets as wanted. The last one is cut."""
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
    """Count the tokens that are targets."""
    return sum(document.targets for document in documents)


def _cut(document: TokenizedDocument, most: int) -> TokenizedDocument:
    """Return the beginning, of at most so many targets."""
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
