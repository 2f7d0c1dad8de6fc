"""Runs that devices report, and the logs that some share, or packed states in their place.

A log is personal data: it hangs on one run of one device, is replayed once, and is deleted with its bytes on
request. They are an upload of its own (`permille.store.uploads`), which nothing else refers to.
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

_LARGEST_LOSS: Final = 1e6


def report(
    session: Session, *, tenant_id: str, device_id: str, run_id: str, metrics: dict[str, object]
) -> tuple[Run, bool]:
    """Store a run; return it and whether this call made it. The same report again changes nothing.

    Reports may wait on a device and come in any order, so the newest run is the one that ended last there.

    Raises:
        ConflictError: the id was used with other metrics or by another device.
    """
    run = session.get(Run, (tenant_id, run_id))
    if run is not None:
        if run.device_id != device_id or run.metrics != metrics:
            raise ConflictError(f"run {run_id!r} was reported before with other content")
        return run, False
    in_turn = {"key_share": True}  # two of its reports; what names the device does not wait
    device = session.get(Device, device_id, with_for_update=in_turn)
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
    later = select(Run.run_id).where(*_of_same_version(run), Run.newest, Run.ended_at > run.ended_at)
    run.newest = session.scalar(later) is None
    if run.newest:
        session.execute(update(Run).where(*_of_same_version(run), Run.newest).values(newest=False))
    session.add(run)
    session.flush()
    last = select(func.max(Run.ended_at)).where(Run.device_id == device_id)
    if device is not None and "engine" in metrics and session.scalar(last) == run.ended_at:
        device.engine, device.agent_version = str(metrics["engine"]), str(metrics["agent_version"])
    session.flush()
    return run, True


def _counted(metrics: Mapping[str, object]) -> dict[str, Any]:
    """Return the columns of a run that fleet counts use, from its metrics."""
    base, personal = (_loss(metrics.get(name)) for name in ("loss_base", "loss_personal"))
    general = [_loss(metrics.get(f"general_loss_{name}")) for name in ("base", "personal")]
    adopted = metrics.get("outcome") == Outcome.ADOPTED
    return {
        **{name: metrics.get(name) for name in ("release", "version", "outcome", "peak_rss_bytes")},
        "gain": None if base is None or personal is None else base - personal,
        "rise": None if general[0] is None or general[1] is None else general[1] - general[0],
        "loss": personal if adopted else base,
    }


def _moment(value: object, default: datetime) -> datetime:
    """A time of a device. One before 1970, where its clock begins, cannot be stored as a cursor."""
    found = datetime.fromisoformat(value) if isinstance(value, str) else default
    return max(found, EPOCH)


def _loss(value: object) -> float | None:
    """A loss that can be counted with: of larger ones, which a device made up, no difference is finite."""
    return value if isinstance(value, float) and abs(value) <= _LARGEST_LOSS else None


def _of_same_version(run: Run) -> tuple[ColumnElement[bool], ...]:
    """The runs of a run's device on its version, itself included."""
    return (
        Run.tenant_id == run.tenant_id,
        Run.device_id == run.device_id,
        Run.release == run.release,
        Run.version == run.version,
    )


