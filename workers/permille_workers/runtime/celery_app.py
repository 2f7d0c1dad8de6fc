"""The Celery worker: the same protocol, with ids carried by a broker.

The message is the job's id, acknowledged when it arrives. The row decides: a message whose job is taken,
ended or not yet due does nothing. Jobs run in child processes, so Celery's own pool is of threads, one for
each job.
"""

import logging
import threading
from collections.abc import Sequence
from typing import Any

from celery import signals

from permille.store.database import Database
from permille.store.jobs import claims
from permille.store.jobs.dispatch import QUEUE, TASK_NAME, CeleryDispatcher, celery_app
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
    """A Celery app whose one task claims a job by its id and runs it."""
    app = celery_app(broker_url)
    supervisor = Supervisor(db=db, settings=settings, shutdown=shutdown, child_command=child_command)

    @app.task(name=TASK_NAME)  # type: ignore[untyped-decorator]
    def run_job(job_id: str) -> None:
        with db.write() as session:
            claim = claims.claim(session, worker=name, lease_s=settings.lease_s, job_id=job_id)
        if claim is None:
            _log.info("nothing to do for %s", job_id)
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
    """Work until SIGTERM: running jobs get the drain time, then they are given back."""
    app = make_app(
        broker_url, db=db, settings=settings, shutdown=shutdown, name=name, child_command=child_command
    )

    def on_shutdown(**_: object) -> None:
        shutdown.ask(settings.drain_s)

    signals.worker_shutting_down.connect(on_shutdown, weak=False)
    dispatcher = CeleryDispatcher(broker_url)
    sweeper = Sweeper(db=db, settings=settings, shutdown=shutdown, dispatcher=dispatcher)
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
    shutdown.ask(0.0)
    thread.join()
