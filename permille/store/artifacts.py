"""Artifacts: the results of jobs, with their blobs and inputs.

Artifacts are sparse models, masks, quantizations and packages. A worker stores the blobs first. It
then adds the artifact in the transaction that completes its job.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Select, delete, exists, select
from sqlalchemy.orm import Session, aliased

from permille.digests import JSON
from permille.schemas.jobs import UNFINISHED, JobKind
from permille.schemas.kinds import MAKES_PACKAGES
from permille.store import inputs, rows
from permille.store.database import now
from permille.store.errors import ConflictError, NotFoundError, require
from permille.store.ids import Prefix, new_id
from permille.store.jobs.claims import Claim
from permille.store.rows import FIRST, Page, Window, fetch_page
from permille.store.tables import Artifact, ArtifactBlob, ArtifactSource, Federation, Job, Release

# Roles of blobs that are not layers of a package. The role of a layer is its role in the manifest.
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
class TaskResult:
    """Result of a task.

    Attributes:
        model_id: the model from which it was made.
        digest: the digest of a sparse model's files, a mask's layer, a quantization's dense layer, or
            a package's manifest.
        provenance: how it was made, without times and row ids, so that equal inputs give equal
            bytes.
        k: the number of trained numbers of a mask or a package; None for other results.
    """

    model_id: str
    digest: str
    provenance: Mapping[str, JSON]
    blobs: tuple[Blob, ...]
    k: int | None = None


def add(session: Session, *, job: Claim, made: TaskResult) -> Artifact:
    """Add the result of a job. If the same package exists already, return the existing row."""
    kind = JobKind.PACKAGE if job.kind in MAKES_PACKAGES else JobKind(job.kind)
    if kind is JobKind.PACKAGE:
        earlier = session.scalar(_packages(job.tenant_id, made.digest))
        if earlier is not None:
            return earlier
    # Count each digest once, since a package may contain the same blob under two names.
    sizes = {blob.digest: blob.size_bytes for blob in made.blobs if blob.role != REPORT}
    artifact = rows.add(
        session,
        Artifact(
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
        ),
    )
    # Sort the set, so that the rows are inserted in a fixed order.
    for source_id in sorted({made.model_id, *inputs.ids_in(job.payload)}):
        session.add(ArtifactSource(artifact_id=artifact.id, source_id=source_id, tenant_id=job.tenant_id))
    return artifact


def get(session: Session, *, tenant_id: str, kind: JobKind, key: str) -> Artifact:
    """Read an artifact by its id, or a package by its digest. Raises NotFoundError."""
    query = select(Artifact).where(Artifact.tenant_id == tenant_id, Artifact.kind == kind.value)
    found = session.scalar(
        _packages(tenant_id, key) if kind is JobKind.PACKAGE else query.where(Artifact.id == key)
    )
    return require(found, f"There is no {kind} {key!r}.")


def remove(
    session: Session, *, tenant_id: str, kind: JobKind, key: str, named: Mapping[str, str] | None = None
) -> None:
    """Remove an artifact to which nothing refers. Its blobs stay until a collection, since other artifacts
    may share them.

    Args:
        named: the result of `inputs.named_by_jobs` in this transaction, for callers that remove
            many artifacts.

    Raises:
        NotFoundError: there is no such artifact.
        ConflictError: something needs it: a registered sparse model, another artifact, a release, a
            federation, or an unfinished job or build.
    """
    row = get(session, tenant_id=tenant_id, kind=kind, key=key)
    # While the row is locked, nobody can publish the artifact. A job that ends meanwhile is still found by
    # the queries below, either as an unfinished job or through its result.
    locked = session.scalar(select(Artifact.id).where(Artifact.id == row.id).with_for_update())
    # Another transaction may have removed the row before this one locked it.
    require(locked, f"There is no {kind} {key!r}.")
    # The key may occur in any field of an unfinished job's request.
    unfinished = (inputs.named_by_jobs(session, tenant_id=tenant_id) if named is None else named).get(key)
    part = aliased(Job)
    # A build's request does not name the results of its parts, so look for them in the rows of the parts.
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
    # The rows of both tables refer to the artifact, so delete them first.
    for table in (ArtifactBlob, ArtifactSource):
        session.execute(delete(table).where(table.artifact_id == row.id))
    # The row is deleted by a statement, so the session must forget the object first.
    session.expunge(row)
    session.execute(delete(Artifact).where(Artifact.id == row.id))


def has_result(session: Session, job: Job) -> bool:
    """Return whether the artifact of a job still exists, so that a build may reuse it.

    A sparsification also needs its model. The artifact is locked until the end of this transaction,
    so nobody removes it before the build is stored and refers to it. Return False for a kind of job
    that makes no artifact.
    """
    kind = JobKind.PACKAGE if job.kind in MAKES_PACKAGES else JobKind(job.kind)
    if kind not in _PREFIXES or job.result_id is None:
        return False
    try:
        made = get(session, tenant_id=job.tenant_id, kind=kind, key=job.result_id)
    except NotFoundError:
        return False
    if session.scalar(select(Artifact.id).where(Artifact.id == made.id).with_for_update(read=True)) is None:
        return False  # another transaction removed it meanwhile
    return kind is not JobKind.SPARSIFICATION or made.made_model_id is not None


def key_of(artifact: Artifact) -> str:
    """Return the key by which `get` finds an artifact. It is also the result id of its job."""
    return artifact.digest if artifact.kind == JobKind.PACKAGE else artifact.id


def list_artifacts(
    session: Session,
    *,
    tenant_id: str,
    kind: JobKind,
    model_id: str | None = None,
    window: Window = FIRST,
) -> Page[Artifact]:
    """List artifacts of a kind, newest first, optionally of one model."""
    query = select(Artifact).where(Artifact.tenant_id == tenant_id, Artifact.kind == kind.value)
    if model_id is not None:
        query = query.where(Artifact.model_id == model_id)
    return fetch_page(session, query, window, Artifact.id)


def package_for_device(session: Session, *, tenant_id: str, release: str, digest: str) -> Artifact:
    """Read a package for a device that follows `release`.

    Raises:
        NotFoundError: there is no such package, no version of the release has it, or all these versions are
            yanked.
    """
    published = exists().where(
        Release.package_id == Artifact.id,
        Release.tenant_id == Artifact.tenant_id,
        Release.name == release,
        Release.yanked_at.is_(None),
    )
    found = session.scalar(_packages(tenant_id, digest).where(published))
    return require(found, f"There is no package {digest!r}. See `permille packages list`.")


def blob_with(artifact: Artifact, *, digest: str) -> ArtifactBlob:
    """Return the blob of an artifact with this digest. Raises NotFoundError."""
    found = next((blob for blob in artifact.blobs if blob.digest == digest), None)
    return require(found, f"There is no blob {digest!r} in this {artifact.kind}.")


def blob_of(artifact: Artifact, role: str) -> ArtifactBlob | None:
    """Return the first blob with this role, or None."""
    return next((blob for blob in artifact.blobs if blob.role == role), None)


def _packages(tenant_id: str, digest: str) -> Select[Artifact]:
    return select(Artifact).where(
        Artifact.tenant_id == tenant_id,
        Artifact.kind == JobKind.PACKAGE.value,
        Artifact.digest == digest,
    )
