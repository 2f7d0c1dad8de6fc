"""Packages of SmolLM2-135M-Instruct, the gardener's text, and general text.

    subject = open_subject(
        sources, Path("model.gguf"), Path("build/bench"), trained=0.001, options=TrainOptions(seed=0)
    )
    general = general_batches(subject.folder, sources.data)

Packages are made as a build makes them: a mask by Fisher scores on C4, NF4 linears, an 8-bit embedding, and a
reference. The general text shows how much general knowledge a personal model has lost.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from permille.choices import Embeddings
from permille.corpora.sequences import token_sequences
from permille.corpora.sources import ReadReport, file_texts
from permille.engines.factory import open_engine
from permille.engines.interface import Engine
from permille.models.gguf.folder import model_folder
from permille.models.loading import FileChat, FileTokenizer
from permille.package.build import ChosenAdapter, write_manifest
from permille.package.reader import Package
from permille.training.reference import TEXT_ROWS, TEXT_TOKENS, Reference, make_reference
from permille.training.strength import EIGHTHS, KEEP_GENERAL, Strength, choose_strength
from permille.zo.estimators import Batch
from permille_agent.embed import (
    BaseAnswers,
    TokenizedDocument,
    TrainOptions,
    base_answers,
    compare_answers,
    document_losses,
    document_rows,
    evaluation_batches,
    package_tokenizer,
)
from permille_lab.measuring.model_packages import Sources, model_package
from permille_lab.people.study import Study
from permille_lab.people.user_texts import User

LEAST_CHARACTERS = 4_000
"""Least number of characters of a person's text."""
LONGEST = 1024
"""Largest number of tokens of a scored row, with its prompt."""
GENERAL_TEXTS = 32
"""Number of texts at the end of C4 that judge. Nothing is learned from them."""
A_FIFTH = slice(None, None, 5)
"""A fifth of the general text, if each model must read it: 512 tokens each of WikiText-2 and C4."""
_GENERAL_TOKENS, _GENERAL_ROW = 2560, 256
_REFERENCE_SEED = 1


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A package and what its training needs.

    Attributes:
        study: divides people's text and trains on it.
        reference: general text in the package, by which the strength of a state is chosen.
        folder: the transformers folder from which the package was made.
    """

    study: Study
    reference: Reference
    folder: Path

    def strength(self, values_K: NDArray[np.float32]) -> Strength:
        """Return the strength of a state, as the agent chooses it with its default bound."""
        engine, (base, _) = self.study.engine, self._base

        def rise_of(eighths: int) -> float:
            return self.reference.loss(engine, self.at(values_K, eighths)) - base

        def fault_at(eighths: int) -> str:
            return self.fault(engine, self.at(values_K, eighths))

        return choose_strength(rise_of, KEEP_GENERAL, fault_at)

    def fault(self, engine: Engine, values_K: NDArray[np.float32]) -> str:
        """Return what is wrong with an answer that the base gives rightly, or "" if all stay right."""
        return compare_answers(engine, values_K, self.study.tokenizer, self._base[1])[1]

    @cached_property
    def _base(self) -> tuple[float, BaseAnswers]:
        """Loss of the base on the reference, and its right answers."""
        engine, base_K = self.study.engine, self.study.package.values()
        return self.reference.loss(engine, base_K), base_answers(engine, base_K, self.study.tokenizer)

    def at(self, values_K: NDArray[np.float32], eighths: int) -> NDArray[np.float32]:
        """Return the sparse values at a strength in eighths. At 0 they are those of the base."""
        base_K = self.study.package.values()
        return np.asarray(base_K + np.float32(eighths / EIGHTHS) * (values_K - base_K), np.float32)


def open_subject(
    sources: Sources, gguf: Path, folder: Path, *, trained: float | ChosenAdapter, options: TrainOptions
) -> Subject:
    """Open the package of a GGUF file. It is made once in `folder` and then reused.

    Args:
        trained: density of the mask, or an adapter.
        options: options of the training.
    """
    model = model_folder(gguf, folder)
    bare = model_package(
        Sources(models=model.parent, data=sources.data),
        model.name,
        folder,
        trained=trained,
        embeddings=Embeddings.Q8_0,
    )
    package = _with_reference(bare, model, sources.data)
    reference = Reference.of(package)
    assert reference is not None  # `_with_reference` adds one
    study = Study(
        package=package,
        engine=open_engine(package, threads=1),
        tokenizer=package_tokenizer(package),
        options=options,
        folder=folder / "real",
    )
    return Subject(study=study, reference=reference, folder=model)


def gardener() -> User:
    """Return the gardener of the examples. Each paragraph of the notes is a document."""
    notes = Path("examples/gardener/notes.txt").read_text()
    paragraphs = [text for text in notes.split("\n\n") if text.strip()]
    return User(name="gardener", documents=tuple({"text": text} for text in paragraphs))


def general_batches(model: Path, data: Path) -> list[Batch]:
    """Return public text that no training uses: 2,560 tokens each of WikiText-2 and of the end of C4.

    Rows begin as the model reads a text in use. If it begins with BOS, no row crosses texts of C4.
    """
    tokenizer = FileTokenizer(model)
    wiki = (data / "text/wikitext-2/wiki.test.raw").read_text()[: 8 * _GENERAL_TOKENS]
    with (data / "text/c4_en/c4_sample.jsonl").open() as file:
        c4 = [json.loads(line)["text"] for line in list(file)[-GENERAL_TEXTS:]]
    batches = []
    for texts in ([wiki], c4 if tokenizer.bos else ["\n".join(c4)[: 8 * _GENERAL_TOKENS]]):
        rows = document_rows(_documents(tokenizer, texts), _GENERAL_ROW)
        batches += [part.batch for part in evaluation_batches(rows, tokens=2 * _GENERAL_ROW)]
    return batches


def _documents(tokenizer: FileTokenizer, texts: Sequence[str]) -> list[TokenizedDocument]:
    """Tokenize texts until they have `_GENERAL_TOKENS` tokens."""
    found, begins, left = [], len(tokenizer.bos), _GENERAL_TOKENS
    for text in texts:
        ids_T = np.array(tokenizer.encode(text)[begins : begins + left], np.int64)
        left -= len(ids_T)
        if len(ids_T):
            target_T = np.arange(len(ids_T)) >= (0 if begins else 1)
            found.append(TokenizedDocument(ids_T, target_T, np.zeros_like(ids_T), tokenizer.bos))
    return found


def nats_of(
    engine: Engine,
    values_K: NDArray[np.float32],
    documents: Sequence[TokenizedDocument],
    row_tokens: int = LONGEST,
) -> float:
    """Return the mean loss of the documents' targets in rows of `row_tokens`, in nats per token."""
    found = document_losses(engine, values_K, document_rows(documents, row_tokens), len(documents))
    return float(found.nats_D.sum() / found.tokens_D.sum())


def general_of(engine: Engine, values_K: NDArray[np.float32], general: Sequence[Batch]) -> float:
    """Return the mean loss of the general text, in nats per token."""
    return float(np.mean([engine.token_losses(values_K, batch).mean(dtype=np.float64) for batch in general]))


def _with_reference(bare: Package, model: Path, data: Path) -> Package:
    known = bare.blobs.root.parent / f"reference-{bare.digest.removeprefix('sha256:')}.digest"
    if not known.exists():
        texts = file_texts(data / "text/c4_en/c4_sample.jsonl", ReadReport())
        text_NT = token_sequences(FileTokenizer(model), texts, TEXT_ROWS, TEXT_TOKENS, _REFERENCE_SEED)
        manifest = make_reference(bare, text_NT=text_NT, chat=FileChat.find(model), made={}, threads=1)
        known.write_text(write_manifest(bare.blobs, manifest))
    return Package.open(bare.blobs, known.read_text())
