"""A worker's operations on jobs: claim, renew, report progress, complete, fail, and sweep.

    held = claim(session, worker="worker-1", lease_s=60)
    ...                                              # compute, and call `renew` meanwhile
    complete(session, held, result_id="mask_...")    # in the transaction that writes the result

A claim locks the queued job, and increments its attempt and its *fence*, a number that only grows. Every
later call compares the fence of the claim with that of the job, so a worker that lost its lease cannot
publish. All times come from the database's clock. The blobs of a result must be stored before the
transaction that calls `complete`.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Final

from sqlalchemy import BigInteger, Select, exists, func, literal, or_, select, type_coerce, update
from sqlalchemy.orm import Session, aliased

from permille.schemas.jobs import UNFINISHED, EventKind, JobState
from permille.store import rows
from permille.store.database import Database, now, run_each
from permille.store.errors import StaleClaimError
from permille.store.jobs import parents, transitions
from permille.store.tables import Device, Instant, Job, JobEvent, Tenant

_log = logging.getLogger(__name__)

# Pauses before the next attempt, in seconds. The first pauses are short, so a job recovers quickly from an
# outage. Later pauses are long, so a job that always fails costs little.
BACKOFF_FIRST_S = 2.0
BACKOFF_LONGEST_S = 300.0
# A server that always asks to wait must not keep a job for ever.
_WAITS_WITHIN = timedelta(days=1)
# At most this many jobs are marked as sent in one transaction, to keep it short. The next sweep sends the
# rest.
_SENT_AT_ONCE = 100

# `device_id` is in ORDER BY only so that PostgreSQL uses the index. It does not change the order, because
# each caller selects the jobs of one device, the jobs without a device, or a single job.
_QUEUED = select(Job).where(transitions.IS_QUEUED).order_by(Job.device_id, Job.available_at, Job.id)
_part = aliased(Job)
_HAS_UNENDED_PART = exists().where(_part.parent_id == Job.id, _part.state.in_(UNFINISHED))
_HAS_FAILED_PART = exists().where(
    _part.parent_id == Job.id, _part.state.not_in((*UNFINISHED, JobState.SUCCEEDED))
)
_HAS_PART_TO_STOP = exists().where(
    _part.parent_id == Job.id, _part.state.in_(UNFINISHED), _part.cancel_requested_at.is_(None)
)
_HELD = select(Job.tenant_id, Job.device_id).where(transitions.IS_RUNNING, Job.worker.is_not(None))
_DUE_AT = (
    select(func.min(Job.available_at))
    .where(transitions.IS_QUEUED, Job.tenant_id == Tenant.id)
    .correlate(Tenant)
    .scalar_subquery()
    .label("due_at")
)
_TENANTS = select(Tenant.id, _DUE_AT).order_by(Tenant.served_at.asc().nulls_first(), _DUE_AT, Tenant.id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The right to run one attempt of a job while its lease is renewed."""

    job_id: str
    tenant_id: str
    kind: str
    payload: Mapping[str, object]
    fence: int
    attempt: int
    max_attempts: int
    parent_id: str | None = None
    traceparent: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepReport:
    """Numbers of jobs that a sweep queued again, ended as `dead`, or ended as `cancelled`."""

    requeued: int
    died: int
    cancelled: int


def claim(session: Session, *, worker: str, lease_s: float, job_id: str | None = None) -> Claim | None:
    """Claim the next queued job, or the job with this id. Return None if there is no job to claim.

    The order is fair between tenants. The tenant with the fewest running jobs comes first. Among tenants with
    equally many running jobs, the one that has waited longest for its turn comes first. So a tenant that
    queues many jobs delays another tenant by at most one job per worker. Within a tenant, the operators' jobs
    come before the jobs that check uploads of devices. The devices of a tenant are ordered like tenants.

    Jobs that wait for their parts are not queued: see `permille.store.jobs.parents`.

    Example:

        with db.write() as session:
            held = claim(session, worker="worker-1", lease_s=60)
        if held is not None:
            run(held.kind, held.payload)
    """
    at = now(session)
    if job_id is None:
        job = _next(session, at)
    else:
        job = _lock_first(session, _QUEUED.where(Job.available_at <= at, Job.id == job_id))
    if job is None:
        return None
    job.attempt += 1
    # The new fence invalidates all older claims of this job, even if their workers still run.
    job.fence += 1
    job.started_at = at
    job.message = None
    job.worker = worker
    job.lease_expires_at = at + timedelta(seconds=lease_s)
    transitions.transition(session, job, JobState.RUNNING, attempt=job.attempt, worker=worker)
    return Claim(
        job_id=job.id,
        tenant_id=job.tenant_id,
        kind=job.kind,
        payload=_payload(job.payload),
        fence=job.fence,
        attempt=job.attempt,
        max_attempts=job.max_attempts,
        parent_id=job.parent_id,
        traceparent=job.traceparent,
    )


