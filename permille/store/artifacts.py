"""Artifacts of jobs: sparse models, masks, quantizations and packages, with blobs and inputs.

A worker adds an artifact in the transaction that completes its job; the blobs are in the blob store before
that.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Select, delete, exists, select
from sqlalchemy.orm import Session, aliased

from permille.digests import JSON
from permille.schemas.jobs import UNFINISHED, JobKind
from permille.schemas.kinds import MAKES_PACKAGES
from permille.store import inputs
from permille.store.database import now
from permille.store.errors import ConflictError, NotFoundError
from permille.store.ids import Prefix, new_id
from permille.store.jobs.claims import Claim
from permille.store.rows import FIRST, Page, Window, fetch_page
from permille.store.tables import Artifact, ArtifactBlob, ArtifactSource, Federation, Job, Release

# Roles of blobs that are no layers of a package; a layer's role is the package's own word for it.
MANIFEST, REPORT = "manifest", "report"
_PREFIXES = {
    JobKind.SPARSIFICATION: Prefix.SPARSIFICATION,
    JobKind.MASK: Prefix.MASK,
    JobKind.QUANTIZATION: Prefix.QUANTIZATION,
    JobKind.PACKAGE: Prefix.PACKAGE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """A blob of an artifact. `path` is set for a file of a package."""

    role: str
    media_type: str
    digest: str
    size_bytes: int
    path: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """Result of a task.

    Attributes:
        model_id: the model that it is made of.
        digest: of the files of a sparse model, the layer of a mask, the dense layer of a quantization, the
            manifest of a package.
        k: weights that a mask selects; None of a quantization.
        provenance: where it comes from, without clocks and row ids.
    """

    model_id: str
    digest: str
    provenance: Mapping[str, JSON]
    blobs: tuple[Blob, ...]
    k: int | None = None


def add(session: Session, *, job: Claim, made: Made) -> Artifact:
    """Add what a job has made; of a package that was made before, return the row that is there."""
    kind = JobKind.PACKAGE if job.kind in MAKES_PACKAGES else JobKind(job.kind)
    if kind is JobKind.PACKAGE:
        earlier = _package(session, job.tenant_id, made.digest)
        if earlier is not None:
            return earlier
    sizes = {blob.digest: blob.size_bytes for blob in made.blobs if blob.role != REPORT}
    artifact = Artifact(
        id=new_id(_PREFIXES[kind]),
        tenant_id=job.tenant_id,
        kind=kind.value,
        job_id=job.job_id,
        model_id=made.model_id,
        request=dict(job.payload),
        digest=made.digest,
        k=made.k,
        size_bytes=sum(sizes.values()),
        provenance=dict(made.provenance),
        created_at=now(session),
        blobs=[
            ArtifactBlob(
                position=position,
                tenant_id=job.tenant_id,
                role=blob.role,
                media_type=blob.media_type,
                digest=blob.digest,
                size_bytes=blob.size_bytes,
                path=blob.path,
            )
            for position, blob in enumerate(made.blobs)
        ],
    )
    session.add(artifact)
    session.flush()
    for source_id in sorted({made.model_id, *inputs.ids_in(job.payload)}):
        session.add(ArtifactSource(artifact_id=artifact.id, source_id=source_id, tenant_id=job.tenant_id))
    session.flush()
    return artifact


def get(session: Session, *, tenant_id: str, kind: JobKind, key: str) -> Artifact:
    """Read a mask or quantization by its id, a package by its digest. Raises NotFoundError."""
    if kind is JobKind.PACKAGE:
        found = _package(session, tenant_id, key)
    else:
        found = session.scalar(
            select(Artifact).where(
                Artifact.tenant_id == tenant_id, Artifact.kind == kind.value, Artifact.id == key
            )
        )
    if found is None:
        raise NotFoundError(f"There is no {kind} {key!r}.")
    return found


def remove(
    session: Session, *, tenant_id: str, kind: JobKind, key: str, named: Mapping[str, str] | None = None
) -> None:
    """Forget an artifact that nothing names. Its blobs, which others may have too, stay.

    Args:
        named: what `inputs.named_by_jobs` found in this transaction, for who removes many.

    Raises:
        NotFoundError: there is none.
        ConflictError: the model that it made is registered, an artifact was made of it, a release or a
            federation names it, or a job or build that has not ended.
    """
    row = get(session, tenant_id=tenant_id, kind=kind, key=key)
    # Nobody publishes it meanwhile; and a job that ends meanwhile is seen, or what it has made.
    if session.scalar(select(Artifact.id).where(Artifact.id == row.id).with_for_update()) is None:
        raise NotFoundError(f"There is no {kind} {key!r}.")  # removed while this waited
    unfinished = (inputs.named_by_jobs(session, tenant_id=tenant_id) if named is None else named).get(key)
    part = aliased(Job)
    made_it = select(part.id).where(part.parent_id == Job.id, part.result_id == key).exists()
    builds = select(Job.id).where(Job.tenant_id == tenant_id, Job.state.in_(UNFINISHED))
    build = session.scalar(builds.where(made_it).limit(1))
    release = select(Release.name, Release.version).where(Release.package_id == row.id).limit(1)
    published = session.execute(release).first()
    made = select(Artifact).join(ArtifactSource, ArtifactSource.artifact_id == Artifact.id)
    made_of_it = session.scalar(made.where(ArtifactSource.source_id == row.id).limit(1))
    federation = select(Federation.name).where(
        Federation.tenant_id == tenant_id, Federation.package_digest == row.digest
    )
    named_by = session.scalar(federation.limit(1)) if kind is JobKind.PACKAGE else None
    users = (
        row.made_model_id,
        made_of_it and f"{made_of_it.kind} {key_of(made_of_it)}",
        published and f"release {published[0]} version {published[1]}",
        named_by and f"federation {named_by}",
        unfinished,
        build,
    )
    user = next((user for user in users if user), None)
    if user is not None:
        raise ConflictError(f"The {kind} {key} is needed by {user}. Remove that first.")
    for table in (ArtifactBlob, ArtifactSource):
        session.execute(delete(table).where(table.artifact_id == row.id))
    session.expunge(row)
    session.execute(delete(Artifact).where(Artifact.id == row.id))


def has_result(session: Session, job: Job) -> bool:
    """Return whether what a job has made is still here, of a sparsification its model too; False also of
    kinds that make no artifact. Nobody removes it before this transaction ends: a build that takes it is
    there then, and names it."""
    kind = JobKind.PACKAGE if job.kind in MAKES_PACKAGES else JobKind(job.kind)
    if kind not in _PREFIXES or job.result_id is None:
        return False
    try:
        made = get(session, tenant_id=job.tenant_id, kind=kind, key=job.result_id)
    except NotFoundError:
        return False
    if session.scalar(select(Artifact.id).where(Artifact.id == made.id).with_for_update(read=True)) is None:
        return False  # removed while this waited
    return kind is not JobKind.SPARSIFICATION or made.made_model_id is not None


def key_of(artifact: Artifact) -> str:
    """Return the id by which `get` finds it, which is also its job's result."""
    return artifact.digest if artifact.kind == JobKind.PACKAGE else artifact.id


