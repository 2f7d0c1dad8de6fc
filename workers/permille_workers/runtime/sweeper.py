"""What every worker does now and then: leases, builds and rounds, lost messages, old uploads and folders."""

import logging
import time
from dataclasses import dataclass

from sqlalchemy.exc import DBAPIError

from permille.package.blobs import BlobFolder
from permille.store import devices, uploads
from permille.store.database import Database
from permille.store.federations import rounds
from permille.store.jobs import claims
from permille.store.jobs.dispatch import CeleryDispatcher
from permille_workers.runtime.metrics import count_sweep
from permille_workers.runtime.settings import WorkerSettings
from permille_workers.runtime.supervisor import Shutdown
from permille_workers.runtime.work_folders import remove_ended

_ENOUGH_MESSAGES = 100  # each wakes a worker, whichever job it names: more would only fill the broker
_UNFINISHED_BLOB_S = 86_400.0  # what a killed writer left; a living one has written within a day

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweeper:
    """Sweeps until the shutdown. `dispatcher` is None where workers look into the database themselves."""

    db: Database
    blobs: BlobFolder
    settings: WorkerSettings
    shutdown: Shutdown
    dispatcher: CeleryDispatcher | None = None

    def run(self) -> None:
        """Sweep every `sweep_s` seconds; a database that is away is waited for."""
        while not self.shutdown.asked.wait(self.settings.sweep_s):
            try:
                self.sweep()
            except (DBAPIError, OSError) as exc:
                _log.warning("cannot sweep, database or disk is out of reach: %s", exc)

    def sweep(self) -> None:
        """Do everything once."""
        report = claims.sweep(self.db)
        count_sweep(report)
        if report.requeued or report.died or report.cancelled:
            _log.info("swept expired leases: %s", report)
        rounds.sweep(self.db)  # workers are told of the jobs that this adds by what follows
        self._resend()
        with self.db.write() as session:
            devices.purge_expired(session)
        remove_ended(self.db, self.settings.work_root, self.blobs)
        uploads.sweep(self.db, self.blobs)
        self.blobs.sweep(before_s=time.time() - _UNFINISHED_BLOB_S)

    def _resend(self) -> None:
        if self.dispatcher is None or self.dispatcher.waiting() >= _ENOUGH_MESSAGES:
            return
        with self.db.write() as session:
            job_ids = claims.take_undispatched(session, resend_after_s=self.settings.resend_after_s)
        refused = [job_id for job_id in job_ids if not self.dispatcher.send(job_id)]
        if refused:
            with self.db.write() as session:
                claims.mark_undispatched(session, refused)
