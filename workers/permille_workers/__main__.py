"""`python -m permille_workers`: run a Celery worker if the settings name a broker, or else a local worker.

Settings come from the environment (PERMILLE_DATA_DIR, PERMILLE_DATABASE_URL ...). After SIGTERM, the worker
takes no new jobs. It waits up to `PERMILLE_DRAIN_S` seconds for running jobs, and then puts those that still
run back into the queue. A second SIGTERM ends the wait at once.
"""

import logging
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from permille.errors import OperatorError, RetryableError
from permille.store.blobs.folder import open_blobs
from permille.store.database import Database
from permille.store.migrations.schema import migrate
from permille.store.settings import explain
from permille.telemetry import Outage, configure_logging
from permille_workers.runtime.metrics import serve_metrics
from permille_workers.runtime.settings import WorkerSettings
from permille_workers.runtime.supervisor import CHILD_COMMAND, Shutdown, Supervisor
from permille_workers.runtime.sweeper import Sweeper
from permille_workers.runtime.threads import (
    EXIT_RETRY,
    EXIT_USAGE,
    end_in_time,
    end_on_signals,
    start_thread,
    try_step,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalWorker:
    """A worker that finds jobs in the database, and runs up to `concurrency` of them at a time."""

    db: Database
    settings: WorkerSettings
    shutdown: Shutdown
    name: str
    child_command: Sequence[str] = CHILD_COMMAND

    def run(self) -> None:
        """Run jobs until a shutdown is requested and the last job has ended."""
        blobs = open_blobs(self.settings)
        sweeper = Sweeper(
            name=self.name, db=self.db, blobs=blobs, settings=self.settings, shutdown=self.shutdown
        )
        slots = range(self.settings.concurrency)
        threads = [start_thread(sweeper.run, "sweeper")]
        threads += [start_thread(self._serve, f"slot-{index}") for index in slots]
        for thread in threads:
            thread.join()

    def _serve(self) -> None:
        supervisor = Supervisor(
            db=self.db, settings=self.settings, shutdown=self.shutdown, child_command=self.child_command
        )
        outage = Outage(_log, "the database or the machine has a fault")

        def run_next() -> None:
            if not supervisor.run_next(self.name):
                self.shutdown.asked.wait(self.settings.poll_s)

        while not self.shutdown.asked.is_set():
            # If a step fails after it has claimed a job, the lease of the job expires, so it runs again.
            if not try_step(run_next, outage):
                self.shutdown.asked.wait(self.settings.poll_s)


def run_worker(settings: WorkerSettings, *, child_command: Sequence[str] = CHILD_COMMAND) -> None:
    """Migrate the database if needed, and run jobs until SIGTERM or SIGINT.

    Raises:
        OperatorError, RetryableError: the migration failed.
    """
    url = settings.database_url.get_secret_value()
    migrate(url)
    db = Database(url)
    shutdown = Shutdown()
    start_thread(partial(end_in_time, shutdown), "deadline")
    name = f"{socket.gethostname()}-{os.getpid()}"
    try:
        if settings.broker_url is None:
            end_on_signals(shutdown, settings.drain_s)
            LocalWorker(
                db=db, settings=settings, shutdown=shutdown, name=name, child_command=child_command
            ).run()
        else:
            from permille_workers.runtime.celery_app import run_celery_worker

            run_celery_worker(
                settings.broker_url.get_secret_value(),
                db=db,
                settings=settings,
                shutdown=shutdown,
                name=f"permille@{name}",
                child_command=child_command,
            )
    finally:
        db.close()


def main() -> int:
    """Run jobs until SIGTERM or SIGINT, and return the exit code."""
    try:
        settings = WorkerSettings.model_validate({})
    except ValueError as exc:
        print(f"permille: {explain(exc)}", file=sys.stderr)
        return EXIT_USAGE
    try:
        configure_logging(settings.log_format)
        serve_metrics(settings)
        run_worker(settings)
    except (OperatorError, RetryableError) as exc:
        print(f"permille: {exc}", file=sys.stderr)
        return EXIT_RETRY if isinstance(exc, RetryableError) else EXIT_USAGE
    return 0


if __name__ == "__main__":
    sys.exit(main())
