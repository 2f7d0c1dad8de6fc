"""Inputs of jobs: registered base models and corpora.

An input from which a result was made cannot be removed. The sources of an artifact list all inputs
that its request names, in any field.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from permille.schemas.inputs import (
    FileCorpus,
    FolderModel,
    GgufModel,
    HubModel,
    SparsifiedModel,
    StreamedCorpus,
)
from permille.schemas.jobs import UNFINISHED, JobKind
from permille.store import access, rows
from permille.store.database import now
from permille.store.errors import ConflictError
from permille.store.ids import Prefix, new_id
from permille.store.settings import StoreSettings
from permille.store.tables import Artifact, ArtifactSource, Corpus, Job, Model

# The folder of sparse models, below a tenant's model root.
SPARSIFIED: Final = "sparsified"
# The config of a model may have 64 KiB.
MAX_INPUTS: Final = 5000


@dataclass(frozen=True, slots=True, kw_only=True)
class Roots:
    """The folders of a tenant's models and corpora. Requests of other tenants cannot read there."""

    models: Path
    corpora: Path


def roots_of(session: Session, settings: StoreSettings, *, tenant_id: str) -> Roots:
    """Return a tenant's roots. The first tenant has those of the settings; others have folders below
    `tenant_root`.
    """
    first = access.first_tenant(session)
    if first is not None and first.id == tenant_id:
        return Roots(models=settings.model_root, corpora=settings.corpus_root)
    folder = settings.tenant_root / tenant_id
    return Roots(models=folder / "models", corpora=folder / "corpora")


def sparsified_path(digest: str) -> str:
    """Return the path of a sparsification's files below the model root.

    Example:
        >>> sparsified_path("sha256:0123abcd")
        'sparsified/0123abcd'
    """
    return f"{SPARSIFIED}/{digest.removeprefix('sha256:')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts about a model. They are known once its files have been read."""

    family: str
    config: dict[str, object]
    size_bytes: int
    parameter_count: int
    scoped_parameter_count: int
    digest: str | None = None


def add_model(
    session: Session,
    *,
    tenant_id: str,
    name: str,
    source: FolderModel | HubModel | GgufModel | SparsifiedModel,
    facts: ModelFacts | None = None,
) -> Model:
    """Register a base model, or the model of a sparsification.

    Raises:
        ConflictError: the tenant has a model of this name.
    """
    check_name(session, Model, tenant_id, name)
    model = Model(
        id=new_id(Prefix.MODEL),
        tenant_id=tenant_id,
        name=name,
        source=source.model_dump(mode="json"),
        created_at=now(session),
    )
    if facts is not None:
        _apply(model, facts)
    return rows.add(session, model)


def add_corpus(
    session: Session,
    *,
    tenant_id: str,
    name: str,
    source: FileCorpus | StreamedCorpus,
    size_bytes: int | None = None,
) -> Corpus:
    """Register a corpus: a file below the corpus root, or a public dataset.

    Raises:
        ConflictError: the tenant has a corpus of this name.
    """
    check_name(session, Corpus, tenant_id, name)
    return rows.add(
        session,
        Corpus(
            id=new_id(Prefix.CORPUS),
            tenant_id=tenant_id,
            name=name,
            source=source.model_dump(mode="json"),
            size_bytes=size_bytes,
            created_at=now(session),
        ),
    )


def check_name(session: Session, table: type[Model] | type[Corpus], tenant_id: str, name: str) -> None:
    """Check that no other input of the same table has this name, since commands refer to inputs by name.

    Raises:
        ConflictError: the name is taken, or the tenant has too many inputs.
    """
    rows.check_room(session, table, tenant_id=tenant_id, most=MAX_INPUTS)
    query = select(table.id).where(table.tenant_id == tenant_id, table.name == name)
    if (found := session.scalar(query)) is not None:
        raise ConflictError(
            f"There is a {table.noun} {name!r} already: {found}. Choose another name, or remove the "
            f"existing one with `permille {table.__tablename__} remove {name}`."
        )


def corpora_are_older(session: Session, settings: StoreSettings, job: Job) -> bool:
    """Return whether every corpus file of a job was last changed before the job was created.

    Models need no check: the first job pins a model's files, and later jobs refuse other files.
    """
    roots = roots_of(session, settings, tenant_id=job.tenant_id)
    query = select(Corpus).where(Corpus.tenant_id == job.tenant_id)
    for corpus in session.scalars(query.where(Corpus.id.in_(set(ids_in(job.payload))))):
        if corpus.source.get("kind") != "file":
            continue
        try:
            # Not `st_mtime`: a copied or moved file may keep the old time of its content.
            changed_s = (roots.corpora / str(corpus.source["path"])).stat().st_ctime
        except OSError:
            return False
        if changed_s >= job.created_at.timestamp():
            return False
    return True


def ids_in(request: Mapping[str, object]) -> Iterator[str]:
    """Return every id in a request, at any depth.

    Example:
        >>> list(ids_in({"model_id": "model_1", "mask": {"corpus_id": "corpus_2"}}))
        ['model_1', 'corpus_2']
    """
    return (value for name, value in _strings_in(request) if name.endswith("_id"))


def named_by_jobs(session: Session, *, tenant_id: str) -> dict[str, str]:
    """Map every string in the requests of unfinished jobs to the id of a job whose request has it."""
    query = select(Job.id, Job.payload).where(Job.tenant_id == tenant_id, Job.state.in_(UNFINISHED))
    jobs = session.execute(query)
    # Take every string, not only fields `..._id`, since requests name a package by its digest.
    return {value: job_id for job_id, payload in jobs for _, value in _strings_in(payload)}


def _strings_in(request: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield every string in a request with the name of its field, at any depth."""
    for name, value in request.items():
        if isinstance(value, Mapping):
            yield from _strings_in(value)
        elif isinstance(value, str):
            yield name, value


def record_facts(session: Session, *, tenant_id: str, model_id: str, facts: ModelFacts) -> Model:
    """Store the facts that a worker read from a model's files. Raises NotFoundError."""
    model = rows.get(session, Model, tenant_id=tenant_id, row_id=model_id)
    _apply(model, facts)
    return model


def remove(session: Session, table: type[Model] | type[Corpus], *, tenant_id: str, row_id: str) -> None:
    """Remove a model or a corpus that nothing uses.

    Raises:
        NotFoundError: there is no such input.
        ConflictError: a result was made from it, or an unfinished job names it.
    """
    row: Model | Corpus = rows.lock(session, table, tenant_id=tenant_id, row_id=row_id, to_remove=True)
    made = select(Artifact.kind, Artifact.id, Artifact.digest).join(
        ArtifactSource, ArtifactSource.artifact_id == Artifact.id
    )
    used_by = session.execute(made.where(ArtifactSource.source_id == row_id).order_by(Artifact.id.desc()))
    if (first := used_by.first()) is not None:
        kind, artifact_id, digest = first
        name = f"{kind} {digest if kind == JobKind.PACKAGE else artifact_id}"
        raise ConflictError(f"{name} was made from {row_id}. Remove that {kind} first.")
    unfinished = named_by_jobs(session, tenant_id=tenant_id).get(row_id)
    if unfinished is not None:
        raise ConflictError(f"The job {unfinished} needs {row_id}. Wait for it, or cancel it.")
    # The sparsification stays as a record, without its model.
    session.execute(update(Artifact).where(Artifact.made_model_id == row_id).values(made_model_id=None))
    session.delete(row)


def _apply(model: Model, facts: ModelFacts) -> None:
    for field in fields(facts):
        setattr(model, field.name, getattr(facts, field.name))
