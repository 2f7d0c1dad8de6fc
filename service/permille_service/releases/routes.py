"""Routes of releases. Operators publish and yank versions, and point aliases at them. Devices read the
version of the alias that they follow."""

from fastapi import APIRouter
from sqlalchemy.orm import Session

from permille.package.limits import MAX_MANIFEST_BYTES
from permille.schemas.fields import Name, Page
from permille.schemas.jobs import JobKind
from permille.schemas.problems import ProblemType
from permille.schemas.releases import (
    Alias,
    AliasPut,
    Comparison,
    Release,
    ReleaseCreate,
    ReleaseRecord,
    ReleaseYank,
    ReleaseYanked,
)
from permille.store import artifacts, devices, releases, rows, tables
from permille.store.fleet.comparison import compare
from permille.trust.repository import Repository
from permille.trust.roles import Training
from permille_service.access.principals import Anyone, DevicePrincipal, Maker, Viewer, note_version
from permille_service.content import check_stored
from permille_service.context import Served, Service
from permille_service.creation import MADE_RESPONSES, Creating
from permille_service.parameters import (
    AliasName,
    OtherVersion,
    Paging,
    ReleaseName,
    VersionNumber,
    page_of,
)
from permille_service.problems import PRIVATE, ApiError, documented
from permille_service.trust import repositories

router = APIRouter(
    prefix="/v1/releases", tags=["releases"], responses=documented(*PRIVATE, ProblemType.NOT_FOUND)
)


@router.post("", status_code=201, responses=MADE_RESPONSES)
def create_release(body: ReleaseCreate, creating: Creating) -> ReleaseRecord:
    """Publish a package as the next version of a release. If the request names an alias, point the alias at
    this version."""
    service, tenant_id = creating.service, creating.operator.tenant_id
    return creating.add(ReleaseRecord, body, lambda session: _publish(service, session, tenant_id, body))


@router.get("")
def list_releases(
    service: Served,
    operator: Viewer,
    window: Paging,
    name: Name | None = None,
) -> Page[ReleaseRecord]:
    """List published versions, newest first."""
    with service.database.read() as session:
        page = releases.list_releases(session, tenant_id=operator.tenant_id, name=name, window=window)
        return page_of(page, lambda row: present_record(session, row))


@router.get("/{name}/versions/{version}")
def get_release(
    name: ReleaseName, version: VersionNumber, service: Served, operator: Viewer
) -> ReleaseRecord:
    """Read one published version."""
    with service.database.read() as session:
        row = releases.get(session, tenant_id=operator.tenant_id, name=name, version=version)
        return present_record(session, row)


@router.get("/{name}/comparison", responses=documented(ProblemType.CONFLICT))
def compare_release(
    name: ReleaseName,
    service: Served,
    operator: Viewer,
    version: OtherVersion = None,
    against: OtherVersion = None,
) -> Comparison:
    """Compare the reports of devices on two versions. By default, the newest version is compared with the
    highest lower version that was not yanked."""
    with service.database.read() as session:
        return compare(session, tenant_id=operator.tenant_id, name=name, version=version, against=against)


@router.post("/{name}/versions/{version}/yank", responses=documented(ProblemType.CONFLICT))
def yank_release(
    name: ReleaseName, version: VersionNumber, body: ReleaseYank, service: Served, operator: Maker
) -> ReleaseYanked:
    """Withdraw a version for good. Devices no longer install it. Devices that have installed it keep it until
    their alias points at another version. To give devices an older package, publish it as a new version."""

    def withdraw(session: Session, repository: Repository) -> ReleaseYanked:
        row = releases.yank(
            session, tenant_id=operator.tenant_id, name=name, version=version, reason=body.reason
        )
        repository.withdraw(name, version)
        told = devices.count_told(session, tenant_id=operator.tenant_id, release=name, version=version)
        return ReleaseYanked(**present_record(session, row).model_dump(), devices=told)

    return repositories.change_by(service, operator, withdraw, body)


@router.get("/{name}/aliases")
def list_aliases(name: ReleaseName, service: Served, operator: Viewer) -> list[Alias]:
    """List the aliases of a release."""
    with service.database.read() as session:
        found = releases.list_aliases(session, tenant_id=operator.tenant_id, name=name)
    return rows.records_of(found, _present_alias)


