"""The Celery worker: the same protocol, with ids carried by a broker.

A message says that a job is there; it is acknowledged when it arrives. The rows decide which one runs: that
whose turn it is, which need not be the one that the message names, since messages come in the order in which
somebody filled the queue. Jobs run in child processes, so Celery's own pool is of threads, one for each job.
"""

import logging
import threading
from collections.abc import Sequence
from typing import Any

from celery import signals

from permille.errors import RetryableError
from permille.store.blobs.folder import open_blobs
from permille.store.database import Database
from permille.store.jobs import claims
from permille.store.jobs.dispatch import QUEUE, TASK_NAME, CeleryDispatcher, celery_app
from permille_workers.runtime import broker
from permille_workers.runtime.settings import WorkerSettings
from permille_workers.runtime.supervisor import CHILD_COMMAND, Shutdown, Supervisor
from permille_workers.runtime.sweeper import Sweeper

_log = logging.getLogger(__name__)


def make_app(
    broker_url: str,
    *,
    db: Database,
    settings: WorkerSettings,
    shutdown: Shutdown,
    name: str,
    child_command: Sequence[str] = CHILD_COMMAND,
) -> Any:
    """A Celery app whose one task claims a job and runs it."""
    app = celery_app(broker_url)
    supervisor = Supervisor(db=db, settings=settings, shutdown=shutdown, child_command=child_command)

    @app.task(name=TASK_NAME)  # type: ignore[untyped-decorator]
    def run_job(job_id: str) -> None:
        with db.write() as session:
            claim = claims.claim(session, worker=name, lease_s=settings.lease_s)
        if claim is None:
            _log.info("nothing to do, told of %s", job_id)
            return
        supervisor.run(claim)

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
    """Work until SIGTERM: running jobs get the drain time, then they are given back.

    Raises:
        RetryableError: Celery's worker ended by itself.
    """
    broker.install()
    app = make_app(
        broker_url, db=db, settings=settings, shutdown=shutdown, name=name, child_command=child_command
    )

    def on_shutdown(**_: object) -> None:
        shutdown.ask(settings.drain_s)

    signals.worker_shutting_down.connect(on_shutdown, weak=False)
    dispatcher = CeleryDispatcher(broker_url)
    blobs = open_blobs(settings)
    sweeper = Sweeper(db=db, blobs=blobs, settings=settings, shutdown=shutdown, dispatcher=dispatcher)
    thread = threading.Thread(target=sweeper.run, name="sweeper", daemon=True)
    thread.start()
    worker = app.Worker(
        pool="threads",
        concurrency=settings.concurrency,
        queues=[QUEUE],
        hostname=name,
        loglevel="INFO",
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
    )
    worker.start()
    asked = shutdown.asked.is_set()
    shutdown.ask(0.0)
    thread.join()
    if not asked:
        raise RetryableError("expected the broker's worker to run until it is asked to stop, but it ended")
