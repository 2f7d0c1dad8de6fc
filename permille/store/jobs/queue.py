"""Jobs as the API sees them: submit, look, cancel, retry, events. Workers use `permille.store.jobs.claims`.

Every function takes a session of the caller's transaction (`Database.write()` for those that change
something) and filters by tenant. Dispatch to a broker (`permille.store.jobs.dispatch`) comes after the
commit; a lost message is re-sent by the sweeper.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import Select, and_, bindparam, delete, func, or_, select
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

MAX_EVENTS = 1000
_PART_IDS = select(Job.id).where(Job.parent_id == bindparam("parent_id")).order_by(Job.id)
_PARENTS = frozenset({JobKind.BUILD, JobKind.MASK})  # the kinds that may have parts: others are not looked up


def submit(session: Session, new: NewJob, find: parents.Find | None = None) -> Job:
    """Store a queued job; with a key that was used before for the same kind and payload, return that job.

    A build's first child jobs are stored with it; where `find` knows a job that has made the same before,
    the child has its result.

    Raises:
        ConflictError: the key was used for another kind or payload.
    """
    earlier = find_submitted(session, new)
    if earlier is not None:
        return earlier
    try:
        with session.begin_nested():
            job = transitions.insert(session, new)
    except IntegrityError:  # the same key, at the same moment (PostgreSQL)
        earlier = find_submitted(session, new)
        if earlier is None:
            raise
        return earlier
    if new.kind == JobKind.BUILD:
        parents.advance(session, job)
        if find is not None:
            parents.take_earlier(session, job, find)
    return job


def check_room(session: Session, *, tenant_id: str, limit: int) -> None:
    """Check that the tenant may queue one more job of its own. Its devices' uploads have limits of their own.

    Raises QuotaError: as many are queued as may be.
    """
    queued = select(Job.id).where(transitions.IS_QUEUED, Job.tenant_id == tenant_id, Job.device_id.is_(None))
    count = session.scalar(select(func.count()).select_from(queued.limit(limit).subquery()))
    if (count or 0) >= limit:
        raise QuotaError(
            f"{limit} jobs are queued, as many as a tenant may have. Wait for some to begin, or cancel some.",
            retry_after_s=60,
        )


def lock(session: Session, *, tenant_id: str, job_id: str) -> Job:
    """Read one job for change, as it is now: nobody else changes it before this transaction ends.

    Raises NotFoundError.
    """
    job = transitions.lock(session, job_id)
    if job is None or job.tenant_id != tenant_id:
        raise NotFoundError(f"no job {job_id!r}")
    return job


def find_submitted(session: Session, new: NewJob) -> Job | None:
    """The job that was submitted with the same key. Raises ConflictError where it is for something else."""
    if new.idempotency_key is None:
        return None
    query = select(Job).where(Job.tenant_id == new.tenant_id, Job.idempotency_key == new.idempotency_key)
    earlier = session.scalar(query)
    if earlier is not None and (earlier.kind != new.kind or earlier.payload != dict(new.payload)):
        raise ConflictError(
            f"idempotency key {new.idempotency_key!r} was used for another request ({earlier.id})"
        )
    return earlier


def find_equal(session: Session, *, tenant_id: str, request_digest: str) -> Job | None:
    """The newest job that has succeeded with the same request, if any."""
    query = select(Job).where(
        Job.tenant_id == tenant_id,
        Job.request_digest == request_digest,
        Job.state == JobState.SUCCEEDED.value,
    )
    return session.scalar(query.order_by(Job.id.desc()).limit(1))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """Conditions of a list of jobs; None asks for nothing.

    Attributes:
        model_id: the model that the request names, or that the result is made of.
        release, alias: the name under which the package that the job made was published, and where an alias
            of it points now.
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
    """List jobs, newest first, parts of others included. Raises InputError for a bad limit."""
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
    """Return the query of the digests of packages that have a name, or that an alias points at."""
    query = select(Release.package_digest).where(Release.tenant_id == tenant_id)
    if wanted.release is not None:
        query = query.where(Release.name == wanted.release)
    if wanted.alias is not None:
        same = (getattr(Alias, name) == getattr(Release, name) for name in ("tenant_id", "name", "version"))
        query = query.join(Alias, and_(*same)).where(Alias.alias == wanted.alias)
    return query


