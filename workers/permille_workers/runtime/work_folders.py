"""Scratch folders by job id, below the work root: kept between attempts, removed once the job has ended."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from permille.store.database import Database
from permille.store.jobs import queue


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


def remove_ended(db: Database, work_root: Path) -> list[str]:
    """Remove the folders of jobs that are unknown or have ended; return their ids."""
    root = _jobs_root(work_root)
    found = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    if not found:
        return []
    with db.read() as session:
        ended = [job_id for job_id in found if not queue.may_go_on(session, job_id=job_id)]
    for job_id in ended:
        shutil.rmtree(root / job_id, ignore_errors=True)
    return ended


def _jobs_root(work_root: Path) -> Path:
    return work_root / "jobs"
