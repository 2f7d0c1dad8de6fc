"""Collection of what no row refers to: blobs, and the folders of sparse models. For all tenants at once.

Whatever is stored young stays (`collection_grace_s`), and whatever was stored since the oldest running
attempt began: a job stores its blobs first and names them in the transaction that ends it.

A job may name a blob that is old, because the same bytes were there before it. Three things keep it. Storing
bytes makes them young, also where they are there. A collection deletes in short transactions that exclude
every transaction that names blobs, and reads rows and age anew in each. And whoever names blobs calls `hold`
in that transaction, which finds one that was deleted since: then the job is tried again and stores it again.
So there is no moment at which a row names a blob that a collection still deletes.

PostgreSQL drops that exclusion with a session, unasked: it was restarted, or the collector's machine stood
still. So the session is asked after the last look at a blob, and answers or nothing is deleted. What is left
open is the deletion itself: a collector that stands still between that answer and the folder's unlink, or a
bucket that lets a request lie (20 s, asked twice), while the session ends and a job names that same old blob.

Nothing is written before bytes are deleted, so a killed collection leaves nothing to mend, and one on a full
disk deletes. What it found is written at its end, for whoever watches.

Only `NAMING` decides whether a blob is needed. Uploads and what a split job shares lie in stores of their
own, named by the rows that own them (`permille.store.uploads`, `permille_workers.runtime.work_folders`);
rounds and checkpoints are in the database. Releases, aliases and federations name packages, whose rows stay
while they do.
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
_LONGEST_BATCH_S: Final = 0.5  # others wait as long for their turn to write
_CLOCKS_DIFFER_S: Final = 600.0  # the blob store's and the database's
_ROW: Final = 1
_COLLECTED: Final = ".collected-"

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Found:
    """Result of a collection: the blobs that it found, and those that it deleted or would delete.

    Attributes:
        stored: bytes of each blob of the store, by digest.
        unreferenced: of these, those that no row names, too young ones included.
        removed: bytes of what was deleted, or would be: by digest, or by a folder's name below its root.
    """

    stored: dict[str, int] = field(default_factory=dict)
    unreferenced: dict[str, int] = field(default_factory=dict)
    removed: dict[str, int] = field(default_factory=dict)


def hold(session: Session, blobs: BlobFolder, digests: Sequence[str], *folders: Path) -> None:
    """Keep collections away until this transaction, which is about to name blobs, has ended.

    Raises:
        RetryableError: one is not there any more; the attempt that follows stores it again.
        BlobStoreError: the bucket does not answer for now; this transaction may be tried again.
    """
    _lock(session, shared=True)
    stored = blobs.hurried()
    gone = [digest for digest in dict.fromkeys(digests) if not stored.has(digest)]
    gone += [str(folder) for folder in folders if not folder.is_dir()]
    if gone:
        raise RetryableError(
            f"{gone[0]} was collected before a row named it. The next attempt stores it again."
        )


def take_turn(db: Database, every_s: float) -> bool:
    """Return whether the caller should collect, since nobody else began within `every_s`."""

    def take(session: Session) -> bool:
        row, at = session.get(BlobCollection, _ROW, with_for_update=True), now(session)
        if row is None:
            session.add(BlobCollection(id=_ROW, began_at=at))
        elif at - timedelta(seconds=every_s) < row.began_at <= at:  # a later one is of a clock that went back
            return False
        else:
            row.began_at = at
        session.flush()
        return True

    return db.transact(take)


def collect(db: Database, blobs: BlobFolder, settings: StoreSettings, *, dry_run: bool = False) -> Found:
    """Delete what no row names and was stored before the grace; with `dry_run` only say what that is.

    Several may collect at once, they delete in turns.

    Raises:
        OSError, BlobStoreError, OperatorError: as the blob store does; the next collection goes on.
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
    for root in _roots(db, settings):
        found.removed.update(_collect_folders(db, root, before_s=before_s, dry_run=dry_run))
    if not dry_run:
        _note(db, found)
    return found