def parts_of(session: Session, job: Job) -> Sequence[Job]:
    """A job's child jobs, oldest first."""
    if job.kind not in _PARENTS:
        return ()
    return transitions.children(session, job.id)


def ids_of_parts(session: Session, job: Job) -> list[str]:
    """The ids of a job's child jobs, oldest first."""
    if job.kind not in _PARENTS:
        return []
    return list(session.scalars(_PART_IDS, {"parent_id": job.id}))


def events_after(
    session: Session, *, tenant_id: str, job_id: str, seq: int = 0, limit: int = MAX_EVENTS
) -> Sequence[JobEvent]:
    """The events with a number above `seq` (a stream's `Last-Event-ID`), oldest first.

    Raises NotFoundError.
    """
    rows.get(session, Job, tenant_id=tenant_id, row_id=job_id)
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
    """Queue a job again that has failed, died or been cancelled, and those of its parts that did not succeed.

    Raises:
        NotFoundError: no such job.
        ConflictError: the job has not ended, has succeeded, or is a part of another one (retry that).
    """
    job = lock(session, tenant_id=tenant_id, job_id=job_id)
    if not transitions.has_ended(job) or job.state == JobState.SUCCEEDED:
        raise ConflictError(f"Only a failed, dead or cancelled job can be retried; this one is {job.state}.")
    if job.parent_id is not None:
        raise ConflictError(f"This job is a part of {job.parent_id}. Retry that one.")
    _requeue(session, job)
    return job


def remove(session: Session, *, tenant_id: str, kind: JobKind, job_id: str) -> None:
    """Forget a job that has ended, with its parts and events, once what they made was removed.

    Raises:
        NotFoundError: no such job of this kind.
        ConflictError: it has not ended, is a part of another, or something that it made is still there.
    """
    job = lock(session, tenant_id=tenant_id, job_id=job_id)
    if job.kind != kind:
        raise NotFoundError(f"no {kind} {job_id!r}")
    if not transitions.has_ended(job) or job.parent_id is not None:
        raise ConflictError(
            f"{job_id} is a part of {job.parent_id}: remove that."
            if job.parent_id is not None
            else f"{job_id} is {job.state}: cancel it first, or wait for its end."
        )
    family = [job_id]
    for one in family:  # grows as it goes
        family += session.scalars(select(Job.id).where(Job.parent_id == one))
    newest_first = Artifact.created_at.desc(), Artifact.id.desc()  # what was made of others before these
    made = session.scalars(select(Artifact).where(Artifact.job_id.in_(family)).order_by(*newest_first))
    if left := ", then ".join(f"{one.kind} {artifacts.key_of(one)}" for one in made):
        raise ConflictError(f"What {job_id} made is still there. First remove {left}.")
    session.execute(delete(JobEvent).where(JobEvent.job_id.in_(family)))
    session.expunge(job)
    for one in reversed(family):
        session.execute(delete(Job).where(Job.id == one))


def may_go_on(session: Session, *, job_id: str, kept_for: timedelta = timedelta(0)) -> bool:
    """Return whether an attempt of a job, of any tenant, may still need what earlier ones left: for workers'
    own housekeeping. `kept_for`: how long it may once the job has failed.
    """
    job = session.get(Job, job_id)
    if job is None or job.state in (JobState.SUCCEEDED, JobState.CANCELLED):
        return False
    return job.ended_at is None or now(session) < job.ended_at + kept_for


def _requeue(session: Session, job: Job) -> None:
    transitions.requeue(session, job)
    for part in transitions.children(session, job.id):
        if transitions.has_ended(part) and part.state != JobState.SUCCEEDED:
            _requeue(session, part)
    parents.advance(session, job)
