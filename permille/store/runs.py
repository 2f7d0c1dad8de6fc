"""Runs that devices report, and the logs or packed states that some devices share.

A shared log is personal data. It belongs to one run of one device, is replayed once, and is deleted
with its bytes on request. Its bytes are an upload (`permille.store.uploads`) to which nothing else
refers.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import ColumnElement, func, select, update
from sqlalchemy.orm import Session

from permille.schemas.jobs import ENDED, JobKind, JobState
from permille.schemas.runs import LogForm, LogState, Outcome
from permille.store import rows, uploads
from permille.store.database import now
from permille.store.errors import ConflictError, NotFoundError
from permille.store.jobs import queue
from permille.store.jobs.transitions import NewJob
from permille.store.rows import FIRST, Page, Window, fetch_page
from permille.store.tables import EPOCH, Device, Job, Run

# The largest loss that is counted, in nats per token. A uniform guess among a million tokens has a loss of
# only 14.
_LARGEST_LOSS: Final = 1e6


def report(
    session: Session, *, tenant_id: str, device_id: str, run_id: str, metrics: dict[str, object]
) -> tuple[Run, bool]:
    """Store a run. Return it, and whether it is new. Sending the same report again changes nothing.

    Raises:
        ConflictError: the id was used with other metrics or by another device.
    """
    run = session.get(Run, (tenant_id, run_id))
    if run is not None:
        # The device makes the id, so another device could have chosen the same id.
        if run.device_id != device_id or run.metrics != metrics:
            raise ConflictError(f"The run {run_id!r} was reported before with other content.")
        return run, False
    # Concurrent reports of one device wait for each other here. Inserts that refer to the device do not wait.
    device = session.get(Device, device_id, with_for_update={"key_share": True})
    arrived_at = now(session)
    run = Run(
        tenant_id=tenant_id,
        run_id=run_id,
        device_id=device_id,
        metrics=metrics,
        created_at=arrived_at,
        ended_at=min(_moment(metrics.get("ended_at"), arrived_at), arrived_at),
        newest=True,
        **_counted(metrics),
    )
    # Reports may be delayed and come in any order, so the newest run is the one that ended last.
    later = select(Run.run_id).where(*_of_same_version(run), Run.newest, Run.ended_at > run.ended_at)
    run.newest = session.scalar(later) is None
    if run.newest:
        session.execute(update(Run).where(*_of_same_version(run), Run.newest).values(newest=False))
    session.add(run)
    last = select(func.max(Run.ended_at)).where(Run.device_id == device_id)
    if device is not None and "engine" in metrics and session.scalar(last) == run.ended_at:
        device.engine, device.agent_version = str(metrics["engine"]), str(metrics["agent_version"])
    return run, True


def _counted(metrics: Mapping[str, object]) -> dict[str, Any]:
    """Return the columns of a run from which the statistics of the fleet are computed."""
    base, personal = (_loss(metrics.get(name)) for name in ("loss_base", "loss_personal"))
    general = [_loss(metrics.get(f"general_loss_{name}")) for name in ("base", "personal")]
    # The device keeps using the base model unless it adopted the personal state.
    adopted = metrics.get("outcome") == Outcome.ADOPTED
    return {
        **{name: metrics.get(name) for name in ("release", "version", "outcome", "peak_rss_bytes")},
        "gain": None if base is None or personal is None else base - personal,
        "rise": None if general[0] is None or general[1] is None else general[1] - general[0],
        "loss": personal if adopted else base,
    }


def _moment(value: object, default: datetime) -> datetime:
    """Parse a time from a device. A time before 1970 becomes 1970, since the cursor of a page cannot hold
    an earlier time.
    """
    found = datetime.fromisoformat(value) if isinstance(value, str) else default
    return max(found, EPOCH)


def _loss(value: object) -> float | None:
    """Return a loss, or None if it is missing or too large to be true. Differences of larger values could
    overflow.
    """
    return value if isinstance(value, float) and abs(value) <= _LARGEST_LOSS else None


def _of_same_version(run: Run) -> tuple[ColumnElement[bool], ...]:
    """Select the runs of the same device on the same version, this run included."""
    return (
        Run.tenant_id == run.tenant_id,
        Run.device_id == run.device_id,
        Run.release == run.release,
        Run.version == run.version,
    )


def get(session: Session, *, tenant_id: str, run_id: str, device_id: str | None = None) -> Run:
    """Read one run, optionally only if it belongs to this device. Raises NotFoundError."""
    run = session.get(Run, (tenant_id, run_id))
    if run is None or run.deleted_at is not None or (device_id is not None and run.device_id != device_id):
        raise NotFoundError(f"There is no run {run_id!r}.")
    return run


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFilter:
    """Conditions of a list of runs. A condition that is None does not filter."""

    device_id: str | None = None
    release: str | None = None
    version: int | None = None
    outcome: Outcome | None = None


def list_runs(
    session: Session,
    *,
    tenant_id: str,
    wanted: RunFilter = RunFilter(),
    window: Window = FIRST,
) -> Page[Run]:
    """List runs by their end, newest first. The ids do not sort by time, since devices make them."""
    query = select(Run).where(Run.tenant_id == tenant_id, Run.deleted_at.is_(None))
    for name, value in asdict(wanted).items():
        if value is not None:
            query = query.where(getattr(Run, name) == value)
    return fetch_page(session, query, window, Run.run_id, Run.ended_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class SentLog:
    """A shared log or packed state, whose bytes are in an upload."""

    form: LogForm
    digest: str
    size_bytes: int
    upload_id: str


def attach_log(
    session: Session, *, tenant_id: str, device_id: str, run_id: str, log: SentLog
) -> tuple[Run, Job]:
    """Attach a log to its run and queue its replay. Return the run and the job.

    If the run already has the same log, return its job, and queue that job again if it ended
    without a verdict. The run then keeps its old upload, and the caller gives up the new one.

    Raises:
        NotFoundError: the device has no such run.
        ConflictError: the run has another log, which must be deleted first, or the upload came too
            late.
    """
    run = get(session, tenant_id=tenant_id, run_id=run_id, device_id=device_id)
    job = None
    if run.log_job_id is not None:
        job = queue.lock(session, tenant_id=tenant_id, job_id=run.log_job_id)
    run = _lock(session, run)
    if run.log_state is None:
        return run, _queue_replay(session, run, log)
    if (run.log_form, run.log_digest) != (log.form, log.digest) or run.log_job_id is None:
        had, came = f"{run.log_form} {run.log_digest}", f"{log.form} {log.digest}"
        raise ConflictError(f"The run {run_id!r} has another log, {had}, not {came}. Delete that log first.")
    if job is None or job.id != run.log_job_id:  # a concurrent request attached the log; its job is new
        return run, rows.get(session, Job, tenant_id=tenant_id, row_id=run.log_job_id)
    if job.state in ENDED and job.state != JobState.SUCCEEDED:
        job = queue.retry(session, tenant_id=tenant_id, job_id=job.id)
    return run, job


@dataclass(frozen=True, slots=True, kw_only=True)
class LogVerdict:
    """Result of a replay: the digest of the state, or the reason of a refusal."""

    state: LogState
    reason: str | None = None
    state_digest: str | None = None


def finish_log(
    session: Session, *, tenant_id: str, run_id: str, log_digest: str, verdict: LogVerdict
) -> None:
    """Store the verdict of a replay, unless the log was deleted or replaced meanwhile."""
    run = session.get(Run, (tenant_id, run_id), with_for_update={"key_share": True})
    if run is None or run.log_digest != log_digest:
        return
    run.log_state, run.log_reason = verdict.state.value, verdict.reason
    run.state_digest = verdict.state_digest


def delete_log(session: Session, *, tenant_id: str, run_id: str, device_id: str | None = None) -> str | None:
    """Delete a run's log, and give up uploads that are under way. Return the upload to erase, or None.

    Erase the upload after the commit. Idempotent. Raises NotFoundError.
    """
    run = get(session, tenant_id=tenant_id, run_id=run_id, device_id=device_id)
    if run.log_state is not None and run.log_job_id is not None:
        queue.request_cancel(session, tenant_id=tenant_id, job_id=run.log_job_id)
    upload_id = _lock(session, run).log_upload_id  # read again: a verdict may have come meanwhile
    uploads.refuse_coming(session, tenant_id=tenant_id, run_id=run_id)
    if upload_id is None:
        return None
    uploads.doom(session, upload_id=upload_id)
    run.log_state = run.log_form = run.log_digest = run.log_upload_id = run.log_size_bytes = None
    run.log_reason = run.state_digest = run.log_job_id = None
    run.log_deleted_at = now(session)
    session.flush()  # `Session.refresh` in a later `_lock` would discard unwritten changes
    return upload_id


def delete_run(session: Session, *, tenant_id: str, run_id: str, device_id: str | None = None) -> str | None:
    """Delete a run and its log. Return the upload to erase after the commit, or None. Raises
    NotFoundError.
    """
    upload_id = delete_log(session, tenant_id=tenant_id, run_id=run_id, device_id=device_id)
    run = get(session, tenant_id=tenant_id, run_id=run_id, device_id=device_id)
    if run.newest:
        earlier = select(Run).where(*_of_same_version(run), Run.run_id != run_id)
        before = session.scalar(earlier.order_by(Run.ended_at.desc()).limit(1))
        if before is not None:
            before.newest = True
    # The row stays without its content, so that a late copy of the report is refused.
    run.metrics, run.deleted_at, run.newest = {}, now(session), False
    run.release = run.version = run.outcome = run.gain = run.loss = run.rise = None
    run.peak_rss_bytes = None
    return upload_id


def _lock(session: Session, run: Run) -> Run:
    """Lock a run and read it again. Callers that also need the job of its log must lock the job first.

    Raises:
        NotFoundError: the run was deleted meanwhile.
    """
    session.refresh(run, with_for_update={"key_share": True})
    if run.deleted_at is not None:
        raise NotFoundError(f"There is no run {run.run_id!r}.")
    return run


def _queue_replay(session: Session, run: Run, log: SentLog) -> Job:
    """Attach a log to a locked run, and queue its replay."""
    uploads.hold(session, tenant_id=run.tenant_id, upload_id=log.upload_id, size_bytes=log.size_bytes)
    new = NewJob(
        tenant_id=run.tenant_id,
        kind=JobKind.REPLAY,
        payload={"run_id": run.run_id},
        device_id=run.device_id,
    )
    job = queue.submit(session, new)
    run.log_state, run.log_form, run.log_job_id = LogState.PENDING.value, log.form.value, job.id
    run.log_digest, run.log_upload_id, run.log_size_bytes = log.digest, log.upload_id, log.size_bytes
    run.log_sent_at, run.log_deleted_at = now(session), None
    run.log_reason = run.state_digest = None
    session.flush()  # `Session.refresh` in a later `_lock` would discard unwritten changes
    return job
