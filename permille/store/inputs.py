"""Inputs of jobs: registered base models and corpora.

Nothing that a result was made of can be removed: an artifact's sources say what it was made of, whichever
field of its request named it.
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

# Has the files of sparse models, below a tenant's model root.
SPARSIFIED: Final = "sparsified"


@dataclass(frozen=True, slots=True, kw_only=True)
class Roots:
    """The folders below which a tenant's models and corpora lie. No other tenant's path leads there."""

    models: Path
    corpora: Path


def roots_of(session: Session, settings: StoreSettings, *, tenant_id: str) -> Roots:
    """The first tenant's roots are the settings' own; any other tenant has a folder below `tenant_root`."""
    first = access.first_tenant(session)
    if first is not None and first.id == tenant_id:
        return Roots(models=settings.model_root, corpora=settings.corpus_root)
    folder = settings.tenant_root / tenant_id
    return Roots(models=folder / "models", corpora=folder / "corpora")


def sparsified_path(digest: str) -> str:
    """Return the path of a sparsification's files below the model root."""
    return f"{SPARSIFIED}/{digest.removeprefix('sha256:')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts about a model after its files were read."""

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
    """Register a model: a folder below the model root, a hub repository at a commit, or what a job made.

    Raises ConflictError when the tenant has one of this name.
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
    session.add(model)
    session.flush()
    return model


def add_corpus(
    session: Session,
    *,
    tenant_id: str,
    name: str,
    source: FileCorpus | StreamedCorpus,
    size_bytes: int | None = None,
) -> Corpus:
    """Register a corpus: a file below the corpus root, or a streamed data set.

    Raises ConflictError when the tenant has one of this name.
    """
    check_name(session, Corpus, tenant_id, name)
    corpus = Corpus(
        id=new_id(Prefix.CORPUS),
        tenant_id=tenant_id,
        name=name,
        source=source.model_dump(mode="json"),
        size_bytes=size_bytes,
        created_at=now(session),
    )
    session.add(corpus)
    session.flush()
    return corpus


def check_name(session: Session, table: type[Model] | type[Corpus], tenant_id: str, name: str) -> None:
    """Commands know inputs by their names, so that two of one name could not be told apart.

    Raises ConflictError when the tenant has one of this name.
    """
    query = select(table.id).where(table.tenant_id == tenant_id, table.name == name)
    if (found := session.scalar(query)) is not None:
        raise ConflictError(
            f"there is a {table.__name__.lower()} {name!r} already, {found}: take another name"
        )


def corpora_are_older(session: Session, settings: StoreSettings, job: Job) -> bool:
    """Return whether no corpus that a job has read was changed since it was asked for, by the time of its
    inode: that of its content may be an old one where another file was copied or moved over it.

    Models need no look: the first job pins a model's files, and later ones refuse others.
    """
    roots = roots_of(session, settings, tenant_id=job.tenant_id)
    query = select(Corpus).where(Corpus.tenant_id == job.tenant_id)
    for corpus in session.scalars(query.where(Corpus.id.in_(set(ids_in(job.payload))))):
        if corpus.source.get("kind") != "file":
            continue
        try:
            changed_s = (roots.corpora / str(corpus.source["path"])).stat().st_ctime
        except OSError:
            return False
        if changed_s >= job.created_at.timestamp():
            return False
    return True


def ids_in(request: Mapping[str, object]) -> Iterator[str]:
    """Yield every id that a request names, at any depth."""
    for name, value in request.items():
        if isinstance(value, Mapping):
            yield from ids_in(value)
        elif name.endswith("_id") and isinstance(value, str):
            yield value


def named_by_jobs(session: Session, *, tenant_id: str) -> dict[str, str]:
    """Map every string in the requests of jobs that have not ended to the id of such a job."""
    query = select(Job.id, Job.payload).where(Job.tenant_id == tenant_id, Job.state.in_(UNFINISHED))
    jobs = session.execute(query)
    return {value: job_id for job_id, payload in jobs for value in _strings_in(payload)}


def _strings_in(request: Mapping[str, object]) -> Iterator[str]:
    """Yield every string of a request, at any depth."""
    for value in request.values():
        if isinstance(value, Mapping):
            yield from _strings_in(value)
        elif isinstance(value, str):
            yield value


def record_facts(session: Session, *, tenant_id: str, model_id: str, facts: ModelFacts) -> Model:
    """Store what a worker found in a model's files. Raises NotFoundError."""
    model = rows.get(session, Model, tenant_id=tenant_id, row_id=model_id)
    _apply(model, facts)
    return model


def remove(session: Session, table: type[Model] | type[Corpus], *, tenant_id: str, row_id: str) -> None:
    """Remove a model or corpus that nothing was or is made of.

    Raises:
        NotFoundError: there is none of this id.
        ConflictError: something was made of it, or a job that has not ended names it.
    """
    row: Model | Corpus = rows.lock(session, table, tenant_id=tenant_id, row_id=row_id, to_remove=True)
    made = select(Artifact.kind, Artifact.id, Artifact.digest).join(
        ArtifactSource, ArtifactSource.artifact_id == Artifact.id
    )
    used_by = session.execute(made.where(ArtifactSource.source_id == row_id).order_by(Artifact.id.desc()))
    if (first := used_by.first()) is not None:
        kind, artifact_id, digest = first
        name = f"{kind} {digest if kind == JobKind.PACKAGE else artifact_id}"
        raise ConflictError(f"{name} is made of {row_id}. Remove that first.")
    unfinished = named_by_jobs(session, tenant_id=tenant_id).get(row_id)
    if unfinished is not None:
        raise ConflictError(f"The job {unfinished} needs {row_id}. Wait for it, or cancel it.")
    session.execute(update(Artifact).where(Artifact.made_model_id == row_id).values(made_model_id=None))
    session.delete(row)


def _apply(model: Model, facts: ModelFacts) -> None:
    for field in fields(facts):
        setattr(model, field.name, getattr(facts, field.name))