def _payload(stored: object) -> dict[str, object]:
    """Return a copy of a job's payload, or nothing if a person damaged it by hand. Then the attempt fails."""
    return dict(stored) if isinstance(stored, dict) else {}


def _next(session: Session, at: datetime) -> Job | None:
    """Choose and lock the next job.

    The tenant is chosen before the job, since there may be too many queued jobs to compare them all. If other
    workers have locked all jobs of a tenant, the next tenant is served.
    """
    by_tenant, by_device = _count_running(session)
    tenants = session.execute(_TENANTS).all()
    due = [tenant.id for tenant in tenants if isinstance(tenant.due_at, datetime) and tenant.due_at <= at]
    # The sort is stable, so tenants with equally many running jobs keep the order of the query.
    for tenant_id in sorted(due, key=by_tenant.__getitem__):
        own = _QUEUED.where(Job.tenant_id == tenant_id, Job.device_id.is_(None), Job.available_at <= at)
        job = _lock_first(session, own)
        if job is not None:
            return job
        devices = session.scalars(_devices(tenant_id, at)).all()
        for device_id in sorted(devices, key=by_device.__getitem__):
            uploads = _QUEUED.where(
                Job.tenant_id == tenant_id, Job.device_id == device_id, Job.available_at <= at
            )
            job = _lock_first(session, uploads)
            if job is not None:
                return job
    return None


def _count_running(session: Session) -> tuple[Counter[str], Counter[str]]:
    """Count the jobs that workers hold, by tenant and by device."""
    # Count in Python: with GROUP BY, SQLite would scan all jobs by an index that does not fit the filter.
    held = session.execute(_HELD).all()
    return Counter(row.tenant_id for row in held), Counter(row.device_id for row in held if row.device_id)


def _devices(tenant_id: str, at: datetime) -> Select[str]:
    """Select the tenant's devices whose uploads have a due job, the one served longest ago first."""
    waiting = (
        select(Job.device_id, func.min(Job.available_at).label("due_at"), func.min(Job.id).label("first"))
        .where(
            transitions.IS_QUEUED,
            Job.tenant_id == tenant_id,
            Job.device_id.is_not(None),
            Job.available_at <= at,
        )
        .group_by(Job.device_id)
        .subquery()
    )
    return (
        select(Device.id)
        .join(waiting, waiting.c.device_id == Device.id)
        .order_by(Device.served_at.asc().nulls_first(), waiting.c.due_at, waiting.c.first)
    )


def _lock_first(session: Session, query: Select[Job]) -> Job | None:
    """Lock the first job of the query that no other worker has locked."""
    free = query.limit(1).with_for_update(skip_locked=True, key_share=True)
    free = free.execution_options(populate_existing=True)
    while (job := session.scalar(free)) is not None and (damaged := rows.damaged(job)):
        _give_up(session, job, damaged)
    return job


def _give_up(session: Session, job: Job, damaged: Mapping[str, object]) -> None:
    """Fail a locked job whose row is damaged, so that it does not stop the other jobs."""
    # Each claim adds an event, so this number is at least the number of claims, as the fence must be.
    events = session.scalar(select(func.max(JobEvent.seq)).where(JobEvent.job_id == job.id)) or 0
    for name, kind in damaged.items():
        setattr(job, name, now(session) if kind is datetime else events)
    message = f"The job's row is damaged: {', '.join(damaged)}. To run it again, use `permille jobs retry`."
    job.error = {"type": "DamagedRow", "message": message, "retryable": False}
    _log.error("%s fails: %s", job.id, message)
    # A parent is advanced by the next sweep, because it must be locked before its parts.
    transitions.transition(session, job, JobState.FAILED, error=job.error)


