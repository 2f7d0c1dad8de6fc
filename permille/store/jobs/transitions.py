"""Job rows from the inside: lock, insert, change state, tell. Only this folder uses it.

The order of locks is that of `permille.store.database`.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import literal, select, update
from sqlalchemy.orm import Session

from permille import telemetry
from permille.schemas.jobs import ENDED, EventKind, JobKind, JobState
from permille.schemas.runs import LogState
from permille.store.database import now
from permille.store.ids import Prefix, new_id
from permille.store.tables import Device, Job, JobEvent, Run, Tenant
from permille.version import __version__

DEFAULT_MAX_ATTEMPTS = 3
# Written out in a statement, since the partial indexes of these states do not serve a bound value.
IS_QUEUED = Job.state == literal(JobState.QUEUED.value, literal_execute=True)
IS_RUNNING = Job.state == literal(JobState.RUNNING.value, literal_execute=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """A job to store: whose it is and what it is to do. `device_id`: of one that checks a device's upload."""

    tenant_id: str
    kind: str
    payload: Mapping[str, object]
    idempotency_key: str | None = None
    max_attempts: int = DEFAULT_MAX_ATTEMPTS
    parent_id: str | None = None
    device_id: str | None = None


def insert(session: Session, new: NewJob) -> Job:
    """Add a queued job and its first event."""
    at = now(session)
    parent = session.get(Job, new.parent_id) if new.parent_id else None
    here = telemetry.current.get()
    job = Job(
        id=new_id(Prefix.JOB),
        tenant_id=new.tenant_id,
        kind=str(new.kind),
        state=JobState.QUEUED.value,
        payload=dict(new.payload),
        request_digest=request_digest(new.kind, new.payload),
        idempotency_key=new.idempotency_key,
        max_attempts=new.max_attempts,
        traceparent=parent.traceparent if parent else str(here) if here else None,
        parent_id=new.parent_id,
        device_id=new.device_id,
        attempt=0,
        fence=0,
        event_seq=0,
        progress=0.0,
        available_at=at,
        created_at=at,
        updated_at=at,
    )
    session.add(job)
    session.flush()
    tell(session, job, EventKind.STATE, {"state": JobState.QUEUED.value})
    return job


def request_digest(kind: str, payload: Mapping[str, object]) -> str:
    """Return the key of equal requests.

    It includes the version of permille, since another one may give another result.
    """
    request = json.dumps([__version__, str(kind), payload], sort_keys=True)
    return hashlib.sha256(request.encode()).hexdigest()


def lock(session: Session, job_id: str) -> Job | None:
    """Read a job for change, those that it is a part of locked first. None when there is no such job."""
    line = [job_id]
    while (parent_id := session.scalar(select(Job.parent_id).where(Job.id == line[-1]))) is not None:
        line.append(parent_id)
    for ancestor_id in reversed(line[1:]):
        lock_one(session, ancestor_id)
    return lock_one(session, job_id)


def lock_one(session: Session, job_id: str) -> Job | None:
    """Read one row for change, as it is now."""
    return session.get(Job, job_id, with_for_update={"key_share": True}, populate_existing=True)


def children(session: Session, job_id: str) -> Sequence[Job]:
    """All child jobs as they are now, oldest first. With the parent locked none of them ends meanwhile; a
    queued one may be claimed."""
    query = select(Job).where(Job.parent_id == job_id).order_by(Job.id)
    return session.scalars(query.execution_options(populate_existing=True)).all()


def has_ended(job: Job) -> bool:
    """Return whether the job has ended. Only a retry changes it again."""
    return job.state in ENDED


def transition(session: Session, job: Job, state: JobState, **details: object) -> None:
    """Change a locked job's state and tell it. The lease goes in every state but `running`.

    The log that a replay is of follows: without a verdict it is neither refused nor pending for ever.
    """
    at = now(session)
    if JobState.RUNNING in (job.state, state) and job.worker is not None:
        _note_turn(session, job, at)
    job.state = state.value
    job.updated_at = at
    job.ended_at = at if state in ENDED else None
    if state is not JobState.RUNNING:
        leave(job)
    if state is JobState.SUCCEEDED:
        job.progress = 1.0
    if job.kind == JobKind.REPLAY:
        _move_log(session, job, state)
    tell(session, job, EventKind.STATE, {"state": state.value, **details})


def leave(job: Job) -> None:
    """No worker holds the job any more: one that stays `running` waits for its parts."""
    job.worker = None
    job.lease_expires_at = None
    job.eta_at = None


def _note_turn(session: Session, job: Job, at: datetime) -> None:
    """Note that a tenant, and a device, was served: `claims.claim` lets the others go first.

    A row that another transaction holds stays as it is: this is a hint, for which no job waits.
    """
    for table, row_id in ((Tenant, job.tenant_id), (Device, job.device_id)):
        free = select(table.id).where(table.id == row_id).with_for_update(skip_locked=True, key_share=True)
        session.execute(update(table).where(table.id == free.scalar_subquery()).values(served_at=at))


def tell(session: Session, job: Job, kind: EventKind, data: Mapping[str, object]) -> None:
    """Add an event to a locked (or fresh) job."""
    job.event_seq += 1
    at = now(session)
    session.add(
        JobEvent(
            tenant_id=job.tenant_id, job_id=job.id, seq=job.event_seq, kind=kind.value, data=dict(data), at=at
        )
    )
    session.flush()


def requeue(session: Session, job: Job) -> None:
    """Queue a locked job that has ended, its attempts counted anew. The fence keeps growing."""
    job.attempt = 0
    job.cancel_requested_at = None
    job.error = None
    job.progress = 0.0
    job.message = None
    job.available_at = now(session)
    job.dispatched_at = None
    transition(session, job, JobState.QUEUED)


def _move_log(session: Session, job: Job, state: JobState) -> None:
    """Pending while a replay is to come, undecided once its job has ended otherwise than by a verdict."""
    if state in (JobState.RUNNING, JobState.SUCCEEDED):  # whoever ends it so has written the verdict
        return
    run = session.get(Run, (job.tenant_id, job.payload["run_id"]))
    if run is None or run.log_job_id != job.id or run.log_state is None:  # its log was deleted, or replaced
        return
    if state is JobState.QUEUED:
        run.log_state, run.log_reason = LogState.PENDING.value, None
    elif state is JobState.CANCELLED:
        run.log_state, run.log_reason = LogState.UNDECIDED.value, "replay-cancelled"
    else:
        message = (job.error or {}).get("message", state.value)
        run.log_state, run.log_reason = LogState.UNDECIDED.value, f"replay-failed: {message}"
