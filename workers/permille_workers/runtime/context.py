"""The context of a task: its claim, the database, the blobs, a work folder, and reports of progress."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from permille.package.blobs import BlobFolder
from permille.schemas.jobs import JobKind
from permille.store import artifacts
from permille.store.database import Database
from permille.store.jobs import claims
from permille.store.jobs.claims import Claim
from permille.store.jobs.parents import Part
from permille.store.tables import Artifact
from permille.telemetry import Outage
from permille.time_left import TimeLeft
from permille_workers.runtime.settings import WorkerSettings
from permille_workers.runtime.work_folders import shared_store

if TYPE_CHECKING:
    from permille.pipeline.score import Compute

_log = logging.getLogger(__name__)
Clock = Callable[[], float]
REPORT_EVERY_S = 1.0


class JobCancelledError(Exception):
    """The job must end: an operator has cancelled it, or another part of the same job has failed.

    The task must stop and publish nothing.
    """


# A function that writes the rows of the result and returns its id. It runs in the transaction that ends the
# job.
Publish = Callable[[Session], str]


@dataclass(frozen=True, slots=True)
class PartsToAdd:
    """Parts that a task adds to its job instead of returning a result.

    Each part is a job of its own. When all parts have succeeded, the job runs again and reads their results.
    """

    parts: Sequence[Part]


class Progress:
    """Reports of an attempt's progress, with an estimate of the time left.

    There is at most one report in a second, but the start of a new phase is always reported. If the database
    does not answer, the attempt goes on without a report.

    """

    def __init__(self, db: Database, claim: Claim, *, clock: Clock = time.monotonic) -> None:
        self._db = db
        self._claim = claim
        self._clock = clock
        self._left = TimeLeft()
        self._told_at: float | None = None
        self._told_message: str | None = None
        self._outage = Outage(_log, "cannot report progress")

    def __call__(self, fraction: float, message: str) -> None:
        """Report the fraction of the job that is done, and what it does now.

        Raises:
            JobCancelledError: the job was cancelled, or another part of the same job has failed.
            StaleClaimError: another attempt has begun, or the job has ended.
        """
        at = self._clock()
        left_s = self._left.seen(at, fraction)
        recent = self._told_at is not None and at - self._told_at < REPORT_EVERY_S
        # If the first word of the message changes, a new phase has begun. Report this at once.
        if recent and message.split(" ")[0] == (self._told_message or "").split(" ")[0]:
            return
        self._told_at, self._told_message = at, message
        try:
            with self._db.write() as session:
                stop = claims.report_progress(
                    session, self._claim, fraction=fraction, message=message, eta_s=left_s
                )
        except DBAPIError as exc:  # if this lasts as long as the lease, the supervisor ends the attempt
            self._outage.note(exc)
            return
        self._outage.note(None)
        if stop:
            raise JobCancelledError(self._claim.job_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskContext:
    """Everything that the task of one attempt may use."""

    claim: Claim
    db: Database
    blobs: BlobFolder
    settings: WorkerSettings
    work_folder: Path  # belongs to the job and survives attempts; checkpoints are stored here
    progress: Callable[[float, str], None]

    @property
    def compute(self) -> "Compute":
        """The use of torch that the settings name."""
        from permille.pipeline.score import Compute  # imports torch, which a replay does not need

        settings = self.settings
        return Compute(device=settings.device, dtype=settings.dtype, memory_bytes=settings.memory_bytes)

    def artifact(self, kind: JobKind, key: str) -> Artifact:
        """Read a result of an earlier job of the tenant. Raises NotFoundError."""
        with self.db.read() as session:
            return artifacts.get(session, tenant_id=self.claim.tenant_id, kind=kind, key=key)

    def shared(self, job_id: str) -> BlobFolder:
        """Return the store of blobs that a split job shares with its parts.

        The store is removed after the job has ended.
        """
        return shared_store(self.blobs).below(job_id)


Task = Callable[[TaskContext], Publish | PartsToAdd]