def oldest_start(session: Session) -> datetime | None:
    """Return the start of the oldest running attempt, or None if no worker runs a job."""
    return session.scalar(
        select(func.min(Job.started_at)).where(transitions.IS_RUNNING, Job.worker.is_not(None))
    )


def check(session: Session, held: Claim) -> Job:
    """Lock the job of a claim for this transaction, and return it.

    Raises:
        StaleClaimError: another attempt has begun, or the job has ended.
    """
    return _current(held, transitions.lock(session, held.job_id))


def is_cancel_requested(session: Session, held: Claim) -> bool:
    """Return whether the attempt should stop. This function takes no lock.

    Raises:
        StaleClaimError: another attempt has begun, or the job has ended.
    """
    job = _current(held, session.get(Job, held.job_id))
    return job.cancel_requested_at is not None


def state_after(session: Session, held: Claim) -> str:
    """Return the job's state after an attempt, or `lost` if another attempt has begun."""
    job = session.get(Job, held.job_id)
    return job.state if job is not None and job.fence == held.fence else "lost"


def renew(session: Session, held: Claim, *, lease_s: float) -> datetime | None:
    """Extend the lease. Return the time of a cancel request, or None.

    Raises:
        StaleClaimError: another attempt has begun, or the job has ended.
    """
    job = check(session, held)
    at = now(session)
    job.lease_expires_at = at + timedelta(seconds=lease_s)
    job.updated_at = at
    return job.cancel_requested_at


def report_progress(
    session: Session, held: Claim, *, fraction: float, message: str | None = None, eta_s: float | None = None
) -> bool:
    """Store the progress of the attempt. Return whether a cancel was requested.

    An event is added if the message changes, or if the progress passes another half percent.

    Raises:
        StaleClaimError: another attempt has begun, or the job has ended.
    """
    job = check(session, held)
    at = now(session)
    fraction = min(max(fraction, 0.0), 1.0)
    # Each event is a row, so skip changes that nobody could see.
    moved = message != job.message or int(200 * fraction) != int(200 * job.progress)
    job.progress, job.message = fraction, message
    job.eta_at = None if eta_s is None else at + timedelta(seconds=eta_s)
    job.updated_at = at
    if moved:
        data = {"progress": fraction, "message": message, "eta_s": eta_s}
        transitions.tell(session, job, EventKind.PROGRESS, data)
        parents.show_parent(session, job)
    return job.cancel_requested_at is not None


def complete(session: Session, held: Claim, *, result_id: str) -> None:
    """End the job with its result. The same transaction must write the result's row.

    Raises:
        StaleClaimError: another attempt has begun, or the job has ended. Nothing is published.
    """
    job = check(session, held)
    job.result_id = result_id
    job.message, job.error = None, None
    transitions.transition(session, job, JobState.SUCCEEDED, result_id=result_id)
    parents.advance_parent(session, job)


def split(session: Session, held: Claim, due: Sequence[parents.Part]) -> None:
    """Add parts to the job and let it wait for them. The attempt does not count.

    When all parts have succeeded, the job is queued again. Its next attempt reads
    `results_of_parts`.

    Raises:
        StaleClaimError: another attempt has begun, or the job has ended. No part is added.
    """
    job = check(session, held)
    job.attempt -= 1
    job.fence += 1
    transitions.leave(job)
    parents.add(session, job, due)
    parents.advance(session, job)


def results_of_parts(session: Session, held: Claim) -> list[tuple[Mapping[str, object], str]]:
    """Return the payload and result id of each part that has succeeded, oldest first."""
    found = transitions.children(session, held.job_id)
    return [(part.payload, part.result_id) for part in found if part.result_id is not None]


