"""Uploads: logs and packed states that devices send, stored apart from all other blobs.

The row of an upload exists before its bytes and outlives them. Each upload has a folder of its own,
which no other upload shares. So a device cannot delete bytes that another device or a job needs,
and it cannot learn which bytes the service has. The sweep erases the files of doomed uploads.

    coming -> held (attached to its run) -> doomed (to be deleted) -> erased (the bytes are gone)
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from sqlalchemy import delete, func, or_, select, update
from sqlalchemy.orm import Session

from permille.errors import PermilleError
from permille.files import fsync_folder
from permille.package.blobs import BlobFolder, BlobWriter
from permille.schemas.jobs import UNFINISHED, JobKind
from permille.store import rows
from permille.store.database import Database, now
from permille.store.errors import ConflictError, QuotaError, QuotaSpentError
from permille.store.ids import Prefix, new_id
from permille.store.settings import Quota
from permille.store.tables import Device, Job, Run, Upload

logger = logging.getLogger(__name__)
DAY = timedelta(days=1)
# An upload is given up if its bytes have not arrived within this time.
ARRIVAL = timedelta(hours=1)
# One sweep erases at most this many uploads, to keep it short. The next sweep erases the rest.
_MOST_SWEPT = 1000


class UploadState(StrEnum):
    """State of an upload."""

    COMING = "coming"
    HELD = "held"
    DOOMED = "doomed"
    ERASED = "erased"


def begin(session: Session, *, tenant_id: str, device_id: str, run_id: str, quota: Quota) -> Upload:
    """Add the row of an upload before its bytes are read.

    Raises:
        QuotaSpentError: the uploads that the service stores for this device have reached their limit.
        QuotaError: the device has sent too much today, or too many of its uploads wait for their
            check.
    """
    # In PostgreSQL, this lock makes concurrent requests of a device wait for each other, so that each request
    # counts the uploads of those before it.
    session.scalar(select(Device.id).where(Device.id == device_id).with_for_update(key_share=True))
    _check_kept(session, device_id, run_id, quota)
    at = now(session)
    today = (Upload.device_id == device_id, Upload.created_at.between(at - DAY, at))
    number, size, oldest = session.execute(
        select(
            func.count(), func.coalesce(func.sum(Upload.size_bytes), 0), func.min(Upload.created_at)
        ).where(*today)
    ).one()
    if number >= quota.uploads_a_day:
        raise _used_up(f"{quota.uploads_a_day} logs or states a day", at, oldest)
    if size >= quota.bytes_a_day:
        raise _used_up(f"{quota.bytes_a_day} bytes of logs and states a day", at, oldest)
    # Checks cost workers' time, so one device may not fill the queue with them.
    if _outstanding(session, device_id, at) >= quota.outstanding:
        raise QuotaError(
            f"{quota.outstanding} logs or states of this device wait for their check. Send this one later.",
            retry_after_s=600,
        )
    return rows.add(
        session,
        Upload(
            id=new_id(Prefix.UPLOAD),
            tenant_id=tenant_id,
            device_id=device_id,
            run_id=run_id,
            state=UploadState.COMING.value,
            size_bytes=0,
            created_at=at,
        ),
    )


def check_runs(session: Session, *, device_id: str, quota: Quota) -> None:
    """Check the quota of reports, after this transaction has added one.

    Raises:
        QuotaSpentError: the service would keep too many reports of the device.
        QuotaError: the device has sent too many reports today.
    """
    kept = kept_of(session, [device_id])[device_id].runs
    # The comparison is strict, because this transaction has already added the report.
    if kept > quota.runs_kept:
        raise QuotaSpentError(
            f"The service keeps {kept} reports of this device; at most {quota.runs_kept} are allowed."
        )
    at = now(session)
    query = select(func.count(), func.min(Run.created_at)).where(
        Run.device_id == device_id, Run.created_at.between(at - DAY, at)
    )
    number, oldest = session.execute(query).one()
    if number > quota.runs_a_day:
        raise _used_up(f"{quota.runs_a_day} runs a day", at, oldest)


def hold(session: Session, *, tenant_id: str, upload_id: str, size_bytes: int) -> None:
    """Mark an upload as complete and attached to its run.

    Raises:
        ConflictError: the bytes came too late, or the run's log was deleted meanwhile.
    """
    row = session.get(Upload, upload_id, with_for_update={"key_share": True})
    if row is None or row.tenant_id != tenant_id or row.state != UploadState.COMING:
        raise _too_late()
    row.state, row.size_bytes = UploadState.HELD.value, size_bytes


def give_up(session: Session, *, upload_id: str, size_bytes: int) -> bool:
    """Give up an upload that is not held. Return whether the caller must erase its bytes."""
    row = session.get(Upload, upload_id, with_for_update={"key_share": True})
    if row is None or row.state == UploadState.HELD:
        return False
    if row.state == UploadState.COMING:
        row.state, row.size_bytes = UploadState.DOOMED.value, size_bytes
    return True


def refuse_coming(session: Session, *, tenant_id: str, run_id: str) -> None:
    """Give up the uploads of a run that are under way, because the run's log was deleted."""
    under_way = (
        Upload.tenant_id == tenant_id,
        Upload.run_id == run_id,
        Upload.state == UploadState.COMING.value,
    )
    session.execute(update(Upload).where(*under_way).values(state=UploadState.DOOMED.value))


