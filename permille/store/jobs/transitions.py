"""Changes of job rows: lock, insert, change the state, add an event. Only this folder uses them.

`permille.store.database` defines the order of locks.
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
from permille.store import rows
from permille.store.database import now
from permille.store.ids import Prefix, new_id
from permille.store.tables import Device, Job, JobEvent, Run, Tenant
from permille.version import RESULTS, __version__

DEFAULT_MAX_ATTEMPTS = 3
# The state is written into the statement as a literal, since a partial index is not used for a bound value.
IS_QUEUED = Job.state == literal(JobState.QUEUED.value, literal_execute=True)
IS_RUNNING = Job.state == literal(JobState.RUNNING.value, literal_execute=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """A job to store.

    Attributes:
        device_id: the device whose upload the job checks.
    """

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
    # A part continues the trace of its parent. Any other job continues the trace of its request.
    here = telemetry.current.get()
    job = rows.add(
        session,
        Job(
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
        ),
    )
    tell(session, job, EventKind.STATE, {"state": JobState.QUEUED.value})
    return job


def request_digest(kind: str, payload: Mapping[str, object]) -> str:
    """Return a key that equal requests share.

    The key includes the version of permille and of its results, since another may give another result.
    """
    # Sort the keys, so that the order of fields in a request makes no difference.
    request = json.dumps([__version__, RESULTS, str(kind), payload], sort_keys=True)
    return hashlib.sha256(request.encode()).hexdigest()


def lock(session: Session, job_id: str) -> Job | None:
    """Lock a job's parents from the top down, then the job. Return None if there is no such job."""
    # Find all ancestors first, without locks. Then lock from the top down, which is the order of locks.
    line = [job_id]
    while (parent_id := session.scalar(select(Job.parent_id).where(Job.id == line[-1]))) is not None:
        line.append(parent_id)
    for ancestor_id in reversed(line[1:]):
        lock_one(session, ancestor_id)
    return lock_one(session, job_id)


def lock_one(session: Session, job_id: str) -> Job | None:
    """Lock one row, and read it as it is now."""
    return session.get(Job, job_id, with_for_update={"key_share": True}, populate_existing=True)


def children(session: Session, job_id: str) -> Sequence[Job]:
    """Return all child jobs as they are now, oldest first.

    While the parent is locked, no child ends. A queued child may still be claimed.
    """
    query = select(Job).where(Job.parent_id == job_id).order_by(Job.id)
    return session.scalars(query.execution_options(populate_existing=True)).all()


def has_ended(job: Job) -> bool:
    """Return whether the job has ended. Only a retry changes it again."""
    return job.state in ENDED


def has_failed(job: Job) -> bool:
    """Return whether the job has ended without success."""
    return has_ended(job) and job.state != JobState.SUCCEEDED


def transition(session: Session, job: Job, state: JobState, **details: object) -> None:
    """Change the state of a locked job, and add an event about it.

    Only a running job keeps its lease. A replay that ends without a verdict leaves its log
    `undecided`.
    """
    at = now(session)
    # A job that waits for its parts has no worker, so its tenant is not being served.
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
    """Clear the worker and the lease. If the job stays `running`, it now waits for its parts."""
    job.worker = None
    job.lease_expires_at = None
    job.eta_at = None


def _note_turn(session: Session, job: Job, at: datetime) -> None:
    """Record that the job's tenant and device were served now, so that `claims.claim` prefers others.

    A row that another transaction has locked is skipped. The time is only a hint, and no job should
    wait for it.
    """
    for table, row_id in ((Tenant, job.tenant_id), (Device, job.device_id)):
        free = select(table.id).where(table.id == row_id).with_for_update(skip_locked=True, key_share=True)
        session.execute(update(table).where(table.id == free.scalar_subquery()).values(served_at=at))


def tell(session: Session, job: Job, kind: EventKind, data: Mapping[str, object]) -> None:
    """Add an event to a locked or new job."""
    # The job's row is locked, so numbers have no gaps and come in the order of commits.
    job.event_seq += 1
    at = now(session)
    session.add(
        JobEvent(
            tenant_id=job.tenant_id, job_id=job.id, seq=job.event_seq, kind=kind.value, data=dict(data), at=at
        )
    )


def requeue(session: Session, job: Job) -> None:
    """Queue a locked job that has ended. Its attempts count from zero, but its fence keeps growing."""
    # Old claims must stay invalid, so the fence is not reset.
    job.attempt = 0
    job.cancel_requested_at = None
    job.error = None
    job.progress = 0.0
    job.message = None
    job.available_at = now(session)
    job.dispatched_at = None
    transition(session, job, JobState.QUEUED)


def _move_log(session: Session, job: Job, state: JobState) -> None:
    """Set the log of a replay to `pending` while its job is queued, and to `undecided` if the job ends
    without a verdict.
    """
    if state in (JobState.RUNNING, JobState.SUCCEEDED):  # a replay that succeeds has written its verdict
        return
    run = session.get(Run, (job.tenant_id, job.payload["run_id"]))
    if run is None or run.log_job_id != job.id or run.log_state is None:  # the log was deleted or replaced
        return
    if state is JobState.QUEUED:
        run.log_state, run.log_reason = LogState.PENDING.value, None
    elif state is JobState.CANCELLED:
        run.log_state, run.log_reason = LogState.UNDECIDED.value, "replay-cancelled"
    else:
        message = (job.error or {}).get("message", state.value)
        run.log_state, run.log_reason = LogState.UNDECIDED.value, f"replay-failed: {message}"
