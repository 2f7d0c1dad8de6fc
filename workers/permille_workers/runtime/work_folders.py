"""Folders by job id: scratch below the work root, kept between attempts; and below the blob root what a split
job and its parts share. Both are removed once the job has ended."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from permille.store.database import Database
from permille.store.jobs import queue

_KEPT_FOR = timedelta(days=1)


@contextmanager
def locked_work_folder(work_root: Path, job_id: str) -> Iterator[Path]:
    """The job's folder, for this process alone: an earlier attempt that still dies is waited for."""
    folder = _jobs_root(work_root) / job_id
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(descriptor)


def shared_root(blob_root: Path) -> Path:
    """Has the shared folders; every worker reaches it, on whichever machine."""
    return blob_root / "parts"


def remove_ended(db: Database, work_root: Path, blob_root: Path) -> list[str]:
    """Remove the folders of jobs that are unknown or have ended; return their ids.

    What parts have made stays for a day where the job failed: a retry does not do it again.
    """
    kept = {_jobs_root(work_root): timedelta(0), shared_root(blob_root): _KEPT_FOR}
    removed = []
    for root, kept_for in kept.items():
        found = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
        with db.read() as session:
            ended = [job for job in found if not queue.may_go_on(session, job_id=job, kept_for=kept_for)]
        for job_id in ended:
            shutil.rmtree(root / job_id, ignore_errors=True)
        removed += ended
    return removed


def _jobs_root(work_root: Path) -> Path:
    return work_root / "jobs"
