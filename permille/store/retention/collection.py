"""Collection of unreferenced blobs, and of unused folders of sparse models, for all tenants.

A job first stores its blobs. The transaction that ends the job then writes rows that refer to them: it
*names* the blobs. So a collection spares blobs that were stored in the last `collection_grace_s` seconds, or
since the oldest running attempt started.

A job may also name an old blob, if the same bytes were stored before. Three rules protect that
blob:

1. Storing bytes makes a blob young, even if it exists already.
2. A collection deletes in short transactions. Each of these excludes all transactions that name blobs,
  and reads the rows and the ages of blobs again before it deletes.
3. A transaction that names blobs calls `hold`. If a blob was deleted meanwhile, the job is tried
  again and stores it again.

On PostgreSQL, rule 2 needs an exclusive lock, which is released when the session breaks. So after its last
look at a blob, a collection runs one more query in the session, and deletes the blob only if the query
succeeds. One gap remains. The operating system may pause the process after this query. If the session breaks
meanwhile and a job names the blob, the process still deletes the blob when it goes on.

A collection writes no rows before it deletes bytes. So a killed collection leaves nothing to repair, and
a collection works on a full disk. Its result is written at the end, for monitoring.

Only the columns in `NAMING` decide whether a blob is needed. Uploads and the shared files of a
split job lie in separate stores, named by their own rows (`permille.store.uploads`,
`permille_workers.runtime.work_folders`). The bytes of rounds and checkpoints are in the database itself.
Releases, aliases and federations refer to packages. The row of a package stays while one of them refers to
the package.
"""

import logging
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from sqlalchemy import select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import InstrumentedAttribute, Session

from permille.digests import is_digest
from permille.errors import RetryableError
from permille.package.blobs import BlobFolder, StoredBlob
from permille.store import inputs
from permille.store.database import Database, now
from permille.store.ids import Prefix
from permille.store.jobs import claims, queue
from permille.store.settings import StoreSettings
from permille.store.tables import ArtifactBlob, BlobCollection, Model, Tenant

_LOCK_ID: Final = 0x7065726E  # PostgreSQL advisory lock; SQLite has one writer at a time
_BATCH: Final = 50
_LONGEST_BATCH_S: Final = 0.5  # a batch ends after this time, since other writers wait for it
_CLOCKS_DIFFER_S: Final = 600.0  # the clocks of blob store and database may differ by up to this
_ROW: Final = 1
_COLLECTED: Final = ".collected-"

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Found:
    """Result of a collection, or of a dry run.

    Attributes:
        stored: the size of each blob of the store, by digest.
        unreferenced: the size of each blob that no row names, including blobs that are too young to delete.
        removed: the size of each deleted blob or folder, by digest or by the folder's name.
    """

    stored: dict[str, int] = field(default_factory=dict)
    unreferenced: dict[str, int] = field(default_factory=dict)
    removed: dict[str, int] = field(default_factory=dict)


def hold(session: Session, blobs: BlobFolder, digests: Sequence[str], *folders: Path) -> None:
    """Keep collections from deleting anything until the end of this transaction, and check that the blobs
    and folders that the transaction is about to name still exist.

    Raises:
        RetryableError: a blob or folder does not exist any more. The next attempt of the job stores it
            again.
        BlobStoreError: the bucket does not answer. The caller may repeat the transaction.
    """
    _lock(session, shared=True)
    stored = blobs.hurried()
    gone = [digest for digest in dict.fromkeys(digests) if not stored.has(digest)]
    gone += [str(folder) for folder in folders if not folder.is_dir()]
    if gone:
        raise RetryableError(
            f"{gone[0]} was deleted before a row referred to it. The next attempt stores it again."
        )


def take_turn(db: Database, every_s: float) -> bool:
    """Return whether the caller should collect now: no collection has begun in the last `every_s` seconds. If
    so, record that a collection begins now.
    """

    def take(session: Session) -> bool:
        row, at = session.get(BlobCollection, _ROW, with_for_update=True), now(session)
        if row is None:
            session.add(BlobCollection(id=_ROW, began_at=at))
        elif at - timedelta(seconds=every_s) < row.began_at <= at:
            # A `began_at` in the future does not count: the database's clock has gone back.
            return False
        else:
            row.began_at = at
        session.flush()
        return True

    return db.transact(take)


def collect(db: Database, blobs: BlobFolder, settings: StoreSettings, *, dry_run: bool = False) -> Found:
    """Delete the blobs and folders that no row names and that are older than the grace period.

    Several collections may run at once. They delete in turns.

    Args:
        dry_run: only return what would be deleted.

    Raises:
        OSError, BlobStoreError, OperatorError: from the blob store. The next collection continues.
    """
    with db.read() as session:
        before_s = _horizon(session, settings.collection_grace_s)
        named = references(session)
    found, old = Found(), []
    for blob in blobs.entries():
        found.stored[blob.digest] = blob.size_bytes
        if blob.digest not in named:
            found.unreferenced[blob.digest] = blob.size_bytes
            if blob.written_at_s < before_s:
                old.append(blob)
    while old:
        found.removed.update(_collect_blobs(db, blobs, old, before_s=before_s, dry_run=dry_run))
    for tenant_id, root in _roots(db, settings).items():
        found.removed.update(_collect_folders(db, tenant_id, root, before_s=before_s, dry_run=dry_run))
    if not dry_run:
        _note(db, found)
    return found


