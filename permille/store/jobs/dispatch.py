"""Messages to workers about new jobs, and the rows by which workers show that they run.

The database decides about jobs, and a message is only a hint. A message carries a job's id, but the
worker that receives it claims the next job (`claims.claim`). The sweeper sends a lost message again, so
a request succeeds even if `send` fails. Without a broker nothing is sent: local workers poll the
database. Celery is imported only where a broker is configured.

Once a minute, each worker stores that it runs, its memory, and whether it can export programs. The API uses
this to refuse a job that no worker can do. A worker that was silent for five minutes counts as stopped.
"""

import logging
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Final

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from permille.schemas.fields import MAX_INTEGER
from permille.store.database import now
from permille.store.jobs.transitions import IS_RUNNING
from permille.store.tables import Job, Worker

TASK_NAME = "permille.run_job"
QUEUE = "permille"
# The longest time that a request waits for the broker. If a message fails, the sweeper sends it again.
SEND_TIMEOUT_S = 3.0
# The longest time that a worker waits for an answer of the broker.
ANSWER_S = 5.0
_NOTED_EVERY: Final = timedelta(minutes=1)
_SILENT_FOR: Final = timedelta(minutes=5)
# Rows of workers that never come back are deleted after this time.
_KEPT_FOR: Final = timedelta(days=1)

_log = logging.getLogger(__name__)


class CeleryDispatcher:
    """Send the ids of jobs through a Celery broker."""

    def __init__(self, broker_url: str) -> None:
        self._app = celery_app(broker_url)
        self._app.conf.update(
            broker_connection_timeout=SEND_TIMEOUT_S,
            broker_transport_options={
                "socket_timeout": SEND_TIMEOUT_S,
                "socket_connect_timeout": SEND_TIMEOUT_S,
                "max_retries": 0,
            },
        )

    def send(self, job_id: str) -> bool:
        """Send one id. Return False, and log a warning, if the broker cannot be reached."""
        from kombu.exceptions import OperationalError

        try:
            self._app.send_task(TASK_NAME, args=[job_id], queue=QUEUE, ignore_result=True, retry=False)
        except (OperationalError, OSError) as exc:
            _log.warning("broker did not take job %s, the sweeper will send it again: %s", job_id, exc)
            return False
        return True

    def waiting(self) -> int:
        """Count the messages that no worker has taken, or return 0 if the broker cannot be asked."""
        from kombu.exceptions import OperationalError

        with self._app.connection_for_write() as connection:
            absent = (*connection.connection_errors, *connection.channel_errors, OperationalError, OSError)
            try:
                return int(connection.default_channel.queue_declare(queue=QUEUE, passive=True).message_count)
            except absent:
                return 0


def dispatch(dispatcher: CeleryDispatcher | None, job_ids: Iterable[str]) -> None:
    """Send the ids of jobs whose transaction is committed. Without a broker, do nothing."""
    for job_id in job_ids:
        if dispatcher is not None:
            dispatcher.send(job_id)


def celery_app(broker_url: str) -> Any:
    """Return a Celery app with our settings: JSON, no result backend, one message at a time."""
    from celery import Celery

    app = Celery("permille", broker=broker_url, set_as_current=False)
    app.conf.update(
        # Never accept pickle: anyone who can write to the broker could run code here.
        accept_content=["json"],
        task_serializer="json",
        result_backend=None,
        task_ignore_result=True,
        # Acknowledge early: the job's row, not the message, decides whether a job is tried again.
        task_acks_late=False,
        task_default_queue=QUEUE,
        worker_prefetch_multiplier=1,
        # Someone who can reach the broker must not be able to stop or reconfigure workers.
        worker_enable_remote_control=False,
        worker_send_task_events=False,
        broker_connection_retry_on_startup=True,
        broker_connection_timeout=ANSWER_S,
        broker_transport_options={
            "socket_keepalive": True,
            "health_check_interval": 10,
            # Without these, a worker would wait for ever for a broker that hangs.
            "socket_timeout": ANSWER_S,
            "socket_connect_timeout": ANSWER_S,
        },
    )
    return app


def note_worker(session: Session, *, name: str, exports: bool, memory_bytes: int | None) -> None:
    """Record at most once a minute that a worker runs, its memory, and whether it can export programs.

    Args:
        exports: whether it can export programs.
        memory_bytes: the memory that a job could use now, or None if unknown. While the worker runs a job,
            the number recorded before stays.
    """
    at, row = now(session), session.get(Worker, name)
    # `abs`, since the database's clock may have gone back.
    if row is not None and row.exports == exports and abs(at - row.seen_at) < _NOTED_EVERY:
        return
    busy = session.scalar(select(Job.id).where(IS_RUNNING, Job.worker == name).limit(1)) is not None
    if busy:
        memory_bytes = None if row is None else row.memory_bytes
    session.merge(Worker(name=name, exports=exports, memory_bytes=memory_bytes, seen_at=at))
    session.execute(delete(Worker).where(Worker.seen_at < at - _KEPT_FOR))


def largest_memory(session: Session) -> int | None:
    """Return the most memory that a running worker has for a job, or None if none has said so."""
    running = Worker.seen_at > now(session) - _SILENT_FOR
    # SQLite sorts text after all numbers.
    known = Worker.memory_bytes <= MAX_INTEGER
    return session.scalar(select(func.max(Worker.memory_bytes)).where(running, known))


def none_can_export(session: Session) -> bool:
    """Return whether workers run but none of them can export programs.

    If no worker runs at all, the answer is False: a worker that can export may still start.
    """
    running = select(Worker.exports).where(Worker.seen_at > now(session) - _SILENT_FOR)
    found = session.scalars(running).all()
    return bool(found) and not any(found)