def fail(
    session: Session,
    held: Claim,
    *,
    error: Mapping[str, object],
    retryable: bool,
    wait_s: float | None = None,
) -> JobState:
    """End the attempt with an error, and return the job's new state.

    An error that is not retryable ends the job as `failed`. A retryable error queues the job again
    after a pause. It ends the job as `dead` after the last attempt, and as `cancelled` if a cancel was
    requested.

    Args:
        error: `type`, `message`, and details that help to find the cause.
        retryable: whether another attempt may succeed.
        wait_s: the seconds for which another server asked to wait. On the first day of a job, such an attempt
            does not count. None: pause as after any failure.

    Raises:
        StaleClaimError: another attempt has begun, or the job has ended.
    """
    job = check(session, held)
    if not retryable:
        return _end(session, job, JobState.FAILED, {**error, "retryable": False})
    return _after_lost_attempt(session, job, error, wait_s)


def cancelled(session: Session, held: Claim) -> None:
    """End the job as cancelled, after its process has stopped, or was killed because it did not stop in time.

    Raises:
        StaleClaimError: another attempt has begun, or the job has ended.
    """
    _end(session, check(session, held), JobState.CANCELLED, None)


def release(session: Session, held: Claim) -> None:
    """Queue the job again because the worker shuts down. The attempt does not count.

    Raises:
        StaleClaimError: another attempt has begun, or the job has ended.
    """
    job = check(session, held)
    job.attempt -= 1
    job.available_at = now(session)
    job.dispatched_at = None
    transitions.transition(session, job, JobState.QUEUED, message="worker is shutting down")
    parents.show_parent(session, job)


def sweep(db: Database) -> SweepReport:
    """Queue or end the jobs whose lease has expired. Advance those whose parts have ended, or one has failed.

    Each job is handled in a short transaction of its own. A job that waits for a running part costs none.
    """
    with db.read() as session:
        at = now(session)
        leased = select(Job.id).where(transitions.IS_RUNNING, Job.worker.is_not(None))
        expired = session.scalars(leased.where(Job.lease_expires_at < at)).all()
        waiting = select(Job.id).where(transitions.IS_RUNNING, Job.worker.is_(None))
        due = session.scalars(
            waiting.where(or_(~_HAS_UNENDED_PART, _HAS_FAILED_PART & _HAS_PART_TO_STOP))
        ).all()
    # One transaction per job: a long transaction would block other writers (SQLite).
    states: list[JobState | None] = []
    ended = [partial(lambda job_id: states.append(_sweep_one(db, job_id)), job_id) for job_id in expired]
    run_each(ended + [partial(_advance_parent, db, job_id) for job_id in due])
    return SweepReport(
        requeued=states.count(JobState.QUEUED),
        died=states.count(JobState.DEAD),
        cancelled=states.count(JobState.CANCELLED),
    )


def _advance_parent(db: Database, job_id: str) -> None:
    with db.write() as session:
        job = transitions.lock(session, job_id)
        if job is not None:
            parents.advance(session, job)


def take_undispatched(session: Session, *, resend_after_s: float) -> list[str]:
    """Return the queued jobs to send to the broker, and mark them as sent.

    These are jobs that were never sent, and jobs whose last message is so old that it may be lost.
    """
    at = now(session)
    query = (
        select(Job)
        .where(
            transitions.IS_QUEUED,
            Job.available_at <= at,
            or_(Job.dispatched_at.is_(None), Job.dispatched_at <= at - timedelta(seconds=resend_after_s)),
        )
        .order_by(Job.available_at, Job.id)
        .limit(_SENT_AT_ONCE)
        .with_for_update(skip_locked=True, key_share=True)
    )
    jobs = session.scalars(query).all()
    for job in jobs:
        job.dispatched_at = at
    return [job.id for job in jobs]


def mark_undispatched(session: Session, job_ids: Sequence[str]) -> None:
    """Clear the marks of `take_undispatched` on jobs that the broker did not take.

    Locked jobs are skipped: they are being claimed or stopped.
    """
    free = select(Job.id).where(Job.id.in_(job_ids)).with_for_update(skip_locked=True, key_share=True)
    session.execute(update(Job).where(Job.id.in_(free)).values(dispatched_at=None))


def backoff_s(attempt: int) -> float:
    """Return the pause after a failed attempt: 2, 4, 8, ... up to 300 seconds."""
    return min(BACKOFF_FIRST_S * 2.0 ** (attempt - 1), BACKOFF_LONGEST_S)


