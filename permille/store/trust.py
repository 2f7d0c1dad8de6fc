"""The files of the tenants' TUF repositories.

Every change of a repository makes a new version of the timestamp. A caller names the version from which
its change began. If another change was faster, nothing is stored (ChangedError), and `Database.transact`
repeats the change on the new state.

All roots are kept, because clients walk through them one by one. Only the newest timestamp is kept. Of
each other role, the last 16 versions are kept, for clients in the middle of a refresh.
"""

from datetime import datetime
from typing import Final

from sqlalchemy import CursorResult, bindparam, delete, func, select, tuple_, update
from sqlalchemy.orm import Session

from permille.store.database import NOW, Database, now
from permille.store.errors import ChangedError, require
from permille.store.tables import Rollout, TrustMetadata
from permille.trust.metadata import root_digest
from permille.trust.repository import Repository
from permille.trust.roles import ROOT, TIMESTAMP, TIMESTAMP_FILE, parse_file_name

KEPT_VERSIONS: Final = 16


def newest(session: Session, *, tenant_id: str) -> dict[str, bytes]:
    """Return the newest metadata by role. The result is empty until the tenant has a repository."""
    versions = (
        select(TrustMetadata.role, func.max(TrustMetadata.version))
        .where(TrustMetadata.tenant_id == tenant_id)
        .group_by(TrustMetadata.role)
    )
    query = select(TrustMetadata).where(
        TrustMetadata.tenant_id == tenant_id,
        tuple_(TrustMetadata.role, TrustMetadata.version).in_(versions),
    )
    return {row.role: row.data for row in session.scalars(query)}


_UNSIGNED = (
    select(Rollout.id)
    .where(Rollout.tenant_id == bindparam("tenant_id"), Rollout.signed_revision < Rollout.revision)
    .exists()
)
_FILE = select(TrustMetadata.data, NOW, _UNSIGNED).where(
    TrustMetadata.tenant_id == bindparam("tenant_id"), TrustMetadata.file == bindparam("file")
)


def read_file(database: Database, *, tenant_id: str, file: str) -> tuple[bytes, datetime, bool]:
    """Return a file of a tenant's repository, the current time, and whether a rollout waits for its
    signature.

    Every device calls this at every poll, so it takes one prepared statement. Raises NotFoundError.
    """
    found = database.first(_FILE, tenant_id=tenant_id, file=file)
    data, at, is_unsigned = require(found, f"There is no metadata {file!r:.120}.")
    return data, at, is_unsigned


def newest_root(session: Session, *, tenant_id: str) -> bytes:
    """Return the newest root. Raises NotFoundError if the tenant has no repository yet."""
    return require(newest(session, tenant_id=tenant_id).get(ROOT), "This tenant has no trust metadata yet.")


def root_by_digest(session: Session, *, tenant_id: str, digest: str) -> bytes | None:
    """Return the root that an invitation names by its `root_digest`, or None."""
    query = select(TrustMetadata.data).where(TrustMetadata.tenant_id == tenant_id, TrustMetadata.role == ROOT)
    roots = session.scalars(query.order_by(TrustMetadata.version.desc()))
    # An invitation may be older than the newest root, so all roots are searched.
    return next((data for data in roots if root_digest(data) == digest), None)


def keep(session: Session, *, tenant_id: str, repository: Repository, seen: int) -> None:
    """Store the files that a change of a repository made.

    Args:
        seen: the version of the timestamp from which the change began; 0 for a new repository.

    Raises:
        ChangedError: another change was stored meanwhile.
    """
    if not repository.changed:
        return
    made = dict(repository.changed)
    # The timestamp is replaced by compare-and-set. All other files get new names, so they are added.
    timestamp = made.pop(TIMESTAMP_FILE)
    version = repository.version(TIMESTAMP)
    if seen:
        _replace_timestamp(session, tenant_id, timestamp, version=version, seen=seen)
    else:
        made[TIMESTAMP_FILE] = timestamp
    for file, data in made.items():
        role, number = parse_file_name(file)
        row = TrustMetadata(tenant_id=tenant_id, file=file, role=role, version=number or version, data=data)
        row.created_at = now(session)
        session.add(row)
        # All roots are kept, because clients walk through them. Of the timestamp, there is only one version.
        if role not in (ROOT, TIMESTAMP):
            _prune(session, tenant_id, role, before=number - KEPT_VERSIONS)
    session.flush()


def _replace_timestamp(session: Session, tenant_id: str, data: bytes, *, version: int, seen: int) -> None:
    statement = (
        update(TrustMetadata)
        .where(
            TrustMetadata.tenant_id == tenant_id,
            TrustMetadata.file == TIMESTAMP_FILE,
            TrustMetadata.version == seen,
        )
        .values(data=data, version=version, created_at=now(session))
    )
    done = session.execute(statement)
    if not isinstance(done, CursorResult) or done.rowcount != 1:
        raise ChangedError(f"Another change was stored since timestamp {seen} was read.")


def _prune(session: Session, tenant_id: str, role: str, *, before: int) -> None:
    session.execute(
        delete(TrustMetadata).where(
            TrustMetadata.tenant_id == tenant_id, TrustMetadata.role == role, TrustMetadata.version <= before
        )
    )
