"""Scratch folders by job id, below the work root: kept between attempts, removed once the job has ended.

What an evaluation has measured is small and took long: where one fails, dies or is cancelled, its folder
stays for a week, so that a retry goes on.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from permille.store import jobs
from permille.store.database import Database
from permille.store.tables import JobKind

KEPT = frozenset({JobKind.EVALUATION.value})
KEPT_FOR = timedelta(days=7)


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
    """Remove the folders of jobs that are unknown or have ended for good; return their ids."""
    root = _jobs_root(work_root)
    found = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    if not found:
        return []
    with db.read() as session:
        ended = [
            job_id
            for job_id in found
            if not jobs.may_go_on(session, job_id=job_id, kept=KEPT, kept_for=KEPT_FOR)
        ]
    for job_id in ended:
        shutil.rmtree(root / job_id, ignore_errors=True)
    return ended


def _jobs_root(work_root: Path) -> Path:
    return work_root / "jobs"