@router.get("/{name}/aliases/{alias}")
def resolve_alias(name: ReleaseName, alias: AliasName, service: Served, principal: Anyone) -> Release:
    """Read the version that an alias points at now. A device verifies this version and installs it."""
    if isinstance(principal, DevicePrincipal) and (principal.release, principal.alias) != (name, alias):
        raise ApiError(ProblemType.NOT_FOUND, f"no alias {alias!r} of release {name!r} for this device")
    found = releases.resolve_alias(service.database, tenant_id=principal.tenant_id, name=name, alias=alias)
    if isinstance(principal, DevicePrincipal):
        note_version(service, principal, found.version)
    return Release(
        name=name,
        version=found.version,
        manifest_digest=found.package_digest,
        size_bytes=found.size_bytes,
        yanked=found.yanked_at is not None,
    )


@router.put("/{name}/aliases/{alias}", responses=documented(ProblemType.CONFLICT))
def put_alias(name: ReleaseName, alias: AliasName, body: AliasPut, service: Served, operator: Maker) -> Alias:
    """Point an alias at a version that is not yanked."""

    def move(session: Session, repository: Repository) -> Alias:
        row = releases.set_alias(
            session, tenant_id=operator.tenant_id, name=name, alias=alias, version=body.version
        )
        release = releases.get(session, tenant_id=operator.tenant_id, name=name, version=body.version)
        _whole_package(service, session, operator.tenant_id, release.package_digest)
        repository.move_alias(name, alias, body.version)
        return _present_alias(row)

    return repositories.change_by(service, operator, move, body)


@router.delete("/{name}/aliases/{alias}", status_code=204, responses=documented(ProblemType.CONFLICT))
def delete_alias(name: ReleaseName, alias: AliasName, service: Served, operator: Maker) -> None:
    """Remove an alias. Devices that follow it keep the version that they have."""

    def delete(session: Session, repository: Repository) -> None:
        releases.delete_alias(session, tenant_id=operator.tenant_id, name=name, alias=alias)
        repository.move_alias(name, alias, None)

    repositories.change_by(service, operator, delete)


def present(session: Session, row: tables.Release) -> Release:
    """Return the record of a version as devices see it."""
    package = _package(session, row.tenant_id, row.package_digest)
    return Release(
        name=row.name,
        version=row.version,
        manifest_digest=row.package_digest,
        size_bytes=package.size_bytes,
        yanked=row.yanked_at is not None,
    )


def present_record(session: Session, row: tables.Release) -> ReleaseRecord:
    """Return the record of a version as operators see it."""
    aliases = releases.list_aliases(session, tenant_id=row.tenant_id, name=row.name)
    return ReleaseRecord(
        **present(session, row).model_dump(),
        published_at=row.created_at,
        aliases=[alias.alias for alias in aliases if alias.version == row.version],
        yanked_reason=row.yanked_reason,
    )


def _present_alias(row: tables.Alias) -> Alias:
    return Alias(release=row.name, alias=row.alias, version=row.version)


def _package(session: Session, tenant_id: str, digest: str) -> tables.Artifact:
    return artifacts.get(session, tenant_id=tenant_id, kind=JobKind.PACKAGE, key=digest)


def _whole_package(service: Service, session: Session, tenant_id: str, digest: str) -> tables.Artifact:
    """Return a package whose blobs are all stored. Otherwise devices would follow it and never install it."""
    package, blobs = _package(session, tenant_id, digest), service.blobs.hurried()
    for blob in package.blobs:
        check_stored(blobs, blob)
    return package


def _publish(service: Service, session: Session, tenant_id: str, body: ReleaseCreate) -> ReleaseRecord:
    package = _whole_package(service, session, tenant_id, body.package_digest)
    if not body.yanked:
        releases.check_not_withdrawn(session, tenant_id=tenant_id, name=body.name, digest=package.digest)
    row = releases.publish(session, name=body.name, package=package)
    if body.alias is not None:
        releases.set_alias(
            session, tenant_id=tenant_id, name=body.name, alias=body.alias, version=row.version
        )
    manifest = service.blobs.read(package.digest, limit=MAX_MANIFEST_BYTES)
    training = Training(**body.training.model_dump()) if body.training else Training()
    aliases = [body.alias] if body.alias else []
    with repositories.changing(service, session, tenant_id) as repository:
        repository.publish(body.name, row.version, manifest, aliases=aliases, training=training)
    return present_record(session, row)
