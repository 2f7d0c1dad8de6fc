"""Routes of trust metadata. Clients fetch it, and administrators change whose keys sign it.

A device can only read the files of its own tenant, and the manifests of the release that it follows. A file
with a version in its name never changes.
"""

import base64
from typing import Annotated, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from fastapi import APIRouter, Depends, Path, Response
from securesystemslib.signer import CryptoSigner, Key, SSlibKey
from sqlalchemy.orm import Session

from permille.digests import digest_of
from permille.errors import InputError
from permille.package.limits import MAX_MANIFEST_BYTES
from permille.schemas.fields import Closed, Digest
from permille.schemas.packages import MANIFEST_MEDIA_TYPE
from permille.schemas.problems import ProblemType
from permille.schemas.trust import (
    FILE_PATTERN,
    METADATA_EXAMPLES,
    TARGET_PATTERN,
    RoleKeys,
    Trust,
    TrustChange,
    TrustDraft,
    TrustRenewal,
    TrustRole,
    TrustRotation,
)
from permille.store import releases
from permille.store.errors import NotFoundError
from permille.trust.metadata import Draft, Holders
from permille.trust.repository import Repository
from permille.trust.roles import ONLINE, TIMESTAMP_FILE, is_target_path, parse_file_name, parse_target_path
from permille_service.access.principals import Admin, Anyone, DevicePrincipal, Viewer
from permille_service.content import CACHE_CONTROL, body_of
from permille_service.context import Served
from permille_service.parameters import raw_body, read_body
from permille_service.problems import PRIVATE, as_conflicts, documented
from permille_service.trust import repositories

JSON: Final = "application/json"

router = APIRouter(prefix="/v1/trust", tags=["trust"], responses=documented(*PRIVATE))

MetadataFile = Annotated[str, Path(alias="file", pattern=FILE_PATTERN, examples=["1.root.json"])]
TargetPath = Annotated[
    str,
    Path(alias="path", pattern=TARGET_PATTERN, examples=["releases/tiny-llama/" + "0" * 64 + ".1.json"]),
]


@router.get("")
def get_trust(service: Served, operator: Viewer) -> Trust:
    """Read the roles: their keys, their thresholds, and when their metadata expires."""
    return present(repositories.read(service, operator.tenant_id))


@router.get(
    "/metadata/{file}",
    response_class=Response,
    responses={200: body_of("TUF metadata, as it was signed", JSON), **documented(ProblemType.NOT_FOUND)},
)
def get_trust_metadata(file: MetadataFile, service: Served, principal: Anyone) -> Response:
    """Read one file of the tenant's TUF repository: `timestamp.json` or `<version>.<role>.json`."""
    data = repositories.read_file(service, principal.tenant_id, file)
    caching = "no-cache" if file == TIMESTAMP_FILE else CACHE_CONTROL
    return Response(data, media_type=JSON, headers={"Cache-Control": caching})


@router.get(
    "/targets/{path:path}",
    response_class=Response,
    responses={
        200: body_of("the manifest of a package: canonical bytes", MANIFEST_MEDIA_TYPE),
        **documented(ProblemType.NOT_FOUND),
    },
)
def get_trust_target(path: TargetPath, service: Served, principal: Anyone) -> Response:
    """Read the target `releases/<name>/<SHA-256>.<version>.json`: the manifest of a version's package."""
    folder, _, file = path.rpartition("/")
    hashed, _, rest = file.partition(".")
    if not is_target_path(f"{folder}/{rest}"):
        raise NotFoundError(f"no target {path!r:.120}")
    name, version = parse_target_path(f"{folder}/{rest}")
    if isinstance(principal, DevicePrincipal) and principal.release != name:
        raise NotFoundError(f"no target {path!r:.120} for this device")
    with service.database.read() as session:
        row = releases.get(session, tenant_id=principal.tenant_id, name=name, version=version)
    if row.yanked_at is not None or row.package_digest != f"sha256:{hashed}":
        raise NotFoundError(f"no target {path!r:.120}")
    data = service.blobs.read(row.package_digest, limit=MAX_MANIFEST_BYTES)
    return Response(data, media_type=MANIFEST_MEDIA_TYPE, headers={"Cache-Control": CACHE_CONTROL})


