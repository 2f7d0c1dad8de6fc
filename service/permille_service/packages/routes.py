"""Routes of packages: operators make and list them, devices fetch what their release gives them."""

from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response
from sqlalchemy.orm import Session

from permille.errors import PackageError
from permille.package.limits import MEDIA_TYPES
from permille.package.manifest import Manifest
from permille.schemas.fields import Page
from permille.schemas.jobs import Job, JobKind
from permille.schemas.packages import (
    MANIFEST_MEDIA_TYPE,
    PackageCreate,
    PackageLayer,
    PackageRecord,
)
from permille.schemas.problems import ProblemType
from permille.store import results, tables
from permille_service.access.principals import Anyone, DevicePrincipal, Operator, Viewer
from permille_service.context import Served, Service
from permille_service.jobs.submission import Submitting
from permille_service.openapi_examples import PACKAGE_EXAMPLES
from permille_service.packages.content import CACHE_CONTROL, blob_response, not_modified
from permille_service.paging import DEFAULT_LIMIT, Cursor, Limit, page_of, store_cursor
from permille_service.parameters import BlobDigest, PackageDigest
from permille_service.problems import PRIVATE, ApiError, documented

router = APIRouter(
    prefix="/v1/packages", tags=["packages"], responses=documented(*PRIVATE, ProblemType.NOT_FOUND)
)

_BINARY: dict[str, Any] = {
    media_type: {"schema": {"type": "string", "format": "binary"}} for media_type in MEDIA_TYPES.values()
}
_BLOB_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "the blob", "content": _BINARY},
    206: {"description": "the range that was asked for", "content": _BINARY},
    304: {"description": "the content is the one that the client has"},
    **documented(ProblemType.PRECONDITION_FAILED, ProblemType.RANGE_NOT_SATISFIABLE),
}
_HEAD_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "the size is in `Content-Length`"},
    304: {"description": "the content is the one that the client has"},
    **documented(ProblemType.PRECONDITION_FAILED),
}
_MANIFEST_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "canonical bytes", "content": {MANIFEST_MEDIA_TYPE: {"schema": {"type": "object"}}}},
    304: {"description": "the content is the one that the client has"},
}


@router.post(
    "",
    status_code=202,
    responses=documented(ProblemType.CONFLICT, ProblemType.IDEMPOTENCY_CONFLICT),
)
def create_package(
    body: Annotated[PackageCreate, Body(openapi_examples=PACKAGE_EXAMPLES)],
    submission: Submitting,
) -> Job:
    """Start packing a mask and a quantization of the same model."""
    return submission.start(JobKind.PACKAGE, body.model_dump(mode="json"), _check_parts, body)


@router.get("")
def list_packages(
    service: Served, operator: Viewer, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = None
) -> Page[PackageRecord]:
    """List packages, newest first."""
    with service.database.read() as session:
        page = results.list_packages(
            session, tenant_id=operator.tenant_id, limit=limit, cursor=store_cursor(cursor)
        )
    return page_of(page, present)


@router.get("/{digest}")
def get_package(digest: PackageDigest, service: Served, operator: Viewer) -> PackageRecord:
    """Read what is known of one package."""
    with service.database.read() as session:
        return present(results.get_package(session, tenant_id=operator.tenant_id, digest=digest))


@router.get("/{digest}/manifest", response_class=Response, responses=_MANIFEST_RESPONSES)
def get_package_manifest(
    digest: PackageDigest, request: Request, service: Served, principal: Anyone
) -> Response:
    """The manifest: canonical bytes, whose SHA-256 is the package's digest."""
    with service.database.read() as session:
        manifest = _readable(session, principal, digest).manifest
    headers = {"ETag": f'"{digest}"', "Cache-Control": CACHE_CONTROL}
    if not_modified(request, f'"{digest}"'):
        return Response(status_code=304, headers=headers)
    return Response(manifest, media_type=MANIFEST_MEDIA_TYPE, headers=headers)


@router.get("/{digest}/blobs/{blob_digest}", response_class=Response, responses=_BLOB_RESPONSES)
def get_package_blob(
    digest: PackageDigest, blob_digest: BlobDigest, request: Request, service: Served, principal: Anyone
) -> Response:
    """One layer of a package, whole or in part (`Range`, `If-Range`)."""
    return _blob(digest, blob_digest, request, service, principal)


@router.head("/{digest}/blobs/{blob_digest}", response_class=Response, responses=_HEAD_RESPONSES)
def head_package_blob(
    digest: PackageDigest, blob_digest: BlobDigest, request: Request, service: Served, principal: Anyone
) -> Response:
    """The size and ETag of one layer."""
    return _blob(digest, blob_digest, request, service, principal)


def present(row: tables.PackageRow) -> PackageRecord:
    """The record of a row; its layers are read from the manifest."""
    manifest = Manifest.from_bytes(row.manifest)
    return PackageRecord(
        digest=row.digest,
        model_id=row.model_id,
        mask_id=row.mask_id,
        quantization_id=row.quantization_id,
        job_id=row.job_id,
        k=row.k,
        size_bytes=row.size_bytes,
        layers=[
            PackageLayer(
                role=layer.role,
                media_type=layer.media_type,
                digest=layer.digest,
                size_bytes=layer.size_bytes,
                path=layer.path,
            )
            for layer in manifest.layers
        ],
        created_at=row.created_at,
    )


def _readable(session: Session, principal: Operator | DevicePrincipal, digest: str) -> tables.PackageRow:
    """The package, if it exists for this principal. Raises NotFoundError."""
    if isinstance(principal, DevicePrincipal):
        return results.get_package_for_device(
            session, tenant_id=principal.tenant_id, release=principal.release, digest=digest
        )
    return results.get_package(session, tenant_id=principal.tenant_id, digest=digest)


def _blob(
    digest: str, blob_digest: str, request: Request, service: Service, principal: Operator | DevicePrincipal
) -> Response:
    with service.database.read() as session:
        package = _readable(session, principal, digest)
        blob = results.get_package_blob(session, package=package, blob_digest=blob_digest)
        media_type = blob.media_type
    try:
        service.blobs.size(blob_digest)
    except PackageError as exc:
        raise ApiError(ProblemType.UNAVAILABLE, f"the blob {blob_digest} is not in the blob store") from exc
    return blob_response(request, service.blobs.path(blob_digest), blob_digest, media_type)


def _check_parts(service: Service, tenant_id: str, body: PackageCreate) -> None:
    with service.database.read() as session:
        mask = results.get_mask(session, tenant_id=tenant_id, mask_id=body.mask_id)
        quantization = results.get_quantization(
            session, tenant_id=tenant_id, quantization_id=body.quantization_id
        )
    if body.fisher_exponents and mask.scores_digest is None:
        raise ApiError(ProblemType.CONFLICT, f"expected a mask with scores, got {mask.id}, which has none")
    if mask.model_id != quantization.model_id:
        raise ApiError(
            ProblemType.CONFLICT,
            f"expected parts of one model, got {mask.model_id} and {quantization.model_id}",
        )
