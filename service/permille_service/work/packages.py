"""Routes by which devices and operators fetch the manifest and the layers (files) of a package."""

from typing import Any

from fastapi import APIRouter, Request, Response

from permille.package.limits import MEDIA_TYPES
from permille.schemas.jobs import JobKind
from permille.schemas.packages import MANIFEST_MEDIA_TYPE
from permille.schemas.problems import ProblemType
from permille.store import artifacts
from permille.store.tables import ArtifactBlob
from permille_service.access.principals import Anyone, DevicePrincipal, Operator
from permille_service.content import NOT_MODIFIED, blob_response, content_responses
from permille_service.context import Served, Service
from permille_service.parameters import BlobDigest, PackageDigest
from permille_service.problems import PRIVATE, documented

router = APIRouter(
    prefix="/v1/packages", tags=["packages"], responses=documented(*PRIVATE, ProblemType.NOT_FOUND)
)
_HEAD_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "the size is in `Content-Length`"},
    **NOT_MODIFIED,
    **documented(ProblemType.PRECONDITION_FAILED),
}


@router.get(
    "/{digest}/manifest",
    response_class=Response,
    responses=content_responses("canonical bytes", MANIFEST_MEDIA_TYPE),
)
def get_package_manifest(
    digest: PackageDigest, request: Request, service: Served, principal: Anyone
) -> Response:
    """Read the manifest as canonical bytes. The digest of the package is the SHA-256 of these bytes."""
    return blob_response(request, service, _blob(digest, digest, service, principal))


@router.get(
    "/{digest}/blobs/{blob_digest}",
    response_class=Response,
    responses={
        **content_responses("the blob", *dict.fromkeys(MEDIA_TYPES.values())),
        307: {
            "description": "read the bytes at `Location`, which is valid for some minutes and needs no token"
        },
    },
)
def get_package_blob(
    digest: PackageDigest, blob_digest: BlobDigest, request: Request, service: Served, principal: Anyone
) -> Response:
    """Read one layer (a file of a package), in full or in part (`Range`, `If-Range`)."""
    blob = _blob(digest, blob_digest, service, principal)
    return blob_response(request, service, blob, may_redirect=True)


@router.head("/{digest}/blobs/{blob_digest}", response_class=Response, responses=_HEAD_RESPONSES)
def head_package_blob(
    digest: PackageDigest, blob_digest: BlobDigest, request: Request, service: Served, principal: Anyone
) -> Response:
    """Read the size and the ETag of one layer."""
    return blob_response(request, service, _blob(digest, blob_digest, service, principal))


def _blob(
    digest: str, blob_digest: str, service: Service, principal: Operator | DevicePrincipal
) -> ArtifactBlob:
    """Return the row of a package's blob. Raises NotFoundError if this principal may not read it."""
    tenant_id = principal.tenant_id
    with service.database.read() as session:
        if isinstance(principal, DevicePrincipal):
            package = artifacts.package_for_device(
                session, tenant_id=tenant_id, release=principal.release, digest=digest
            )
        else:
            package = artifacts.get(session, tenant_id=tenant_id, kind=JobKind.PACKAGE, key=digest)
    return artifacts.blob_with(package, digest=blob_digest)
