"""Jobs as the API uses them: submit, list, cancel, retry, remove, and read events.

Workers use `permille.store.jobs.claims`. Every function runs in the caller's transaction and
filters by tenant. Functions that change rows need a session of `Database.write()`. Send the job to
a broker (`permille.store.jobs.dispatch`) after the commit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from sqlalchemy import ColumnElement, Select, and_, bindparam, delete, func, or_, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from permille.schemas.jobs import EventKind, JobKind, JobState
from permille.store import artifacts, rows
from permille.store.database import now
from permille.store.errors import ConflictError, NotFoundError, QuotaError
from permille.store.jobs import parents, transitions
from permille.store.jobs.transitions import NewJob
from permille.store.rows import FIRST, Page, Window, fetch_page
from permille.store.tables import Alias, Artifact, Job, JobEvent, Release

# At most this many events are in one answer. For more, a client sends the number of its last event.
MAX_EVENTS = 1000
KEPT_FOR: Final = timedelta(days=1)
"""The time after which an idempotency key is free for another request."""
_PART_IDS = select(Job.id).where(Job.parent_id == bindparam("parent_id")).order_by(Job.id)
_PARENTS = frozenset({JobKind.BUILD, JobKind.MASK})  # only these may have parts: skip the query for others


def submit(session: Session, new: NewJob, find: parents.Find | None = None) -> Job:
    """Store a queued job and return it.

    If a job of the same kind and payload used the same idempotency key within `KEPT_FOR`, return that job.
    The first child jobs of a build are stored with it. For each of them, `find` looks for an earlier job
    with the same request and inputs. If it finds one, the child ends at once with the result of that job.

    Raises:
        ConflictError: the key was used for another kind or payload.

    Example:

        payload = request.model_dump(mode="json")
        new = NewJob(tenant_id=tenant.id, kind=JobKind.MASK, payload=payload)
        job = submit(session, new)
    """
    earlier = find_submitted(session, new)
    if earlier is not None:
        return earlier
    _free_key(session, new)
    try:
        with session.begin_nested():
            job = transitions.insert(session, new)
    except IntegrityError:
        # Another request inserted the same key at the same moment (PostgreSQL).
        earlier = find_submitted(session, new)
        if earlier is None:  # no job has this key, so another constraint failed
            raise
        return earlier
    if new.kind == JobKind.BUILD:
        parents.advance(session, job)
        if find is not None:
            parents.take_earlier(session, job, find)
    return job


def check_room(session: Session, *, tenant_id: str, limit: int) -> None:
    """Check that the tenant may queue one more job. Uploads of its devices have limits of their own.

    Raises:
        QuotaError: the tenant's queue is full.
    """
    # The subquery stops counting at the limit, however long the queue is.
    queued = select(Job.id).where(transitions.IS_QUEUED, Job.tenant_id == tenant_id, Job.device_id.is_(None))
    count = session.scalar(select(func.count()).select_from(queued.limit(limit).subquery()))
    if (count or 0) >= limit:
        raise QuotaError(
            f"{limit} jobs are queued, as many as a tenant may have. Wait for some to begin, or cancel some.",
            retry_after_s=60,
        )


def lock(session: Session, *, tenant_id: str, job_id: str) -> Job:
    """Read and lock one job for this transaction. Raises NotFoundError."""
    job = transitions.lock(session, job_id)
    if job is None or job.tenant_id != tenant_id:
        raise NotFoundError(f"There is no job {job_id!r}.")
    return job


def find_submitted(session: Session, new: NewJob) -> Job | None:
    """Return the job that was submitted with the same idempotency key within `KEPT_FOR`, or None.

    Raises:
        ConflictError: the key was used for another kind or payload.
    """
    if new.idempotency_key is None:
        return None
    query = select(Job).where(*_of_key(new), Job.created_at > now(session) - KEPT_FOR)
    earlier = session.scalar(query)
    if earlier is not None and (earlier.kind != new.kind or earlier.payload != dict(new.payload)):
        raise ConflictError(
            f"The idempotency key {new.idempotency_key!r} was used for another request, {earlier.id}. "
            "Use a new key."
        )
    return earlier


def _free_key(session: Session, new: NewJob) -> None:
    """Take the idempotency key from a job that was submitted with it earlier than `KEPT_FOR` ago."""
    if new.idempotency_key is not None:
        # Another request may have stored a new job with this key meanwhile (PostgreSQL). That job keeps it.
        old = update(Job).where(*_of_key(new), Job.created_at <= now(session) - KEPT_FOR)
        session.execute(old.values(idempotency_key=None))


def _of_key(new: NewJob) -> tuple[ColumnElement[bool], ...]:
    return Job.tenant_id == new.tenant_id, Job.idempotency_key == new.idempotency_key


def find_equal(session: Session, *, tenant_id: str, request_digest: str) -> Job | None:
    """Return the newest job that has succeeded with the same request, or None."""
    query = select(Job).where(
        Job.tenant_id == tenant_id,
        Job.request_digest == request_digest,
        Job.state == JobState.SUCCEEDED.value,
    )
    return session.scalar(query.order_by(Job.id.desc()).limit(1))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """Conditions of a list of jobs. A condition that is None does not filter.

    Attributes:
        model_id: the model that the request names, or from which the result was made.
        release: a name under which the job's package was published.
        alias: an alias that points at the job's package now.
    """

    kind: JobKind | None = None
    state: JobState | None = None
    model_id: str | None = None
    release: str | None = None
    alias: str | None = None


ALL = JobFilter()


def list_jobs(
    session: Session, *, tenant_id: str, wanted: JobFilter = ALL, window: Window = FIRST
) -> Page[Job]:
    """List jobs, newest first. Parts of other jobs are included."""
    query = select(Job).where(Job.tenant_id == tenant_id)
    for column, value in ((Job.kind, wanted.kind), (Job.state, wanted.state)):
        if value is not None:
            query = query.where(column == value)
    if wanted.model_id is not None:
        made = select(Artifact.job_id).where(Artifact.model_id == wanted.model_id)
        asked = Job.payload["model_id"].as_string() == wanted.model_id
        query = query.where(or_(asked, Job.id.in_(made)))
    if wanted.release is not None or wanted.alias is not None:
        query = query.where(Job.result_id.in_(_published(tenant_id, wanted)))
    return fetch_page(session, query, window, Job.id)


def _published(tenant_id: str, wanted: JobFilter) -> Select[str]:
    """Select the package digests of the releases with the wanted name, the wanted alias, or both."""
    query = select(Release.package_digest).where(Release.tenant_id == tenant_id)
    if wanted.release is not None:
        query = query.where(Release.name == wanted.release)
    if wanted.alias is not None:
        same = (getattr(Alias, name) == getattr(Release, name) for name in ("tenant_id", "name", "version"))
        query = query.join(Alias, and_(*same)).where(Alias.alias == wanted.alias)
    return query


def parts_of(session: Session, job: Job) -> Sequence[Job]:
    """Return the child jobs of a job, oldest first."""
    if job.kind not in _PARENTS:
        return ()
    return transitions.children(session, job.id)


def ids_of_parts(session: Session, job: Job) -> list[str]:
    """Return the ids of the child jobs of a job, oldest first."""
    if job.kind not in _PARENTS:
        return []
    return list(session.scalars(_PART_IDS, {"parent_id": job.id}))


def events_after(
    session: Session, *, tenant_id: str, job_id: str, seq: int = 0, limit: int = MAX_EVENTS
) -> Sequence[JobEvent]:
    """Return the events with a number above `seq` (a stream's `Last-Event-ID`), oldest first.

    Raises:
        NotFoundError: the tenant has no such job.
    """
    rows.get(session, Job, tenant_id=tenant_id, row_id=job_id)
    query = select(JobEvent).where(
        JobEvent.tenant_id == tenant_id, JobEvent.job_id == job_id, JobEvent.seq > seq
    )
    return session.scalars(query.order_by(JobEvent.seq).limit(limit)).all()


def request_cancel(session: Session, *, tenant_id: str, job_id: str) -> Job:
    """Cancel a queued job at once, or ask a running job to stop. Return the job.

    The supervisor of a running job kills it if it does not stop in time. A job that has ended does
    not change, so a second call does nothing. Raises NotFoundError.
    """
    job = lock(session, tenant_id=tenant_id, job_id=job_id)
    if transitions.has_ended(job):
        return job
    if job.cancel_requested_at is None:
        job.cancel_requested_at = now(session)
        transitions.tell(session, job, EventKind.MESSAGE, {"message": "cancel requested"})
    if job.state == JobState.QUEUED:
        transitions.transition(session, job, JobState.CANCELLED)
        parents.advance_parent(session, job)
    else:
        parents.advance(session, job)
    return job


def retry(session: Session, *, tenant_id: str, job_id: str) -> Job:
    """Queue a failed, dead or cancelled job again, together with its parts that did not succeed.

    Raises:
        NotFoundError: no such job.
        ConflictError: the job has not ended, has succeeded, or is part of another job, which must be retried
            instead.
    """
    job = lock(session, tenant_id=tenant_id, job_id=job_id)
    if not transitions.has_failed(job):
        raise ConflictError(f"Only a failed, dead or cancelled job can be retried; this one is {job.state}.")
    if job.parent_id is not None:
        raise ConflictError(f"This job is a part of {job.parent_id}. Retry that job instead.")
    _requeue(session, job)
    return job


def remove(session: Session, *, tenant_id: str, kind: str, job_id: str) -> None:
    """Delete the record of a job that has ended, with its parts and events. Remove its results first.

    Raises:
        NotFoundError: no such job of this kind.
        ConflictError: the job has not ended, is part of another job, or one of its results still
            exists.
    """
    job = lock(session, tenant_id=tenant_id, job_id=job_id)
    if job.kind != kind:
        raise NotFoundError(f"There is no {kind} {job_id!r}.")
    # A part must stay while its parent does, since the parent reads the part's result.
    if not transitions.has_ended(job) or job.parent_id is not None:
        raise ConflictError(
            f"{job_id} is a part of {job.parent_id}. Remove that job instead."
            if job.parent_id is not None
            else f"{job_id} is {job.state}: cancel it first, or wait for its end."
        )
    family = [job_id]
    for one in family:  # the list grows while we walk it: parts may have parts
        family += session.scalars(select(Job.id).where(Job.parent_id == one))
    # Newest first: a package must go before the mask from which it was made.
    newest_first = Artifact.created_at.desc(), Artifact.id.desc()
    made = session.scalars(select(Artifact).where(Artifact.job_id.in_(family)).order_by(*newest_first))
    if left := ", then ".join(f"{one.kind} {artifacts.key_of(one)}" for one in made):
        raise ConflictError(f"The results of {job_id} still exist. First remove {left}.")
    session.execute(delete(JobEvent).where(JobEvent.job_id.in_(family)))
    # The row is deleted by a statement below, so the session must forget the object first.
    session.expunge(job)
    # Parts first: they refer to their parent.
    for one in reversed(family):
        session.execute(delete(Job).where(Job.id == one))


def may_go_on(session: Session, *, job_id: str, kept_for: timedelta = timedelta(0)) -> bool:
    """Return whether another attempt of a job may still need the files of earlier attempts.

    Workers call this for jobs of all tenants when they clean their work folders.

    Args:
        kept_for: how long the files of a failed job are kept for a retry.
    """
    job = session.get(Job, job_id)
    if job is None or job.state in (JobState.SUCCEEDED, JobState.CANCELLED):
        return False
    return job.ended_at is None or now(session) < job.ended_at + kept_for


def _requeue(session: Session, job: Job) -> None:
    transitions.requeue(session, job)
    for part in transitions.children(session, job.id):
        if transitions.has_failed(part):
            # Parts that have succeeded keep their results.
            _requeue(session, part)
    parents.advance(session, job)
