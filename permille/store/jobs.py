"""Jobs as the API sees them: submit, look, cancel, retry, events. Workers use `permille.store.claims`.

Every function takes a session of the caller's transaction (`Database.write()` for those that change
something) and filters by tenant. Dispatch to a broker comes after the commit (`permille.store.dispatch`); a
lost message is re-sent by the sweeper.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from permille.store import builds, job_rows
from permille.store.database import now
from permille.store.errors import ConflictError, NotFoundError
from permille.store.job_rows import DEFAULT_MAX_ATTEMPTS
from permille.store.paging import Page, fetch_page
from permille.store.tables import EventKind, Job, JobEvent, JobKind, JobState

MAX_EVENTS = 1000


def submit(
    session: Session,
    *,
    tenant_id: str,
    kind: str,
    payload: Mapping[str, Any],
    idempotency_key: str | None = None,
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
) -> Job:
    """Store a queued job; with a key that was used before for the same kind and payload, return that job.

    A build's first child jobs are stored with it.

    Raises:
        ConflictError: the key was used for another kind or payload.
    """
    if idempotency_key is not None:
        earlier = _by_key(session, tenant_id, idempotency_key)
        if earlier is not None:
            return _same_request(earlier, kind, payload)
    try:
        with session.begin_nested():
            job = job_rows.insert(
                session,
                tenant_id=tenant_id,
                kind=kind,
                payload=payload,
                idempotency_key=idempotency_key,
                max_attempts=max_attempts,
            )
    except IntegrityError:  # the same key, at the same moment (PostgreSQL)
        earlier = _by_key(session, tenant_id, idempotency_key) if idempotency_key else None
        if earlier is None:
            raise
        return _same_request(earlier, kind, payload)
    if kind == JobKind.BUILD:
        builds.advance(session, job)
    return job


def get(session: Session, *, tenant_id: str, job_id: str) -> Job:
    """Read one job. Raises NotFoundError."""
    job = session.scalar(select(Job).where(Job.tenant_id == tenant_id, Job.id == job_id))
    if job is None:
        raise NotFoundError(f"no job {job_id!r}")
    return job


def lock(session: Session, *, tenant_id: str, job_id: str) -> Job:
    """Read one job for change, as it is now: nobody else changes it before this transaction ends.

    Raises NotFoundError.
    """
    job = job_rows.lock(session, job_id)
    if job is None or job.tenant_id != tenant_id:
        raise NotFoundError(f"no job {job_id!r}")
    return job


def find_by_key(session: Session, *, tenant_id: str, idempotency_key: str) -> Job | None:
    """The job that was submitted with this key, if any."""
    return _by_key(session, tenant_id, idempotency_key)


def list_jobs(
    session: Session,
    *,
    tenant_id: str,
    kind: str | None = None,
    state: str | None = None,
    parent_id: str | None = None,
    limit: int = 50,
    cursor: str | None = None,
) -> Page[Job]:
    """List jobs, newest first, child jobs included. Raises InputError for a bad limit or cursor."""
    query = select(Job).where(Job.tenant_id == tenant_id)
    for column, value in ((Job.kind, kind), (Job.state, state), (Job.parent_id, parent_id)):
        if value is not None:
            query = query.where(column == value)
    return fetch_page(session, query, Job.id, limit=limit, cursor=cursor)


def events_after(
    session: Session, *, tenant_id: str, job_id: str, seq: int = 0, limit: int = MAX_EVENTS
) -> Sequence[JobEvent]:
    """The events with a number above `seq` (a stream's `Last-Event-ID`), oldest first.

    Raises NotFoundError.
    """
    get(session, tenant_id=tenant_id, job_id=job_id)
    query = select(JobEvent).where(
        JobEvent.tenant_id == tenant_id, JobEvent.job_id == job_id, JobEvent.seq > seq
    )
    return session.scalars(query.order_by(JobEvent.seq).limit(limit)).all()


def request_cancel(session: Session, *, tenant_id: str, job_id: str) -> Job:
    """Cancel what is queued at once; ask what is running to stop (its supervisor then sets a deadline).
    Idempotent.

    A job that has ended stays as it is. Raises NotFoundError.
    """
    job = lock(session, tenant_id=tenant_id, job_id=job_id)
    if job_rows.has_ended(job):
        return job
    if job.cancel_requested_at is None:
        job.cancel_requested_at = now(session)
        job_rows.tell(session, job, EventKind.MESSAGE, {"message": "cancel requested"})
    if job.kind == JobKind.BUILD:
        builds.advance(session, job)
    elif job.state == JobState.QUEUED:
        job_rows.move(session, job, JobState.CANCELLED)
        builds.advance_parent(session, job)
    return job


def retry(session: Session, *, tenant_id: str, job_id: str) -> Job:
    """Queue a job again that has failed, died or been cancelled; a build queues its own children again.

    Raises:
        NotFoundError: no such job.
        ConflictError: the job has not ended, has succeeded, or belongs to a build (retry the build).
    """
    job = lock(session, tenant_id=tenant_id, job_id=job_id)
    if not job_rows.has_ended(job) or job.state == JobState.SUCCEEDED:
        raise ConflictError(f"expected a job that failed, died or was cancelled, got one that is {job.state}")
    if job.parent_id is not None:
        raise ConflictError(f"expected a job of its own, got a part of {job.parent_id}: retry that")
    job_rows.requeue(session, job)
    if job.kind == JobKind.BUILD:
        for child in job_rows.children(session, job.id):
            if job_rows.has_ended(child) and child.state != JobState.SUCCEEDED:
                job_rows.requeue(session, child)
        builds.advance(session, job)
    return job


def _by_key(session: Session, tenant_id: str, key: str) -> Job | None:
    return session.scalar(select(Job).where(Job.tenant_id == tenant_id, Job.idempotency_key == key))


def _same_request(earlier: Job, kind: str, payload: Mapping[str, Any]) -> Job:
    if earlier.kind != kind or earlier.payload != dict(payload):
        raise ConflictError(
            f"idempotency key {earlier.idempotency_key!r} was used for another request ({earlier.id})"
        )
    return earlier


def may_go_on(session: Session, *, job_id: str) -> bool:
    """Whether an attempt of a job, of any tenant, may still need what earlier ones left: for workers' own
    housekeeping.
    """
    job = session.get(Job, job_id)
    return job is not None and not job_rows.has_ended(job)
