"""Releases (signed, named, numbered), their aliases, and the public keys that sign them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from permille.store.database import now
from permille.store.errors import ConflictError, NotFoundError
from permille.store.ids import Prefix, new_id
from permille.store.rows import FIRST, Page, Window, fetch_page
from permille.store.tables import Alias, Artifact, Release, SigningKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """Who signed, and the base64url signature."""

    key_id: str
    signature: str


SignVersion = Callable[[int], Signature]


def publish(
    session: Session,
    *,
    name: str,
    package: Artifact,
    expires_at: datetime,
    sign: SignVersion,
    version: int | None = None,
) -> Release:
    """Publish a package under the next version of `name` (or the one given, which must be higher than all).

    Args:
        expires_at: in whole seconds: it is signed so.
        sign: called with the version, inside the transaction.

    Raises:
        ConflictError: the version does not grow.
        ValueError: expires_at has a fraction of a second.
    """
    if expires_at.microsecond:
        raise ValueError(f"expected expires_at in whole seconds, got {expires_at.isoformat()}")
    tenant_id = package.tenant_id
    newest = latest_version(session, tenant_id=tenant_id, name=name)
    if version is None:
        version = newest + 1
    if version <= newest:
        raise ConflictError(f"expected a version of {name!r} above {newest}, got {version}")
    signature = sign(version)
    release = Release(
        id=new_id(Prefix.RELEASE),
        tenant_id=tenant_id,
        name=name,
        version=version,
        package_id=package.id,
        package_digest=package.digest,
        expires_at=expires_at,
        key_id=signature.key_id,
        signature=signature.signature,
        created_at=now(session),
    )
    session.add(release)
    session.flush()
    return release


def latest_version(session: Session, *, tenant_id: str, name: str) -> int:
    """The highest version ever published under `name`, yanked ones included; 0 when there is none."""
    query = select(func.max(Release.version)).where(Release.tenant_id == tenant_id, Release.name == name)
    return session.scalar(query) or 0


def get(session: Session, *, tenant_id: str, name: str, version: int) -> Release:
    """Read one release. Raises NotFoundError."""
    query = select(Release).where(
        Release.tenant_id == tenant_id, Release.name == name, Release.version == version
    )
    release = session.scalar(query)
    if release is None:
        raise NotFoundError(f"no release {name!r} version {version}")
    return release


def list_releases(
    session: Session, *, tenant_id: str, name: str | None = None, window: Window = FIRST
) -> Page[Release]:
    """List releases, newest first."""
    query = select(Release).where(Release.tenant_id == tenant_id)
    if name is not None:
        query = query.where(Release.name == name)
    return fetch_page(session, query, window, Release.id)


def yank(session: Session, *, tenant_id: str, name: str, version: int, reason: str) -> Release:
    """Withdraw a release: devices no longer install it. Idempotent, the first reason stays.

    Raises NotFoundError.
    """
    release = get(session, tenant_id=tenant_id, name=name, version=version)
    if release.yanked_at is None:
        release.yanked_at, release.yanked_reason = now(session), reason
    return release


def set_alias(session: Session, *, tenant_id: str, name: str, alias: str, version: int) -> Alias:
    """Point an alias at a version.

    Raises:
        NotFoundError: no such release.
        ConflictError: the release is yanked.
    """
    if get(session, tenant_id=tenant_id, name=name, version=version).yanked_at is not None:
        raise ConflictError(f"expected a version that is not yanked, got {name!r} version {version}")
    row = session.get(Alias, (tenant_id, name, alias))
    if row is None:
        row = Alias(tenant_id=tenant_id, name=name, alias=alias, version=version, updated_at=now(session))
        session.add(row)
    else:
        row.version, row.updated_at = version, now(session)
    session.flush()
    return row


def delete_alias(session: Session, *, tenant_id: str, name: str, alias: str) -> None:
    """Remove an alias. Raises NotFoundError."""
    row = session.get(Alias, (tenant_id, name, alias))
    if row is None:
        raise NotFoundError(f"no alias {alias!r} of release {name!r}")
    session.delete(row)


def list_aliases(session: Session, *, tenant_id: str, name: str) -> Sequence[Alias]:
    """All aliases of one release name."""
    query = select(Alias).where(Alias.tenant_id == tenant_id, Alias.name == name)
    return session.scalars(query.order_by(Alias.alias)).all()


def resolve_alias(session: Session, *, tenant_id: str, name: str, alias: str) -> Release:
    """Read the release that an alias points at. Raises NotFoundError."""
    row = session.get(Alias, (tenant_id, name, alias))
    if row is None:
        raise NotFoundError(f"no alias {alias!r} of release {name!r}")
    return get(session, tenant_id=tenant_id, name=name, version=row.version)


def register_signing_key(session: Session, *, tenant_id: str, key_id: str, public_key: str) -> SigningKey:
    """Add a key that devices pin at enrolment; idempotent."""
    key = session.get(SigningKey, (tenant_id, key_id))
    if key is None:
        key = SigningKey(tenant_id=tenant_id, key_id=key_id, public_key=public_key, created_at=now(session))
        session.add(key)
        session.flush()
    return key


def list_signing_keys(session: Session, *, tenant_id: str) -> Sequence[SigningKey]:
    """The keys that devices should trust, the oldest first."""
    query = select(SigningKey).where(SigningKey.tenant_id == tenant_id)
    return session.scalars(query.order_by(SigningKey.created_at, SigningKey.key_id)).all()
