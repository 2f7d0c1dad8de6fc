"""Inputs of jobs: the folder of a registered model, and the texts of a registered corpus.

The first job that reads a model stores the digest of its files. If the files have changed since, a later job
refuses them. So the mask, the quantization and the values of a package come from the same weights.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter

from permille.corpora.sequences import Tokenizer, token_sequences
from permille.corpora.sources import ReadReport, file_texts
from permille.corpora.streams import streamed_texts
from permille.digests import JSON, digest_of_file
from permille.errors import InputError
from permille.models.checkpoint import Checkpoint
from permille.models.conversion import modern_folder
from permille.models.families import scoped_tensors
from permille.models.sources import download_model, resolve_inside
from permille.schemas.inputs import (
    CorpusSource,
    FileCorpus,
    FolderModel,
    GgufModel,
    HubModel,
    SparsifiedModel,
    StreamedCorpus,
)
from permille.schemas.jobs import JobKind
from permille.store import inputs, rows
from permille.store.inputs import ModelFacts
from permille.store.tables import Corpus, Model
from permille.version import __version__
from permille_workers.runtime.context import TaskContext

AnyModel = FolderModel | HubModel | GgufModel | SparsifiedModel
_MODEL_SOURCE: TypeAdapter[AnyModel] = TypeAdapter(Annotated[AnyModel, Field(discriminator="kind")])
_CORPUS_SOURCE: TypeAdapter[FileCorpus | StreamedCorpus] = TypeAdapter(CorpusSource)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceModel:
    """A registered model whose files have been checked.

    Attributes:
        gguf: the GGUF file from which the checkpoint was made, or None.
    """

    id: str
    checkpoint: Checkpoint
    provenance: dict[str, JSON]
    gguf: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Choice of sequences from a corpus: their number, length and seed, and how many to skip first."""

    number: int
    length: int
    seed: int
    skip: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """Token sequences [N, T] of a corpus, and a report on reading it: counts of rows and of bad rows."""

    tokens_NT: NDArray[np.int64]
    read: dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCorpus:
    """A registered corpus, with a function that reads its texts."""

    texts: Callable[[ReadReport], Iterator[str]]
    provenance: dict[str, JSON]

    def sequences(self, tokenizer: Tokenizer, sampling: Sampling) -> Sequences:
        """Draw sequences from the usable texts.

        Raises:
            InputError: there is too little text, too many rows are unusable, or the file is truncated.
            RetryableError: the data set cannot be reached.
        """
        report = ReadReport()
        asked = (sampling.number, sampling.length, sampling.seed)
        tokens_NT = token_sequences(tokenizer, self.texts(report), *asked, skip=sampling.skip)
        return Sequences(tokens_NT=tokens_NT, read=report.as_json())


def open_model(context: TaskContext, model_id: str) -> SourceModel:
    """Find or download the model's folder, and check it. The first job of a model also stores facts about it.

    Raises:
        InputError: the folder is unusable, or its files have changed since the first job.
        NotFoundError: there is no such model.
        RetryableError: the hub cannot be reached.
    """
    tenant_id = context.claim.tenant_id
    with context.db.read() as session:
        row = rows.get(session, Model, tenant_id=tenant_id, row_id=model_id)
        root = inputs.roots_of(session, context.settings, tenant_id=tenant_id).models
    folder, provenance, gguf = _locate(context, _MODEL_SOURCE.validate_python(row.source), root)
    checkpoint = Checkpoint(folder)
    digest = checkpoint.digest()
    if row.digest is not None and row.digest != digest:
        raise InputError(
            f"The files of {model_id} have changed: their digest was {row.digest} and is now {digest}. "
            "Restore the files, or register the folder as another model."
        )
    if row.digest is None:
        facts = model_facts(checkpoint, digest, size_bytes=gguf.stat().st_size if gguf else None)
        with context.db.write() as session:
            inputs.record_facts(session, tenant_id=tenant_id, model_id=model_id, facts=facts)
    return SourceModel(
        id=model_id,
        checkpoint=checkpoint,
        provenance={**provenance, "digest": digest},
        gguf=gguf,
    )


