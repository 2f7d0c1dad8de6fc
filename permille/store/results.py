"""What jobs make: masks, quantizations, packages, and which blobs a package gives access to.

Rows are added by a worker in the transaction that completes its job; their blobs are in the blob store before
that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from permille.store.database import now
from permille.store.errors import NotFoundError
from permille.store.ids import Prefix, new_id
from permille.store.paging import Page, fetch_page
from permille.store.tables import Mask, PackageBlob, PackageRow, QuantizationRow, Release


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRecord:
    """One layer of a package."""

    role: str
    media_type: str
    digest: str
    size_bytes: int


def get_mask(session: Session, *, tenant_id: str, mask_id: str) -> Mask:
    """Read one mask. Raises NotFoundError."""
    mask = session.scalar(select(Mask).where(Mask.tenant_id == tenant_id, Mask.id == mask_id))
    if mask is None:
        raise NotFoundError(f"no mask {mask_id!r}")
    return mask


def list_masks(
    session: Session,
    *,
    tenant_id: str,
    model_id: str | None = None,
    limit: int = 50,
    cursor: str | None = None,
) -> Page[Mask]:
    """List masks, newest first."""
    query = select(Mask).where(Mask.tenant_id == tenant_id)
    if model_id is not None:
        query = query.where(Mask.model_id == model_id)
    return fetch_page(session, query, Mask.id, limit=limit, cursor=cursor)


def add_mask(
    session: Session,
    *,
    tenant_id: str,
    job_id: str,
    model_id: str,
    corpus_id: str | None,
    options: dict[str, Any],
    k: int,
    layer: dict[str, Any],
    provenance: dict[str, Any],
    scores_digest: str | None,
    report_digest: str,
    picture_digest: str,
) -> Mask:
    """Add the result of a mask job."""
    mask = Mask(
        id=new_id(Prefix.MASK),
        tenant_id=tenant_id,
        job_id=job_id,
        model_id=model_id,
        corpus_id=corpus_id,
        options=options,
        k=k,
        layer=layer,
        provenance=provenance,
        mask_digest=layer["digest"],
        scores_digest=scores_digest,
        report_digest=report_digest,
        picture_digest=picture_digest,
        size_bytes=layer["size_bytes"],
        created_at=now(session),
    )
    session.add(mask)
    session.flush()
    return mask


def get_quantization(session: Session, *, tenant_id: str, quantization_id: str) -> QuantizationRow:
    """Read one quantization. Raises NotFoundError."""
    query = select(QuantizationRow).where(
        QuantizationRow.tenant_id == tenant_id, QuantizationRow.id == quantization_id
    )
    row = session.scalar(query)
    if row is None:
        raise NotFoundError(f"no quantization {quantization_id!r}")
    return row


def list_quantizations(
    session: Session,
    *,
    tenant_id: str,
    model_id: str | None = None,
    limit: int = 50,
    cursor: str | None = None,
) -> Page[QuantizationRow]:
    """List quantizations, newest first."""
    query = select(QuantizationRow).where(QuantizationRow.tenant_id == tenant_id)
    if model_id is not None:
        query = query.where(QuantizationRow.model_id == model_id)
    return fetch_page(session, query, QuantizationRow.id, limit=limit, cursor=cursor)


def add_quantization(
    session: Session,
    *,
    tenant_id: str,
    job_id: str,
    model_id: str,
    evaluation_corpus_id: str | None,
    options: dict[str, Any],
    dense_layer: dict[str, Any],
    plain_layer: dict[str, Any],
    provenance: dict[str, Any],
    report_digest: str,
    picture_digest: str,
) -> QuantizationRow:
    """Add the result of a quantization job."""
    row = QuantizationRow(
        id=new_id(Prefix.QUANTIZATION),
        tenant_id=tenant_id,
        job_id=job_id,
        model_id=model_id,
        evaluation_corpus_id=evaluation_corpus_id,
        options=options,
        dense_layer=dense_layer,
        plain_layer=plain_layer,
        provenance=provenance,
        dense_digest=dense_layer["digest"],
        plain_digest=plain_layer["digest"],
        report_digest=report_digest,
        picture_digest=picture_digest,
        size_bytes=dense_layer["size_bytes"] + plain_layer["size_bytes"],
        created_at=now(session),
    )
    session.add(row)
    session.flush()
    return row


def add_package(
    session: Session,
    *,
    tenant_id: str,
    job_id: str | None,
    model_id: str | None,
    mask_id: str | None,
    quantization_id: str | None,
    digest: str,
    manifest: bytes,
    k: int,
    layers: Sequence[LayerRecord],
) -> PackageRow:
    """Add a package and its blobs; return the row that is there when the same package was made before."""
    earlier = _by_digest(session, tenant_id, digest)
    if earlier is not None:
        return earlier
    unique = {layer.digest: layer for layer in layers}
    package = PackageRow(
        id=new_id(Prefix.PACKAGE),
        tenant_id=tenant_id,
        job_id=job_id,
        model_id=model_id,
        mask_id=mask_id,
        quantization_id=quantization_id,
        digest=digest,
        manifest=manifest,
        k=k,
        size_bytes=sum(layer.size_bytes for layer in unique.values()),
        created_at=now(session),
    )
    session.add(package)
    session.flush()
    for layer in unique.values():
        session.add(
            PackageBlob(
                package_id=package.id,
                tenant_id=tenant_id,
                digest=layer.digest,
                role=layer.role,
                media_type=layer.media_type,
                size_bytes=layer.size_bytes,
            )
        )
    session.flush()
    return package


def get_package(session: Session, *, tenant_id: str, digest: str) -> PackageRow:
    """Read one package by its manifest's digest. Raises NotFoundError."""
    package = _by_digest(session, tenant_id, digest)
    if package is None:
        raise NotFoundError(f"no package {digest!r}")
    return package