def doom(session: Session, *, upload_id: str) -> None:
    """Mark the upload of a run for deletion. The caller or a sweep erases its bytes after the commit."""
    row = session.get(Upload, upload_id, with_for_update={"key_share": True})
    if row is not None and row.state == UploadState.HELD:
        row.state = UploadState.DOOMED.value


def open_folder(blobs: BlobFolder, *, tenant_id: str, upload_id: str) -> BlobFolder:
    """Return the store of one upload, which lies beside the shared blobs."""
    return blobs.below("uploads", tenant_id, upload_id, private=True)


@contextmanager
def writer(folder: BlobFolder) -> Iterator[BlobWriter]:
    """Open a writer for the bytes of an upload.

    Raises:
        ConflictError: the upload was given up and swept meanwhile.
    """
    # Make each folder durable before the file, or a power cut could lose the file with its folder.
    for path in (folder.root.parent.parent, folder.root.parent, folder.root):
        path.mkdir(exist_ok=True)
        fsync_folder(path.parent)
    try:
        with folder.writer() as writing:
            yield writing
    except FileNotFoundError as exc:
        raise _too_late() from exc


def sweep(db: Database, blobs: BlobFolder) -> int:
    """Erase doomed and late uploads, and delete rows that no longer count for a quota. Return the
    number of erased uploads.
    """
    with db.write() as session:
        at = now(session)
        session.execute(
            update(Upload)
            .where(
                Upload.state == UploadState.COMING.value,
                # A time in the future means that the database's clock has gone back.
                or_(Upload.created_at < at - ARRIVAL, Upload.created_at > at + ARRIVAL),
            )
            .values(state=UploadState.DOOMED.value)
        )
        query = select(Upload).where(Upload.state == UploadState.DOOMED.value).limit(_MOST_SWEPT)
        doomed = session.scalars(query).all()
    # Files are erased outside of a transaction. If the process is killed here, the rows stay doomed, and
    # the next sweep erases the files again.
    erased: list[str] = []
    for row in doomed:
        try:
            open_folder(blobs, tenant_id=row.tenant_id, upload_id=row.id).erase()
            erased.append(row.id)
        except (OSError, PermilleError) as exc:  # its row stays doomed, so the next sweep tries again
            logger.error("cannot erase upload %s: %s", row.id, exc)
    with db.write() as session:
        session.execute(update(Upload).where(Upload.id.in_(erased)).values(state=UploadState.ERASED.value))
        session.execute(
            delete(Upload).where(Upload.state == UploadState.ERASED.value, Upload.created_at < at - DAY)
        )
    return len(erased)


@dataclass(slots=True)
class Kept:
    """Amount stored for a device: the number of reports, and the number and bytes of uploads."""

    runs: int = 0
    uploads: int = 0
    bytes: int = 0


def kept_of(session: Session, device_ids: Sequence[str]) -> dict[str, Kept]:
    """Return how much the service stores of each of these devices."""
    found = {device_id: Kept() for device_id in device_ids}
    reports = select(Run.device_id, func.count()).where(
        Run.device_id.in_(device_ids), Run.deleted_at.is_(None)
    )
    for device_id, number in session.execute(reports.group_by(Run.device_id)):
        found[device_id].runs = number
    held = select(Upload.device_id, func.count(), func.sum(Upload.size_bytes)).where(
        Upload.device_id.in_(device_ids), Upload.state == UploadState.HELD.value
    )
    for device_id, number, size in session.execute(held.group_by(Upload.device_id)):
        found[device_id].uploads, found[device_id].bytes = number, int(size)
    return found


def _check_kept(session: Session, device_id: str, run_id: str, quota: Quota) -> None:
    """Check the quota of kept uploads. If the run already has a log, the device may always send it again."""
    here = select(Run.log_upload_id).where(Run.device_id == device_id, Run.run_id == run_id)
    kept = kept_of(session, [device_id])[device_id]
    if (kept.uploads < quota.uploads_kept and kept.bytes < quota.bytes_kept) or session.scalar(here):
        return
    most = f"{quota.uploads_kept} ({quota.bytes_kept} bytes)"
    there = f"{kept.uploads} logs or states of this device ({kept.bytes} bytes)"
    raise QuotaSpentError(f"The service already stores {there}. At most {most} are allowed.")


def _too_late() -> ConflictError:
    return ConflictError(f"The bytes came too late: after {ARRIVAL}, or after a deletion. Send them again.")


def _outstanding(session: Session, device_id: str, at: datetime) -> int:
    coming = select(func.count()).where(
        Upload.device_id == device_id,
        Upload.state == UploadState.COMING.value,
        Upload.created_at > at - ARRIVAL,
    )
    waiting = select(func.count()).where(
        Job.device_id == device_id,
        Job.kind == JobKind.REPLAY.value,
        Job.state.in_(UNFINISHED),
    )
    # An upload is either under way, or has a replay job that has not ended.
    return (session.scalar(coming) or 0) + (session.scalar(waiting) or 0)


def _used_up(allowed: str, at: datetime, oldest: datetime) -> QuotaError:
    # The limit holds for the last 24 hours, so the device may send again when its oldest entry is a day old.
    wait_s = max(1, int((oldest + DAY - at).total_seconds()) + 1)
    return QuotaError(
        f"This device has sent {allowed}, as many as are allowed. Try again later.", retry_after_s=wait_s
    )