def _collect_blobs(
    db: Database, blobs: BlobFolder, old: list[StoredBlob], *, before_s: float, dry_run: bool
) -> dict[str, int]:
    """Take a batch of blobs off the list, delete those that are still unreferenced and old, and return
    their sizes.
    """
    removed: dict[str, int] = {}
    begun, blobs = time.monotonic(), blobs.hurried()
    with db.write() as session:
        _lock(session, shared=False)
        named = references(session, [blob.digest for blob in old[-_BATCH:]])
        for blob in old[: -_BATCH - 1 : -1]:
            old.pop()
            entry = None if blob.digest in named else blobs.entry(blob.digest)
            if entry is None or entry.written_at_s >= before_s:
                continue
            if not dry_run:
                _check_lock(session)
                try:
                    blobs.delete(blob.digest)
                except OSError as exc:  # perhaps another user owns it; the others must still go
                    _log.warning("cannot delete blob %s: %s", blob.digest, exc)
                    continue
            removed[blob.digest] = blob.size_bytes
            # Each deletion in a bucket is a request, so a batch may take long.
            if time.monotonic() - begun > _LONGEST_BATCH_S:
                break
    return removed


def _roots(db: Database, settings: StoreSettings) -> dict[str, Path]:
    """Return the folders of sparse models, by the id of their tenant."""
    with db.read() as session:
        found = {
            tenant_id: inputs.roots_of(session, settings, tenant_id=tenant_id).models / inputs.SPARSIFIED
            for tenant_id in session.scalars(select(Tenant.id).order_by(Tenant.id))
        }
    return {tenant_id: root for tenant_id, root in found.items() if root.is_dir()}


def _collect_folders(
    db: Database, tenant_id: str, root: Path, *, before_s: float, dry_run: bool
) -> dict[str, int]:
    """Delete sparse models that no row names, and the remains of killed jobs and collections."""
    removed: dict[str, int] = {}
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        with db.write() as session:
            _lock(session, shared=False)
            if not _is_needless(session, tenant_id, folder, before_s):
                continue
            removed[f"{root.name}/{folder.name}"] = _size(folder)
            if dry_run:
                continue
            _check_lock(session)
            # Rename the folder before deleting it, so that a half-deleted model never looks like a whole one.
            gone = folder.with_name(_COLLECTED + folder.name.removeprefix(_COLLECTED))
            with suppress(OSError):
                folder.rename(gone)
        # Delete the folder outside of the transaction. A large folder takes long, and other writers would
        # wait.
        shutil.rmtree(gone, ignore_errors=True)
    return removed


def _is_needless(session: Session, tenant_id: str, folder: Path, before_s: float) -> bool:
    if folder.name.startswith(_COLLECTED):
        return True
    if folder.name.startswith(f".{Prefix.JOB}_"):  # an unfinished folder, named after the job that writes it
        return not queue.may_go_on(session, job_id=folder.name[1:])
    if not is_digest(f"sha256:{folder.name}"):  # a person put it there
        return False
    path = f"{inputs.SPARSIFIED}/{folder.name}"
    for digest, source in session.execute(
        select(Model.digest, Model.source).where(Model.tenant_id == tenant_id)
    ):
        given = f"{source.get('path')}/"
        if given.startswith(f"{path}/") or (digest is not None and inputs.sparsified_path(digest) == path):
            return False
    with suppress(FileNotFoundError):
        return folder.stat().st_mtime < before_s
    return False


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _horizon(session: Session, grace_s: float) -> float:
    """Return the Unix time before which a blob must have been stored to be collected."""
    # A running attempt may already have stored blobs that it names only at its end.
    oldest = claims.oldest_start(session)
    by_age = now(session).timestamp() - grace_s
    return by_age if oldest is None else min(by_age, oldest.timestamp() - _CLOCKS_DIFFER_S)


def _note(db: Database, found: Found) -> None:
    """Write the result of a collection. On a full disk, only log a warning."""
    left = sum(size for digest, size in found.unreferenced.items() if digest not in found.removed)

    def write(session: Session) -> None:
        row = session.get(BlobCollection, _ROW, with_for_update=True)
        if row is None:
            row = BlobCollection(id=_ROW, began_at=now(session))
            session.add(row)
        row.ended_at = now(session)
        row.unreferenced_bytes = left
        session.flush()

    try:
        db.transact(write)
    except DBAPIError as exc:
        _log.warning("cannot note what was collected: %s", exc)


def _lock(session: Session, *, shared: bool) -> None:
    """Take the lock of collections until the end of the transaction, shared or exclusively."""
    if session.get_bind().dialect.name == "postgresql":
        name = "pg_advisory_xact_lock_shared" if shared else "pg_advisory_xact_lock"
        session.execute(text(f"SELECT {name}({_LOCK_ID})"))


def _check_lock(session: Session) -> None:
    """Raise DBAPIError if the session, and so its lock, has ended. On SQLite the lock ends only with
    the process.
    """
    session.execute(select(1))


# The columns that name blobs of the shared store. A manifest is one of the blobs of its package, so it needs
# no other column.
NAMING: Final[tuple[InstrumentedAttribute[Any], ...]] = (ArtifactBlob.digest,)


def references(session: Session, among: Sequence[str] | None = None) -> set[str]:
    """Return the digests of all blobs to which rows refer.

    Args:
        among: look only for these digests.
    """
    found: set[str] = set()
    for column in NAMING:
        query = select(column).distinct()
        found.update(session.scalars(query if among is None else query.where(column.in_(among))))
    return found
