"""What jobs start from: a registered model's folder, a registered corpus's texts.

The first job that reads a model stores the digest of its files; a later job refuses a folder whose files have
changed, so that a mask, a quantization and the values of one package come from the same weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

import permille
from permille.corpora.sources import (
    CorpusRef,
    FileCorpus,
    ReadReport,
    StreamedCorpus,
    StreamedDataset,
    read_texts,
)
from permille.digests import JSON, digest_of_file
from permille.errors import InputError
from permille.models.checkpoint import Checkpoint
from permille.models.families import scoped_tensors
from permille.models.sources import FolderRef, HubRef, ModelRef, resolve_inside, resolve_model
from permille.store import corpora, models
from permille.store.models import ModelFacts
from permille.store.tables import Corpus, Model
from permille_workers.context import TaskContext


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceModel:
    """A registered model whose files were checked."""

    id: str
    checkpoint: Checkpoint
    provenance: dict[str, JSON]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCorpus:
    """A registered corpus. `report` counts what reading met."""

    ref: CorpusRef
    provenance: dict[str, JSON]
    report: ReadReport = field(default_factory=ReadReport)

    def texts(self, context: TaskContext) -> Iterator[str]:
        """The usable texts, in their order."""
        return read_texts(self.ref, context.settings.corpus_root, self.report)


def open_model(context: TaskContext, model_id: str) -> SourceModel:
    """Find (or download) the model's folder, check it, and store what it is.

    Raises:
        InputError: no such model, a folder that is none of ours, or files that changed since the first job.
        RetryableError: the hub cannot be reached.
    """
    tenant_id = context.claim.tenant_id
    with context.db.read() as session:
        row = models.get(session, tenant_id=tenant_id, model_id=model_id)
    checkpoint = Checkpoint(resolve_model(_model_ref(row), context.settings.model_root))
    digest = checkpoint.digest()
    if row.digest is not None and row.digest != digest:
        raise InputError(f"expected the files of {model_id} as they were ({row.digest}), got {digest}")
    if row.digest is None:
        with context.db.write() as session:
            models.record_facts(
                session, tenant_id=tenant_id, model_id=model_id, facts=_facts(checkpoint, digest)
            )
    provenance: dict[str, JSON] = {"kind": row.kind, "location": row.location, "digest": digest}
    if row.commit is not None:
        provenance["commit"] = row.commit
    return SourceModel(id=model_id, checkpoint=checkpoint, provenance=provenance)


def open_corpus(context: TaskContext, corpus_id: str) -> SourceCorpus:
    """Find the corpus. Raises InputError when there is none, or its file is gone."""
    with context.db.read() as session:
        row = corpora.get(session, tenant_id=context.claim.tenant_id, corpus_id=corpus_id)
    ref = _corpus_ref(row)
    provenance: dict[str, JSON] = {"kind": row.kind, "location": row.location}
    if isinstance(ref, FileCorpus):
        path = resolve_inside(context.settings.corpus_root, ref.path, what="file")
        provenance["digest"] = digest_of_file(path)
    else:
        provenance["split"] = ref.split
    return SourceCorpus(ref=ref, provenance=provenance)


def versions(*libraries: str) -> dict[str, JSON]:
    """Versions of this software and of libraries that decide bits, for provenance."""
    from importlib.metadata import version

    found: dict[str, JSON] = {name: version(name) for name in sorted(libraries)}
    return {**found, "permille": permille.__version__, "numpy": np.__version__}


def _model_ref(row: Model) -> ModelRef:
    if row.kind == "folder":
        return FolderRef(path=row.location)
    if row.kind == "hub" and row.commit is not None:
        return HubRef(repository=row.location, commit=row.commit)
    raise InputError(f"expected a model of kind folder, or hub with a commit, got {row.kind!r}")


def _corpus_ref(row: Corpus) -> CorpusRef:
    if row.kind == "file":
        return FileCorpus(path=row.location)
    if row.kind == "streamed" and row.location in set(StreamedDataset):
        return StreamedCorpus(dataset=StreamedDataset(row.location), split=row.split or "train")
    raise InputError(f"expected a corpus of kind file or streamed, got {row.kind!r} {row.location!r}")


def _facts(checkpoint: Checkpoint, digest: str) -> ModelFacts:
    return ModelFacts(
        family=checkpoint.family.value,
        config=checkpoint.config,
        size_bytes=checkpoint.size_bytes,
        parameter_count=checkpoint.parameters,
        scoped_parameter_count=sum(
            rows * columns for _, (rows, columns) in scoped_tensors(checkpoint.config)
        ),
        digest=digest,
    )
