"""Artifacts that are put into the store directly, each with the job that would have made it."""

from collections.abc import Mapping

from sqlalchemy import select
from sqlalchemy.orm import Session

from permille.package.manifest import Manifest
from permille.schemas.fields import EXAMPLE_ULID
from permille.schemas.inputs import FolderModel
from permille.schemas.jobs import JobKind
from permille.schemas.packages import MANIFEST_MEDIA_TYPE
from permille.store import artifacts, inputs
from permille.store.artifacts import MANIFEST, Blob, TaskResult
from permille.store.jobs import claims, queue
from permille.store.jobs.transitions import NewJob
from permille.store.settings import Quota
from permille.store.tables import Artifact, Model

QUOTA = Quota(
    runs_a_day=50,
    uploads_a_day=50,
    bytes_a_day=1 << 30,
    outstanding=50,
    runs_kept=50,
    uploads_kept=50,
    bytes_kept=1 << 30,
)
"""A quota that is too large for tests to reach."""
PARTS = {"mask_id": f"mask_{EXAMPLE_ULID}", "quantization_id": f"quant_{EXAMPLE_ULID}"}


def some_model(session: Session, tenant_id: str) -> str:
    """Return the id of the model `tiny`. It is added if it is missing, but it has no files."""
    known = session.scalar(select(Model.id).where(Model.tenant_id == tenant_id, Model.name == "tiny"))
    if known is not None:
        return known
    source = FolderModel(kind="folder", path="tiny")
    return inputs.add_model(session, tenant_id=tenant_id, name="tiny", source=source).id


def add_artifact(
    session: Session, *, tenant_id: str, kind: JobKind, request: Mapping[str, object], made: TaskResult
) -> Artifact:
    """Add the artifact that a job with this request would make."""
    job = queue.submit(session, NewJob(tenant_id=tenant_id, kind=kind, payload=request))
    claim = claims.claim(session, worker="w", lease_s=60, job_id=job.id)
    assert claim is not None
    row = artifacts.add(session, job=claim, made=made)
    claims.complete(session, claim, result_id=artifacts.key_of(row))
    return row


def add_package(session: Session, *, tenant_id: str, manifest: Manifest) -> Artifact:
    """Add a package. Its blobs must be in the blob store."""
    same = ("role", "media_type", "digest", "size_bytes", "path")
    blobs = [Blob(**{name: getattr(layer, name) for name in same}) for layer in manifest.layers]
    size_bytes = len(manifest.to_bytes())
    whole = Blob(role=MANIFEST, media_type=MANIFEST_MEDIA_TYPE, digest=manifest.digest, size_bytes=size_bytes)
    made = TaskResult(
        model_id=some_model(session, tenant_id),
        digest=manifest.digest,
        k=manifest.k,
        provenance={},
        blobs=(whole, *blobs),
    )
    return add_artifact(session, tenant_id=tenant_id, kind=JobKind.PACKAGE, request=PARTS, made=made)
