"""Losses of documents, and the strength at which a state keeps general knowledge.

The losses of documents are sums in nats. Packages with different tokenizers are compared by nats per byte of
the same text.

The loss on the package's reference text (`permille.training.reference`) and answers to a few questions
(`answers.py`) decide the strength of a state: the number of eighths of the state that are kept. Without a
reference text, only the answers decide.

Shapes: D documents, G groups of documents, N targets, K masked weights.
"""

import math
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from permille.engines.interface import Engine
from permille.errors import InputError, OperatorError
from permille.training.strength import EIGHTHS, choose_strength, scaled
from permille.zo.lattice import values
from permille_agent.state.home import read_record, write_record
from permille_agent.text.rows import Row, evaluation_batches
from permille_agent.text.tokens import TextTokenizer, package_tokenizer
from permille_agent.training.answers import BaseAnswers, Sample, base_answers, compare_answers, questions
from permille_agent.training.engines import EngineUsed
from permille_agent.training.run import Run, finite_or_none

EVALUATION_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class DocumentLosses:
    """Sums for each document: its loss in nats, its target tokens, and the bytes that these tokens encode."""

    nats_D: NDArray[np.float64]
    tokens_D: NDArray[np.int64]
    bytes_D: NDArray[np.int64]

    @property
    def per_token(self) -> float:
        """Mean loss per token, in nats."""
        return float(self.nats_D.sum() / self.tokens_D.sum())

    def of(self, chosen_D: NDArray[np.bool_]) -> "DocumentLosses":
        """Return the losses of the chosen documents."""
        return DocumentLosses(self.nats_D[chosen_D], self.tokens_D[chosen_D], self.bytes_D[chosen_D])

    @property
    def bits_per_byte(self) -> float:
        """Mean loss per byte, in bits, which is comparable between tokenizers."""
        return float(self.nats_D.sum() / math.log(2) / self.bytes_D.sum())


def document_losses(
    engine: Engine, values_K: NDArray[np.float32], rows: Sequence[Row], documents: int
) -> DocumentLosses:
    """Return the losses of all documents, summed in float64 over their rows."""
    nats_D = np.zeros(documents, dtype=np.float64)
    tokens_D = np.zeros(documents, dtype=np.int64)
    bytes_D = np.zeros(documents, dtype=np.int64)
    for part in evaluation_batches(rows, tokens=EVALUATION_TOKENS):
        losses_N = engine.token_losses(values_K, part.batch).astype(np.float64)
        if losses_N.shape != part.document_N.shape:
            raise InputError(f"expected {len(part.document_N)} token losses, got shape {losses_N.shape}")
        # Not `+=`, which would add only one of several tokens of a document.
        np.add.at(nats_D, part.document_N, losses_N)
        np.add.at(tokens_D, part.document_N, 1)
        np.add.at(bytes_D, part.document_N, part.bytes_N)
    return DocumentLosses(nats_D, tokens_D, bytes_D)


def mean_loss(engine: Engine, values_K: NDArray[np.float32], rows: Sequence[Row]) -> float:
    """Return the mean loss per target token. It is not finite if the loss of any token is not finite."""
    total = 0.0
    tokens = 0
    for part in evaluation_batches(rows, tokens=EVALUATION_TOKENS):
        losses_N = engine.token_losses(values_K, part.batch)
        total += float(losses_N.sum(dtype=np.float64))
        tokens += len(losses_N)
    return total / tokens


def joined(parts: Iterable[DocumentLosses]) -> DocumentLosses:
    """Concatenate the losses of several sets of documents."""
    found = list(parts)
    return DocumentLosses(
        np.concatenate([part.nats_D for part in found]),
        np.concatenate([part.tokens_D for part in found]),
        np.concatenate([part.bytes_D for part in found]),
    )


