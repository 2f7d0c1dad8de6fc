"""One person's text, divided, and the state that the agent's own phases train on such a text.

The search for epsilon and step size, the steps and the choice of the state are the agent's (`edge_agent`),
with its defaults. What differs is the division: the agent refuses people with less than 4,800 tokens, and a
study of people cannot, so test and select parts shrink with the text.

# Legend: K masked weights.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from permille.engines.interface import Engine
from permille.errors import InputError
from permille.package.reader import Package
from permille.zo.lattice import values
from permille_agent.state.home import Home
from permille_agent.text.documents import Document, parse_row
from permille_agent.text.preparation import Prepared, tokenize
from permille_agent.text.reading import DataReport
from permille_agent.text.rows import TrainingBatches, document_rows, packed_rows, rows_digest
from permille_agent.text.splits import position
from permille_agent.text.tokens import TextTokenizer, TokenizedDocument
from permille_agent.training.evaluation import document_losses
from permille_agent.training.options import TrainOptions
from permille_agent.training.progress import SilentProgress
from permille_agent.training.run import Json, open_run
from permille_agent.training.run_clock import RunClock
from permille_agent.training.setup import Setup, training_exponents
from permille_agent.training.step_size import SearchFailed
from permille_agent.training.steps import make_plan, train_attempts
from permille_lab.evaluate.user_texts import User, own_words

TEST_SHARE, MOST_TEST_TOKENS = 0.3, 4_000
SELECT_SHARE, MOST_SELECT_TOKENS = 0.15, 1_000
FEWEST_TOKENS = 30
"""Of each part; who has fewer is no part of the study."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """A user's documents in tokens, each in one part; the words of those that do not train."""

    name: str
    train: list[TokenizedDocument]
    select: list[TokenizedDocument]
    test: list[TokenizedDocument]
    held_out_words: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What every run of one model works with."""

    home: Home
    package: Package
    engine: Engine
    tokenizer: TextTokenizer
    options: TrainOptions

    def person(self, user: User) -> Person:
        """Divide a user's documents by the hash of their words and the seed.

        Raises:
            InputError: too little text.
        """
        words = [own_words(row) for row in user.documents]
        order = sorted(range(len(words)), key=lambda index: position(words[index], self.options.seed))
        found = [self._tokens(user.documents[index]) for index in order]
        kept = [(index, tokens) for index, tokens in zip(order, found, strict=True) if tokens is not None]
        total = sum(tokens.targets for _, tokens in kept)
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
            held_out_words=frozenset(words[index] for index, _ in (*test, *select)),
        )

    def pooled(self, person: Person, others: Sequence[User]) -> Person:
        """As much text of other people to train on; documents in an order by hash.

        Nothing that stands in the person's test or select part, and nothing twice. Step size and state are
        selected on the person's own select part, as for the own state: the text of the log is the only
        difference, and a select part of strangers' few words would decide more than it.
        """
        candidates = {
            own_words(row): row for user in others if user.name != person.name for row in user.documents
        }
        order = sorted(
            (words for words in candidates if words not in person.held_out_words),
            key=lambda words: position(f"pooled {person.name} {words}", self.options.seed),
        )
        train = self._filled(candidates, order, targets(person.train))
        return Person(
            name=f"pooled for {person.name}",
            train=list(train.values()),
            select=person.select,
            test=[],
            held_out_words=frozenset(),
        )

    def train(
        self, person: Person, kind: str, start_K: NDArray[np.float32] | None = None
    ) -> tuple[NDArray[np.float32], Json]:
        """The values that the agent's phases choose, float32 [K], and what is told of the run.

        A run that was killed goes on where it was.

        Args:
            start_K: train on from these values instead of the package's, with other directions and batches
                than those of the run that made them.
        """
        base_K, options, start = self.package.values(), self.options, {}
        if start_K is not None:
            base_K, options = start_K, replace(options, seed=options.seed + 1)
            start = {"start": hashlib.sha256(start_K.tobytes()).hexdigest()}
        row_tokens = self.options.row_tokens
        train = packed_rows(person.train, row_tokens)
        select = document_rows(person.select, row_tokens)
        prepared = Prepared(
            train=train,
            select=select,
            test=[],
            test_documents=[],
            counts={},
            digest=rows_digest([train, select]),
        )
        setup = Setup(
            engine=self.engine,
            package_digest=self.package.digest,
            mask_digest=self.package.mask_digest,
            counts=self.package.counts,
            w_base_K=base_K,
            prepared=prepared,
            options=options,
            batches=TrainingBatches(train, batch_rows=options.batch_rows, seed=options.seed),
            exponents=training_exponents(self.package, options),
            decoder_layers=int(self.package.config["num_hidden_layers"]),
        )
        definition = {
            "format": "benchmark-users-1",
            "package": self.package.digest,
            "data": prepared.digest,
            "options": options.definition(),
            "kind": kind,
            **start,
        }
        run = open_run(self.home, definition)
        clock = RunClock(run)
        try:
            plan = make_plan(setup, run, SilentProgress(), clock)
            chosen = train_attempts(setup, run, plan, SilentProgress(), clock)
        except SearchFailed as exc:
            return setup.w_base_K, {"step": 0, "learning_rate": None, "stopped": str(exc)}
        told = {
            "step": chosen.step,
            "learning_rate": chosen.header.learning_rate,
            "stopped": chosen.stopped,
        }
        return values(setup.w_base_K, chosen.s_K, chosen.header.step_unit_exponent), told

    def nats(self, person: Person, values_K: NDArray[np.float32]) -> tuple[float, int, int]:
        """Of the test part: summed loss, tokens and bytes."""
        rows = document_rows(person.test, self.options.row_tokens)
        found = document_losses(self.engine, values_K, rows, len(person.test))
        return float(found.nats_D.sum()), int(found.tokens_D.sum()), int(found.bytes_D.sum())

    def _tokens(self, row: object) -> TokenizedDocument | None:
        _, content = parse_row(row)
        group = hashlib.sha256(repr(content).encode()).hexdigest()
        _, found = tokenize(
            [Document(group, content)], self.tokenizer, DataReport(), row_tokens=self.options.row_tokens
        )
        return found[0] if found else None

    def _filled(
        self, documents: Mapping[str, object], order: Iterable[str], wanted: int
    ) -> dict[str, TokenizedDocument]:
        """Documents in this order, by their words, the last one cut: as many targets as wanted."""
        found: dict[str, TokenizedDocument] = {}
        have = 0
        for words in order:
            tokens = self._tokens(documents[words])
            if tokens is None:
                continue
            found[words] = _cut(tokens, wanted - have)
            have += found[words].targets
            if have == wanted:
                return found
        raise InputError(f"expected other people's text of {wanted} tokens, got {have}")


def targets(documents: Iterable[TokenizedDocument]) -> int:
    """Tokens that count."""
    return sum(document.targets for document in documents)


def _cut(document: TokenizedDocument, most: int) -> TokenizedDocument:
    """Its beginning, of at most so many targets."""
    if document.targets <= most:
        return document
    end = int(np.flatnonzero(document.target_T)[most - 1]) + 1
    return TokenizedDocument(
        ids_T=document.ids_T[:end], target_T=document.target_T[:end], bytes_T=document.bytes_T[:end]
    )


def _front(
    documents: Sequence[tuple[int, TokenizedDocument]], wanted: float
) -> list[tuple[int, TokenizedDocument]]:
    taken: list[tuple[int, TokenizedDocument]] = []
    while len(taken) < len(documents) and targets(tokens for _, tokens in taken) < wanted:
        taken.append(documents[len(taken)])
    return taken
