"""Folders of jobs. Each is named after the job's id, and is removed after the job has ended.

Each job has a scratch folder below the work root, which stays between attempts. A job that was split into
parts also has a store below the blobs, which it shares with its parts.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

from permille.errors import PermilleError
from permille.package.blobs import BlobFolder
from permille.store.database import Database
from permille.store.ids import Prefix
from permille.store.jobs import queue
from permille.system import lock_file

_KEPT_FOR = timedelta(days=1)


@contextmanager
def locked_work_folder(work_root: Path, job_id: str) -> Iterator[Path]:
    """Lock and return the job's folder. Wait while the process of an earlier attempt holds the lock."""
    folder = _jobs_root(work_root) / job_id
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        lock_file(descriptor)
        yield folder
    finally:
        os.close(descriptor)


def shared_store(blobs: BlobFolder) -> BlobFolder:
    """Return the store for the shared blobs of split jobs, which workers on all machines can read."""
    return blobs.below("parts")


def remove_ended(db: Database, work_root: Path, blobs: BlobFolder) -> list[str]:
    """Remove the folders of jobs that have ended or are unknown, and return the ids of these jobs.

    If a split job has failed, its store stays for a day, so that a retry can use the results of the parts.
    """
    scratch, shared = _jobs_root(work_root), shared_store(blobs)
    found = sorted(path.name for path in scratch.iterdir()) if scratch.is_dir() else []
    ended = _ended(db, found, timedelta(0))
    for job_id in ended:
        shutil.rmtree(scratch / job_id, ignore_errors=True)
    # A person, or a file server, may have put other folders there, such as `.snapshot`.
    stored = [name for name in shared.names() if name.startswith(f"{Prefix.JOB}_")]
    parted = _ended(db, stored, _KEPT_FOR)
    for job_id in parted:
        with suppress(OSError, PermilleError):  # the next call tries again
            shared.below(job_id).erase()
    return ended + parted


def _ended(db: Database, job_ids: list[str], kept_for: timedelta) -> list[str]:
    with db.read() as session:
        return [job for job in job_ids if not queue.may_go_on(session, job_id=job, kept_for=kept_for)]


def _jobs_root(work_root: Path) -> Path:
    return work_root / "jobs"