def get_package_by_id(session: Session, *, tenant_id: str, package_id: str) -> PackageRow:
    """Read one package by its row's id. Raises NotFoundError."""
    query = select(PackageRow).where(PackageRow.tenant_id == tenant_id, PackageRow.id == package_id)
    package = session.scalar(query)
    if package is None:
        raise NotFoundError(f"no package {package_id!r}")
    return package


def list_packages(
    session: Session, *, tenant_id: str, limit: int = 50, cursor: str | None = None
) -> Page[PackageRow]:
    """List packages, newest first."""
    query = select(PackageRow).where(PackageRow.tenant_id == tenant_id)
    return fetch_page(session, query, PackageRow.id, limit=limit, cursor=cursor)


def get_package_for_device(
    session: Session, *, tenant_id: str, release: str, digest: str, include_yanked: bool = False
) -> PackageRow:
    """Read a package that a device following `release` may read: one that was published under that name.

    Raises:
        NotFoundError: no such package, another release's, or only yanked versions of it.
    """
    published = select(Release.id).where(
        Release.tenant_id == tenant_id, Release.name == release, Release.package_digest == digest
    )
    if not include_yanked:
        published = published.where(Release.yanked_at.is_(None))
    if session.scalar(published.limit(1)) is None:
        raise NotFoundError(f"no package {digest!r}")
    return get_package(session, tenant_id=tenant_id, digest=digest)


def get_package_blob(session: Session, *, package: PackageRow, blob_digest: str) -> PackageBlob:
    """Read what is known of one blob of a package that the caller may read. Raises NotFoundError."""
    blob = session.get(PackageBlob, (package.id, blob_digest))
    if blob is None:
        raise NotFoundError(f"no blob {blob_digest!r} in this package")
    return blob


def list_package_blobs(session: Session, *, package: PackageRow) -> Sequence[PackageBlob]:
    """All blobs of a package, by role."""
    query = select(PackageBlob).where(PackageBlob.package_id == package.id)
    return session.scalars(query.order_by(PackageBlob.role, PackageBlob.digest)).all()


def is_referenced(session: Session, *, blob_digest: str) -> bool:
    """Whether a result of any tenant needs this blob: whoever deletes blobs asks this first."""
    columns = (
        PackageRow.digest,
        PackageBlob.digest,
        Mask.mask_digest,
        Mask.scores_digest,
        Mask.report_digest,
        Mask.picture_digest,
        QuantizationRow.dense_digest,
        QuantizationRow.plain_digest,
        QuantizationRow.report_digest,
        QuantizationRow.picture_digest,
    )
    return any(session.scalar(select(column).where(column == blob_digest).limit(1)) for column in columns)


def _by_digest(session: Session, tenant_id: str, digest: str) -> PackageRow | None:
    query = select(PackageRow).where(PackageRow.tenant_id == tenant_id, PackageRow.digest == digest)
    return session.scalar(query)