def _current(held: Claim, job: Job | None) -> Job:
    """Return the job if the claim is still its newest one. Raises StaleClaimError."""
    if job is None or job.fence != held.fence or job.state != JobState.RUNNING:
        found = "no such job" if job is None else f"fence {job.fence}, {job.state}"
        raise StaleClaimError(
            f"This worker lost its lease on {held.job_id}, or the job has ended. The attempt with fence "
            f"{held.fence} is over: {found}."
        )
    return job


def _sweep_one(db: Database, job_id: str) -> JobState | None:
    with db.write() as session:
        job = transitions.lock(session, job_id)
        if job is None or job.state != JobState.RUNNING or job.lease_expires_at is None:
            return None
        if damaged := rows.damaged(job):
            _give_up(session, job, damaged)
            return JobState.FAILED
        if job.lease_expires_at >= now(session):
            return None
        message = (
            f"attempt {job.attempt} of {job.max_attempts}: worker {job.worker} stopped renewing its lease"
        )
        return _after_lost_attempt(session, job, {"type": "WorkerLost", "message": message})


def _after_lost_attempt(
    session: Session, job: Job, error: Mapping[str, object], wait_s: float | None = None
) -> JobState:
    if job.cancel_requested_at is not None:
        return _end(session, job, JobState.CANCELLED, None)
    at = now(session)
    # Wait before the next attempt: whatever broke this one may need time to recover.
    pause_s = backoff_s(job.attempt) if wait_s is None else wait_s
    if wait_s is not None and at - job.created_at < _WAITS_WITHIN:
        job.attempt -= 1
    elif job.attempt >= job.max_attempts:
        return _end(session, job, JobState.DEAD, {**error, "retryable": True, "attempts": job.attempt})
    job.error = {**error, "retryable": True}
    job.available_at = at + timedelta(seconds=pause_s)
    job.dispatched_at = None
    transitions.transition(session, job, JobState.QUEUED, error=job.error, attempt=job.attempt)
    if wait_s is None:
        parents.hold_siblings(session, job)
    parents.show_parent(session, job)
    return JobState.QUEUED


def _end(session: Session, job: Job, state: JobState, error: Mapping[str, object] | None) -> JobState:
    job.error = dict(error) if error else None
    transitions.transition(session, job, state, **({"error": error} if error else {}))
    parents.advance_parent(session, job)
    return state


# The clocks of several servers of one database differ by less than this. A time that is further in the future
# was set by a wrong clock.
SLACK: Final = timedelta(minutes=1)


def pull_back(db: Database) -> int:
    """Move the times of unfinished jobs back, if they lie in the future. Return the number of jobs.

    Jobs get times in the future while the clock is ahead, for example by a year. When the clock is right
    again, these jobs would start, and their leases expire, only after a year. The sweeps of rounds,
    rollouts and uploads correct their own times.
    """
    with db.read() as session:
        late = now(session) + SLACK
        unfinished = or_(transitions.IS_QUEUED, transitions.IS_RUNNING)
        job_ids = session.scalars(select(Job.id).where(unfinished, Job.updated_at > late)).all()
        is_late = session.scalar(select(Tenant.id).where(Tenant.served_at > late).limit(1)) is not None
    if not (job_ids or is_late):
        return 0
    with db.write() as session:
        at = now(session)
        # Shift all times of a job by the same amount, so that leases keep their length. Then a living worker
        # can still renew its lease, and the lease of a dead worker expires.
        earlier = literal(at, Instant()) - type_coerce(Job.updated_at, BigInteger)
        for job_id in job_ids:
            session.execute(
                update(Job)
                .where(Job.id == job_id, unfinished, Job.updated_at > late)
                .values(
                    available_at=type_coerce(Job.available_at, BigInteger) + earlier,
                    lease_expires_at=type_coerce(Job.lease_expires_at, BigInteger) + earlier,
                    dispatched_at=None,
                    updated_at=at,
                )
                .execution_options(synchronize_session=False)
            )
        # A claim sets `served_at` of tenant and device at the same time, so one check covers both.
        for table in (Tenant, Device) if is_late else ():
            session.execute(update(table).where(table.served_at > late).values(served_at=at))
    return len(job_ids)