def summed(losses: DocumentLosses, group_D: NDArray[np.int64]) -> DocumentLosses:
    """Sum the losses of the documents of each group. `group_D` holds the group of each document, from 0."""
    count = int(group_D.max()) + 1
    nats_G = np.zeros(count, dtype=np.float64)
    tokens_G, bytes_G = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    np.add.at(nats_G, group_D, losses.nats_D)
    np.add.at(tokens_G, group_D, losses.tokens_D)
    np.add.at(bytes_G, group_D, losses.bytes_D)
    return DocumentLosses(nats_G, tokens_G, bytes_G)


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneralLoss:
    """Losses on the package's reference text, in nats per token. None replaces a loss that is not finite.

    Attributes:
        loss_base: loss of the base model.
        loss: loss of the trained model. A state has the strength that is kept, or one eighth if none is.
    """

    loss_base: float | None
    loss: float | None

    @property
    def rise(self) -> float | None:
        """Rise of the loss above that of the base, in nats per token."""
        return None if self.loss is None or self.loss_base is None else self.loss - self.loss_base

    def __str__(self) -> str:
        if self.loss is None or self.loss_base is None or self.rise is None:
            return "not finite"
        return f"{self.loss_base:.4f} of the base -> {self.loss:.4f} ({self.rise:+.4f} nats per token)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Contents of `kept.json`: the strength that keeps general knowledge, and what was measured for it.

    Attributes:
        strength: eighths of the trained state that are kept. 0 means that even one eighth costs too much.
        fault: what the next larger strength would do to an answer, such as `lose the answer to "What ...?"`.
            "" if it would raise the loss on general text by too much, or if there is none.
        general: losses on general text. None if the package has no reference text.
        answers: answers of the base and of the state at this strength, or at one eighth if it is 0.
    """

    strength: int
    fault: str
    general: GeneralLoss | None
    answers: tuple[Sample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownBase:
    """Contents of `base.json`: what the base of a package does, measured once for all runs.

    Attributes:
        package: digest of the package.
        engine: the engine that computed the numbers.
        asked: prompts of all questions.
        loss: loss on general text, 0 if the package has none. None replaces a loss that was not finite.
        answers: the right answers.
    """

    package: str
    engine: EngineUsed
    asked: tuple[str, ...]
    loss: float | None
    answers: BaseAnswers


def known_base(run: Run, tokenizer: TextTokenizer) -> KnownBase:
    """Return what the base does. Measure it, unless an earlier run with the same package and engine has."""
    path = run.base_file or run.folder.path / "base.json"
    unknown = KnownBase(
        package=run.package.digest,
        engine=EngineUsed(**run.engine.info()),
        asked=tuple(question.prompt for question in questions(tokenizer)),
        loss=None,
        answers=BaseAnswers(texts={}),
    )
    with suppress(OperatorError):  # a damaged file is written again
        known = read_record(path, KnownBase)
        if known is not None and replace(known, loss=None, answers=unknown.answers) == unknown:
            return known
    run.progress.phase("measuring the base, once for all runs: its general loss and its answers")
    loss = 0.0 if run.reference is None else run.reference.loss(run.engine, run.w_base_K)
    answers = base_answers(run.engine, run.w_base_K, tokenizer)
    known = replace(unknown, loss=finite_or_none(loss), answers=answers)
    write_record(path, known)
    return known


def keep_general(run: Run, s_K: NDArray[np.int64], step_unit_exponent: int) -> Kept:
    """Choose the strength of a trained state, and store it for a resumed run.

    Args:
        run: the run.
        s_K: the trained state.
        step_unit_exponent: exponent of the state's unit.
    """
    reference = run.reference

    def values_at(eighths: int) -> NDArray[np.float32]:
        return values(run.w_base_K, scaled(s_K, eighths), step_unit_exponent)

    def loss_of(values_K: NDArray[np.float32]) -> float:
        return reference.loss(run.engine, values_K) if reference is not None else 0.0

    def choose(tokenizer: TextTokenizer) -> Kept:
        base = known_base(run, tokenizer)
        run.progress.phase("measuring the loss on general text, and asking general questions")
        loss_base = math.nan if base.loss is None else base.loss
        answers: dict[int, tuple[Sample, ...]] = {}

        def fault_at(eighths: int) -> str:
            answers[eighths], fault = compare_answers(run.engine, values_at(eighths), tokenizer, base.answers)
            return fault

        found = choose_strength(
            lambda eighths: loss_of(values_at(eighths)) - loss_base, run.options.keep_general, fault_at
        )
        general = GeneralLoss(
            loss_base=finite_or_none(loss_base), loss=finite_or_none(loss_base + found.rise)
        )
        return Kept(
            strength=found.eighths,
            fault=found.fault,
            general=None if reference is None else general,
            answers=answers.get(found.eighths or 1, ()),
        )

    with closing(package_tokenizer(run.package)) as tokenizer:
        return run.folder.once("kept", Kept, lambda: choose(tokenizer))


def strength_words(eighths: int, fault: str = "") -> str:
    """Describe how much of a trained state is kept, and why not more.

    Example:
        >>> strength_words(6)
        '6/8 of what was trained: more would raise the loss on general text beyond --keep-general'

    Args:
        eighths: the strength.
        fault: what more would do to an answer, if this is the reason.
    """
    if not eighths:
        return "none: even an eighth of what was trained costs too much"
    if eighths == EIGHTHS:
        return "all of what was trained"
    fault = fault or "raise the loss on general text beyond --keep-general"
    return f"{eighths}/{EIGHTHS} of what was trained: more would {fault}"