def open_corpus(context: TaskContext, corpus_id: str) -> SourceCorpus:
    """Open a corpus.

    Raises:
        NotFoundError: there is no such corpus.
        InputError: its file is missing.
    """
    tenant_id = context.claim.tenant_id
    with context.db.read() as session:
        row = rows.get(session, Corpus, tenant_id=tenant_id, row_id=corpus_id)
        root = inputs.roots_of(session, context.settings, tenant_id=tenant_id).corpora
    source = _CORPUS_SOURCE.validate_python(row.source)
    if isinstance(source, FileCorpus):
        path = resolve_inside(root, source.path, what="file")
        return SourceCorpus(
            # Resolve the path again before each read. It may have become a link out of the root.
            texts=lambda report: file_texts(resolve_inside(root, source.path, what="file"), report),
            provenance={"kind": "file", "location": source.path, "digest": digest_of_file(path)},
        )
    return SourceCorpus(
        texts=partial(streamed_texts, source.dataset, source.split),
        provenance={"kind": "streamed", "location": source.dataset.value, "split": source.split},
    )


def reach_corpus(context: TaskContext, corpus_id: str) -> None:
    """Read the first text of a streamed corpus, so that a job without a network fails before long work.

    Raises:
        NotFoundError: there is no such corpus.
        RetryableError: the data set cannot be reached.
    """
    with context.db.read() as session:
        row = rows.get(session, Corpus, tenant_id=context.claim.tenant_id, row_id=corpus_id)
    source = _CORPUS_SOURCE.validate_python(row.source)
    if isinstance(source, StreamedCorpus):
        next(streamed_texts(source.dataset, source.split, ReadReport()), None)


def versions(*libraries: str) -> dict[str, JSON]:
    """Return the versions of permille, NumPy and the named libraries.

    Another version of one of these can change the bits of a result.
    """
    from importlib.metadata import version

    found: dict[str, JSON] = {name: version(name) for name in sorted(libraries)}
    return {**found, "permille": __version__, "numpy": np.__version__}


def _locate(context: TaskContext, source: AnyModel, root: Path) -> tuple[Path, dict[str, JSON], Path | None]:
    """Return a model's folder, its entry in the provenance, and its GGUF file (None: it has none)."""
    match source:
        case SparsifiedModel():
            made = context.artifact(JobKind.SPARSIFICATION, source.sparsification_id)
            folder = resolve_inside(root, inputs.sparsified_path(made.digest), what="folder")
            return folder, {"kind": "sparsified", "made_of": cast("dict[str, JSON]", made.provenance)}, None
        case FolderModel():
            folder = resolve_inside(root, source.path, what="folder")
            return modern_folder(folder, root), {"kind": "folder", "location": source.path}, None
        case GgufModel():
            from permille.models.gguf.folder import model_folder

            file = resolve_inside(root, source.path, what="file")
            return model_folder(file, root), {"kind": "gguf", "location": source.path}, file
        case HubModel():
            folder = download_model(source.repository, source.commit, root)
            entry: dict[str, JSON] = {
                "kind": "hub",
                "location": source.repository,
                "commit": source.commit,
            }
            return modern_folder(folder, root), entry, None


def model_facts(checkpoint: Checkpoint, digest: str, *, size_bytes: int | None = None) -> ModelFacts:
    """Return the facts about a model that the database stores.

    Args:
        checkpoint: the model.
        digest: digest of its weights.
        size_bytes: size of the file that the checkpoint was decoded from. None: it is the model itself.
    """
    return ModelFacts(
        family=checkpoint.family.value,
        config=dict(checkpoint.config),
        size_bytes=checkpoint.size_bytes if size_bytes is None else size_bytes,
        parameter_count=checkpoint.parameters,
        scoped_parameter_count=sum(
            rows * columns for _, (rows, columns) in scoped_tensors(checkpoint.config)
        ),
        digest=digest,
    )


def evaluation_sequences(
    tokenizer: Tokenizer, corpus: SourceCorpus, wanted: Sampling
) -> tuple[Sequences, bool]:
    """Return sequences for evaluation, and whether they are held out.

    They are held out if they come after the first `wanted.skip` sequences of the corpus, which the job may
    have used. If the corpus is too small, halve the number of sequences. As a last resort, skip no sequences.
    """
    for skip in dict.fromkeys((wanted.skip, 0)):
        number = wanted.number
        while number >= 1:
            sampling = Sampling(number=number, length=wanted.length, seed=wanted.seed, skip=skip)
            try:
                return corpus.sequences(tokenizer, sampling), skip >= wanted.skip
            except InputError as exc:
                shortest, number = exc, number // 2
    raise InputError(
        f"The evaluation corpus is too small. It must have at least {wanted.length} tokens: {shortest}"
    ) from shortest