def get(session: Session, *, tenant_id: str, run_id: str, device_id: str | None = None) -> Run:
    """Read one run, of this device only when one is named. Raises NotFoundError."""
    run = session.get(Run, (tenant_id, run_id))
    if run is None or run.deleted_at is not None or (device_id is not None and run.device_id != device_id):
        raise NotFoundError(f"no run {run_id!r}")
    return run


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFilter:
    """Conditions on the runs of a list. None does not matter."""

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
    """List runs, the one that ended last first. Their ids, which devices made, say nothing about time."""
    query = select(Run).where(Run.tenant_id == tenant_id, Run.deleted_at.is_(None))
    for name, value in asdict(wanted).items():
        if value is not None:
            query = query.where(getattr(Run, name) == value)
    return fetch_page(session, query, window, Run.run_id, Run.ended_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class SentLog:
    """A shared log or packed state of a device. Its bytes are those of an upload."""

    form: LogForm
    digest: str
    size_bytes: int
    upload_id: str


def attach_log(
    session: Session, *, tenant_id: str, device_id: str, run_id: str, log: SentLog
) -> tuple[Run, Job]:
    """Store that a log has come and queue its replay.

    The same log again: the same job, queued again where it has ended without a verdict; the run then keeps
    the upload that it has, and the caller gives up the new one.

    Raises:
        NotFoundError: no such run of this device.
        ConflictError: the run has another log already (delete it first), or the upload came too late.
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
        raise ConflictError(f"run {run_id!r} has another log: expected {had}, got {came}")
    if job is None or job.id != run.log_job_id:  # sent at the same moment: that job is new
        return run, rows.get(session, Job, tenant_id=tenant_id, row_id=run.log_job_id)
    if job.state in ENDED and job.state != JobState.SUCCEEDED:
        job = queue.retry(session, tenant_id=tenant_id, job_id=job.id)
    return run, job


@dataclass(frozen=True, slots=True, kw_only=True)
class LogVerdict:
    """Result of a replay: the reason of a refusal, or the digest of the state."""

    state: LogState
    reason: str | None = None
    state_digest: str | None = None


def finish_log(
    session: Session, *, tenant_id: str, run_id: str, log_digest: str, verdict: LogVerdict
) -> None:
    """Store what the replay found; nothing when the log was deleted or replaced meanwhile."""
    run = session.get(Run, (tenant_id, run_id), with_for_update={"key_share": True})
    if run is None or run.log_digest != log_digest:
        return
    run.log_state, run.log_reason = verdict.state.value, verdict.reason
    run.state_digest = verdict.state_digest


def delete_log(session: Session, *, tenant_id: str, run_id: str, device_id: str | None = None) -> str | None:
    """Forget a run's log, and one that is on its way; return the upload to erase after the commit, if any.

    Idempotent. Raises NotFoundError.
    """
    run = get(session, tenant_id=tenant_id, run_id=run_id, device_id=device_id)
    if run.log_state is not None and run.log_job_id is not None:
        queue.request_cancel(session, tenant_id=tenant_id, job_id=run.log_job_id)
    upload_id = _lock(session, run).log_upload_id  # with the verdict, if one came meanwhile
    uploads.refuse_coming(session, tenant_id=tenant_id, run_id=run_id)
    if upload_id is None:
        return None
    uploads.doom(session, upload_id=upload_id)
    run.log_state = run.log_form = run.log_digest = run.log_upload_id = run.log_size_bytes = None
    run.log_reason = run.state_digest = run.log_job_id = None
    run.log_deleted_at = now(session)
    session.flush()
    return upload_id


def delete_run(session: Session, *, tenant_id: str, run_id: str, device_id: str | None = None) -> str | None:
    """Forget a run and its log; return the upload to erase, as `delete_log` does. Raises NotFoundError."""
    upload_id = delete_log(session, tenant_id=tenant_id, run_id=run_id, device_id=device_id)
    run = get(session, tenant_id=tenant_id, run_id=run_id, device_id=device_id)
    if run.newest:
        earlier = select(Run).where(*_of_same_version(run), Run.run_id != run_id)
        before = session.scalar(earlier.order_by(Run.ended_at.desc()).limit(1))
        if before is not None:
            before.newest = True
    run.metrics, run.deleted_at, run.newest = {}, now(session), False
    run.release = run.version = run.outcome = run.gain = run.loss = run.rise = None
    run.peak_rss_bytes = None
    return upload_id


def _lock(session: Session, run: Run) -> Run:
    """The run as it is now, for change. The job of its log is locked before it, by whoever needs both.

    Raises NotFoundError when it was deleted meanwhile.
    """
    session.refresh(run, with_for_update={"key_share": True})
    if run.deleted_at is not None:
        raise NotFoundError(f"no run {run.run_id!r}")
    return run


def _queue_replay(session: Session, run: Run, log: SentLog) -> Job:
    """Write into a locked run that its log has come."""
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
    session.flush()
    return job
