"""Rows of releases and of their aliases. Devices trust the signed metadata (`permille.store.trust`), not
these rows.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final

from sqlalchemy import Row, and_, bindparam, func, select
from sqlalchemy.orm import Session

from permille.errors import InputError
from permille.schemas.fields import MAX_INTEGER
from permille.schemas.jobs import JobKind
from permille.store import artifacts, rows
from permille.store.database import Database, now
from permille.store.errors import ConflictError, require
from permille.store.ids import Prefix, new_id
from permille.store.rows import FIRST, Page, Window, fetch_page
from permille.store.tables import Alias, Artifact, Release
from permille.trust.listed import Listed

Listing = Mapping[tuple[str, int], Listed]
# A new version may exceed the newest one by at most this much, so that no jump uses up the version numbers.
MAX_NEW_VERSIONS: Final = 1000


def publish(session: Session, *, name: str, package: Artifact, version: int | None = None) -> Release:
    """Publish a package as the next version of `name`, or as a given higher version.

    Raises:
        ConflictError: the version is not higher than all others.
        InputError: the version exceeds the newest one by more than `MAX_NEW_VERSIONS`.
    """
    tenant_id = package.tenant_id
    newest = latest_version(session, tenant_id=tenant_id, name=name)
    if version is None:
        version = newest + 1
    if version <= newest:
        raise ConflictError(f"The next version of {name!r} must be above {newest}, got {version}.")
    if version > newest + MAX_NEW_VERSIONS:
        raise InputError(f"The version {version} of {name!r} is too far above {newest}.")
    return rows.add(
        session,
        Release(
            id=new_id(Prefix.RELEASE),
            tenant_id=tenant_id,
            name=name,
            version=version,
            package_id=package.id,
            package_digest=package.digest,
            created_at=now(session),
        ),
    )


def check_not_withdrawn(session: Session, *, tenant_id: str, name: str, digest: str) -> None:
    """Refuse a package if a version with it was yanked. Raises ConflictError."""
    query = select(Release).where(
        Release.tenant_id == tenant_id,
        Release.name == name,
        Release.package_digest == digest,
        Release.yanked_at.is_not(None),
    )
    if (row := session.scalar(query.order_by(Release.version.desc()).limit(1))) is not None:
        raise ConflictError(
            f"Version {row.version} of {name!r} has this package, and was yanked: {row.yanked_reason}. Add "
            "--yanked (in a request: `yanked`) to publish the package nevertheless."
        )


def follow(session: Session, *, tenant_id: str, before: Listing, after: Listing) -> None:
    """Apply a list that was signed elsewhere: publish new versions, yank missing ones, and set
    aliases.

    Raises:
        NotFoundError: a listed package does not exist.
        ConflictError: a new version is not higher than all others of its name, or an alias points at a
            yanked version.
        InputError: a new version exceeds the newest one by more than `MAX_NEW_VERSIONS`.
    """
    # Sort the keys, so that concurrent transactions lock rows in the same order.
    for name, version in sorted(before.keys() - after.keys()):
        yank(session, tenant_id=tenant_id, name=name, version=version, reason="no longer listed")
    for name, version in sorted(after.keys() - before.keys()):
        digest = after[name, version].digest
        package = artifacts.get(session, tenant_id=tenant_id, kind=JobKind.PACKAGE, key=digest)
        publish(session, name=name, package=package, version=version)
    for (name, version), listed in sorted(after.items()):
        known = before.get((name, version))
        for alias in sorted(listed.aliases - (known.aliases if known else frozenset())):
            set_alias(session, tenant_id=tenant_id, name=name, alias=alias, version=version)


def latest_version(session: Session, *, tenant_id: str, name: str) -> int:
    """Return the highest version of `name`, including yanked ones, or 0 if there is none."""
    query = select(func.max(Release.version)).where(
        Release.tenant_id == tenant_id,
        Release.name == name,
        Release.version <= MAX_INTEGER,  # SQLite sorts text after all numbers
    )
    return session.scalar(query) or 0


def get(session: Session, *, tenant_id: str, name: str, version: int) -> Release:
    """Read one release. Raises NotFoundError. Version 0 is that of a name without releases."""
    query = select(Release).where(
        Release.tenant_id == tenant_id, Release.name == name, Release.version == version
    )
    which = f" version {version}" if version else ""
    message = f"There is no release {name!r}{which}. See `permille releases list`."
    return require(session.scalar(query), message)


def list_releases(
    session: Session, *, tenant_id: str, name: str | None = None, window: Window = FIRST
) -> Page[Release]:
    """List releases, newest first."""
    query = select(Release).where(Release.tenant_id == tenant_id)
    if name is not None:
        query = query.where(Release.name == name)
    return fetch_page(session, query, window, Release.id)


def yank(session: Session, *, tenant_id: str, name: str, version: int, reason: str) -> Release:
    """Yank a release, so that devices no longer install it. Idempotent: the first reason stays.

    Raises:
        NotFoundError: there is no such release.
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
        raise ConflictError(f"{name!r} version {version} was yanked. Choose another version.")
    row = session.get(Alias, (tenant_id, name, alias))
    if row is None:
        row = Alias(tenant_id=tenant_id, name=name, alias=alias, version=version, updated_at=now(session))
        session.add(row)
    else:
        row.version, row.updated_at = version, now(session)
    return row


def delete_alias(session: Session, *, tenant_id: str, name: str, alias: str) -> None:
    """Remove an alias. Raises NotFoundError."""
    session.delete(get_alias(session, tenant_id=tenant_id, name=name, alias=alias, lock=True))


def get_alias(session: Session, *, tenant_id: str, name: str, alias: str, lock: bool = False) -> Alias:
    """Read an alias, and lock it on request. Raises NotFoundError."""
    row = session.get(Alias, (tenant_id, name, alias), with_for_update=True if lock else None)
    return require(row, f"There is no alias {alias!r} of release {name!r}.")


def list_aliases(session: Session, *, tenant_id: str, name: str) -> Sequence[Alias]:
    """Return all aliases of a release name."""
    query = select(Alias).where(Alias.tenant_id == tenant_id, Alias.name == name)
    return session.scalars(query.order_by(Alias.alias)).all()


_RESOLVED = (
    select(Release.version, Release.package_digest, Artifact.size_bytes, Release.yanked_at)
    .join(Alias, and_(Alias.tenant_id == Release.tenant_id, Alias.name == Release.name))
    .join(Artifact, Artifact.id == Release.package_id)
    .where(
        Alias.tenant_id == bindparam("tenant_id"),
        Alias.name == bindparam("name"),
        Alias.alias == bindparam("alias"),
        Release.version == Alias.version,
    )
)


def resolve_alias(
    database: Database, *, tenant_id: str, name: str, alias: str
) -> Row[int, str, int, datetime | None]:
    """Return the version, package digest, size and yank time behind an alias. Raises NotFoundError.

    Every device calls this at every poll, so it takes one prepared statement.
    """
    found = database.first(_RESOLVED, tenant_id=tenant_id, name=name, alias=alias)
    return require(found, f"There is no alias {alias!r} of release {name!r}.")
