"""The local worker: looks into the database for queued jobs. No broker."""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy.exc import DBAPIError

from permille.errors import OperatorError
from permille.store.blobs.folder import open_blobs
from permille.store.database import Database
from permille.store.jobs import claims
from permille.store.migrations.schema import check_newest
from permille.telemetry import Outage
from permille_workers.runtime.settings import WorkerSettings
from permille_workers.runtime.supervisor import CHILD_COMMAND, Shutdown, Supervisor
from permille_workers.runtime.sweeper import Sweeper

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalWorker:
    """Runs up to `concurrency` jobs at a time until the shutdown."""

    db: Database
    settings: WorkerSettings
    shutdown: Shutdown
    name: str
    child_command: Sequence[str] = CHILD_COMMAND

    def run(self) -> None:
        """Work until the shutdown is asked for and the running jobs have ended or were given back."""
        blobs = open_blobs(self.settings)
        sweeper = Sweeper(
            name=self.name, db=self.db, blobs=blobs, settings=self.settings, shutdown=self.shutdown
        )
        threads = [threading.Thread(target=sweeper.run, name="sweeper")]
        threads += [
            threading.Thread(target=self._serve, name=f"slot-{index}")
            for index in range(self.settings.concurrency)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _serve(self) -> None:
        supervisor = Supervisor(
            db=self.db, settings=self.settings, shutdown=self.shutdown, child_command=self.child_command
        )
        outage = Outage(_log, "database or machine cannot serve, will try again")
        while not self.shutdown.asked.is_set():
            try:
                with self.db.write() as session:
                    check_newest(session)
                    claim = claims.claim(session, worker=self.name, lease_s=self.settings.lease_s)
                if claim is None:
                    outage.note(None)
                    self.shutdown.asked.wait(self.settings.poll_s)
                    continue
                supervisor.run(claim)
                outage.note(None)
            except (DBAPIError, OSError, OperatorError) as exc:  # the lease takes care of the job
                outage.note(exc)
                self.shutdown.asked.wait(self.settings.poll_s)