def list_artifacts(
    session: Session,
    *,
    tenant_id: str,
    kind: JobKind,
    model_id: str | None = None,
    window: Window = FIRST,
) -> Page[Artifact]:
    """List artifacts of a kind, newest first; those of one model, if it is named."""
    query = select(Artifact).where(Artifact.tenant_id == tenant_id, Artifact.kind == kind.value)
    if model_id is not None:
        query = query.where(Artifact.model_id == model_id)
    return fetch_page(session, query, window, Artifact.id)


def package_for_device(session: Session, *, tenant_id: str, release: str, digest: str) -> Artifact:
    """Read a package that a device following `release` may read: one that was published under that name.

    Raises:
        NotFoundError: no such package, another release's, or only yanked versions of it.
    """
    published = exists().where(
        Release.package_id == Artifact.id,
        Release.tenant_id == Artifact.tenant_id,
        Release.name == release,
        Release.yanked_at.is_(None),
    )
    found = session.scalar(_packages(tenant_id, digest).where(published))
    if found is None:
        raise NotFoundError(f"There is no package {digest!r}. See `permille packages list`.")
    return found


def blob_with(artifact: Artifact, *, digest: str) -> ArtifactBlob:
    """Return a blob of an artifact that the caller may read. Raises NotFoundError."""
    for blob in artifact.blobs:
        if blob.digest == digest:
            return blob
    raise NotFoundError(f"no blob {digest!r} in this {artifact.kind}")


def blob_of(artifact: Artifact, role: str) -> ArtifactBlob | None:
    """Return the first blob with this role, if there is one."""
    return next((blob for blob in artifact.blobs if blob.role == role), None)


def _package(session: Session, tenant_id: str, digest: str) -> Artifact | None:
    return session.scalar(_packages(tenant_id, digest))


def _packages(tenant_id: str, digest: str) -> Select[Artifact]:
    return select(Artifact).where(
        Artifact.tenant_id == tenant_id,
        Artifact.kind == JobKind.PACKAGE.value,
        Artifact.digest == digest,
    )
