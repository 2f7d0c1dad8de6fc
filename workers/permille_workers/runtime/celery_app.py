"""The Celery worker, which gets messages about jobs from a broker.

A message only says that a job exists, and is acknowledged on arrival. The rows of the database decide which
job runs next. This may be another job than the message names, because claims take turns between tenants and
devices. Jobs run in child processes. Celery's own pool therefore has threads, one for each running job.

A worker that gets no message for a while looks for jobs in the database itself. The broker may be down, or
Celery's consumer may hang: if the broker goes down during an acknowledgement, the consumer waits for ever on
a closed connection.
"""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from celery import signals

from permille.errors import RetryableError
from permille.store.blobs.folder import open_blobs
from permille.store.database import Database
from permille.store.jobs.dispatch import QUEUE, TASK_NAME, CeleryDispatcher, celery_app
from permille.telemetry import Outage
from permille_workers.runtime import broker
from permille_workers.runtime.settings import RESEND_AFTER_S, WorkerSettings
from permille_workers.runtime.supervisor import CHILD_COMMAND, Shutdown, Supervisor
from permille_workers.runtime.sweeper import Sweeper
from permille_workers.runtime.threads import end_on_signals, start_thread, try_step

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Slots:
    """Slots for running jobs. Their number is the setting `concurrency`."""

    supervisor: Supervisor
    name: str
    _free: threading.Semaphore = field(init=False)
    _message_at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._free = threading.Semaphore(self.supervisor.settings.concurrency)

    def on_message(self, job_id: str) -> None:
        """Run the next job if there is one. It need not be the job of the message."""
        self._message_at = time.monotonic()
        with self._free:
            if not self.supervisor.run_next(self.name):
                _log.info("a message announced %s, but no job is due", job_id)

    def watch_queue(self) -> None:
        """Look for jobs in the database whenever no message has come for a while, until the shutdown."""
        shutdown, silence_s = self.supervisor.shutdown, RESEND_AFTER_S
        outage = Outage(_log, "the database or the machine has a fault")
        while not shutdown.asked.wait(silence_s):
            if time.monotonic() - self._message_at < silence_s or not self._free.acquire(blocking=False):
                continue
            try_step(self._run_due, outage)
            self._free.release()

    def _run_due(self) -> None:
        shutdown = self.supervisor.shutdown
        while not shutdown.asked.is_set() and self.supervisor.run_next(self.name):
            _log.warning("no message came for %.0f s, but a job was due", RESEND_AFTER_S)


def make_app(broker_url: str, slots: _Slots) -> Any:
    """Make a Celery app with a single task, which claims a job and runs it."""
    app = celery_app(broker_url)

    @app.task(name=TASK_NAME)  # type: ignore[untyped-decorator]
    def run_job(job_id: str) -> None:
        slots.on_message(job_id)

    return app


def run_celery_worker(
    broker_url: str,
    *,
    db: Database,
    settings: WorkerSettings,
    shutdown: Shutdown,
    name: str,
    child_command: Sequence[str] = CHILD_COMMAND,
) -> None:
    """Run jobs until SIGTERM. Then wait during the drain time, and give back jobs that have not ended.

    Raises:
        RetryableError: Celery's worker ended by itself.
    """
    broker.install()
    supervisor = Supervisor(db=db, settings=settings, shutdown=shutdown, child_command=child_command)
    slots = _Slots(supervisor, name)
    app = make_app(broker_url, slots)

    def on_shutdown(**_: object) -> None:
        shutdown.ask(settings.drain_s)
        # Celery ignores a second SIGTERM.
        end_on_signals(shutdown, settings.drain_s)

    # Celery's default is a weak reference to a handler. `weak=False` keeps this local function alive.
    signals.worker_shutting_down.connect(on_shutdown, weak=False)
    dispatcher = CeleryDispatcher(broker_url)
    blobs = open_blobs(settings)
    sweeper = Sweeper(
        name=name, db=db, blobs=blobs, settings=settings, shutdown=shutdown, dispatcher=dispatcher
    )
    threads = [start_thread(sweeper.run, "sweeper"), start_thread(slots.watch_queue, "watch")]
    worker = app.Worker(
        pool="threads",
        concurrency=settings.concurrency,
        queues=[QUEUE],
        hostname=name,
        loglevel="INFO",
        # Workers need not know of each other, because the database says which worker runs which job.
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
    )
    worker.start()
    # `start` also returns when Celery's consumer has died. The other threads must end then, too.
    asked = shutdown.asked.is_set()
    if not asked:
        shutdown.ask(0.0)
    for thread in threads:
        thread.join()
    if not asked:
        raise RetryableError("The Celery worker ended by itself. Start it again.")