class _Accepted(Closed):
    """The content of the audit log's entry about received metadata."""

    digest: Digest


@router.put(
    "/metadata/{file}",
    responses=documented(ProblemType.CONFLICT, ProblemType.NOT_FOUND),
    openapi_extra=raw_body({JSON: METADATA_EXAMPLES}, {"type": "object"}),
)
def put_trust_metadata(
    file: MetadataFile, service: Served, operator: Admin, data: Annotated[bytes, Depends(read_body)]
) -> Trust:
    """Store the next metadata of a role, `<version>.<role>.json`. Enough of the role's keys must have signed
    it.

    Versions of releases that the metadata lists for the first time are published. Versions that it no longer
    lists are withdrawn. Keys of the service that no role names any more are deleted.
    """

    def accept(session: Session, repository: Repository) -> Trust:
        before = repository.listed()
        role, version = parse_file_name(file)
        if version != repository.version(role) + 1:
            raise InputError(
                f"The next file of the role {role} must have version {repository.version(role) + 1}, got "
                f"{file}. Renew the metadata and sign it again."
            )
        repository.accept(role, data)
        releases.follow(session, tenant_id=operator.tenant_id, before=before, after=repository.listed())
        return present(repository)

    with as_conflicts():
        return repositories.change_by(service, operator, accept, _Accepted(digest=digest_of(data)))


@router.post("/rotations", responses=documented(ProblemType.CONFLICT))
def rotate_trust_keys(body: TrustRotation, service: Served, operator: Admin) -> TrustChange:
    """Give roles new keys. Devices learn the new keys from the metadata. If some metadata needs signatures of
    keys that the service does not hold, the answer contains drafts of this metadata."""

    def rotate(_: Session, repository: Repository) -> TrustChange:
        keys: list[Ed25519PrivateKey] = []
        holders = {role.role: _holders(repository, role, keys) for role in body.roles}
        if len(holders) != len(body.roles):
            raise InputError("A role is named twice. Name each role once.")
        drafts = repository.rotate(holders)
        for key in keys:
            service.trust_keys.keep(operator.tenant_id, key)
        return _changed(repository, drafts)

    with as_conflicts():
        return repositories.change_by(service, operator, rotate, body)


@router.post("/renewals", responses=documented(ProblemType.CONFLICT))
def renew_trust_metadata(body: TrustRenewal, service: Served, operator: Admin) -> TrustChange:
    """Renew the metadata of the named roles, and all metadata that is due. If some metadata needs signatures
    of keys that the service does not hold, the answer contains drafts of this metadata."""
    with as_conflicts():
        return repositories.change_by(
            service,
            operator,
            lambda _, repository: _changed(repository, repository.renew(body.roles)),
            body,
        )


def present(repository: Repository) -> Trust:
    """Return the record of a repository as operators see it."""
    return Trust(
        root_digest=repository.root_digest,
        roles=[
            TrustRole(
                role=state.role,
                version=state.version,
                expires_at=state.expires_at,
                threshold=state.threshold,
                key_ids=list(state.key_ids),
                signed_here=state.signed_here,
            )
            for state in repository.states()
        ],
    )


def _changed(repository: Repository, drafts: list[Draft]) -> TrustChange:
    made = [TrustDraft(role=draft.role, metadata=draft.data.decode()) for draft in drafts]
    return TrustChange(trust=present(repository), drafts=made)


def _holders(repository: Repository, role: RoleKeys, made: list[Ed25519PrivateKey]) -> Holders:
    """Return the new holders of a role. If the service makes the key itself, append it to `made`."""
    if not role.public_keys:
        made.append(Ed25519PrivateKey.generate())
        signer = CryptoSigner(made[-1])
        repository.signers[signer.public_key.keyid] = signer
        return Holders(keys=(signer.public_key,), threshold=role.threshold)
    if role.role in ONLINE:
        raise InputError(
            f"The role {role.role} takes no public keys, because the service signs it with its own keys."
        )
    keys = tuple(_public_key(text) for text in role.public_keys)
    return Holders(keys=keys, threshold=role.threshold)


def _public_key(text: str) -> Key:
    raw = base64.urlsafe_b64decode(text + "=")
    return SSlibKey.from_crypto(Ed25519PublicKey.from_public_bytes(raw))