def _collect_blobs(
    db: Database, blobs: BlobFolder, old: list[StoredBlob], *, before_s: float, dry_run: bool
) -> dict[str, int]:
    """Take some blobs off a list and delete those that are still unreferenced and old; return their bytes."""
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
            removed[blob.digest] = blob.size_bytes
            if not dry_run:
                _check_lock(session)
                blobs.delete(blob.digest)
            if time.monotonic() - begun > _LONGEST_BATCH_S:
                break
    return removed


@dataclass(frozen=True, slots=True)
class _ModelRoot:
    """Folder of a tenant's sparse models."""

    tenant_id: str
    folder: Path


def _roots(db: Database, settings: StoreSettings) -> list[_ModelRoot]:
    with db.read() as session:
        found = []
        for tenant_id in session.scalars(select(Tenant.id).order_by(Tenant.id)):
            roots = inputs.roots_of(session, settings, tenant_id=tenant_id)
            found.append(_ModelRoot(tenant_id, roots.models / inputs.SPARSIFIED))
    return [root for root in found if root.folder.is_dir()]


def _collect_folders(db: Database, root: _ModelRoot, *, before_s: float, dry_run: bool) -> dict[str, int]:
    """Delete sparse models that no row names, and what killed jobs and collections left beside them."""
    removed: dict[str, int] = {}
    for folder in sorted(path for path in root.folder.iterdir() if path.is_dir()):
        with db.write() as session:
            _lock(session, shared=False)
            if not _is_needless(session, root, folder, before_s):
                continue
            removed[f"{root.folder.name}/{folder.name}"] = _size(folder)
            if dry_run:
                continue
            _check_lock(session)
            # Under another name first: half a model must not look like a whole one.
            gone = folder.with_name(_COLLECTED + folder.name.removeprefix(_COLLECTED))
            with suppress(OSError):
                folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
    return removed


def _is_needless(session: Session, root: _ModelRoot, folder: Path, before_s: float) -> bool:
    if folder.name.startswith(_COLLECTED):
        return True
    if folder.name.startswith(f".{Prefix.JOB}_"):  # a job's own, on its way to its place
        return not queue.may_go_on(session, job_id=folder.name[1:])
    if not is_digest(f"sha256:{folder.name}"):  # no job has made it
        return False
    path = f"{inputs.SPARSIFIED}/{folder.name}"
    for digest, source in session.execute(
        select(Model.digest, Model.source).where(Model.tenant_id == root.tenant_id)
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
    """The Unix time before which something must have been stored to be collected."""
    oldest = claims.oldest_start(session)
    by_age = now(session).timestamp() - grace_s
    return by_age if oldest is None else min(by_age, oldest.timestamp() - _CLOCKS_DIFFER_S)


def _note(db: Database, found: Found) -> None:
    """Write what was found, where that can be written."""
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
    """Wait for collections, or alone for everyone, until the transaction's end."""
    if session.get_bind().dialect.name == "postgresql":
        name = "pg_advisory_xact_lock_shared" if shared else "pg_advisory_xact_lock"
        session.execute(text(f"SELECT {name}({_LOCK_ID})"))


def _check_lock(session: Session) -> None:
    """Raise DBAPIError where the session, and its lock, has ended. On SQLite the lock ends with us alone."""
    session.execute(select(1))


# The columns whose digests are blobs of the shared store. A manifest is a blob of its package, too.
NAMING: Final[tuple[InstrumentedAttribute[Any], ...]] = (ArtifactBlob.digest,)


def references(session: Session, among: Sequence[str] | None = None) -> set[str]:
    """Digests of all blobs that rows refer to; of those in `among` alone where it is given."""
    found: set[str] = set()
    for column in NAMING:
        query = select(column).distinct()
        found.update(session.scalars(query if among is None else query.where(column.in_(among))))
    return found
