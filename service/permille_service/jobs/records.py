"""Job rows as records."""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy.orm import Session

from permille.schemas.jobs import Job, JobError, JobEvent, JobKind, JobProgress, JobState
from permille.store import jobs, results, tables
from permille.store.errors import NotFoundError
from permille.store.paging import MAX_LIMIT

_COLLECTIONS = {
    "mask": "masks",
    "quantization": "quantizations",
    "run": "runs",
    "package": "packages",
}


def present(session: Session, row: tables.Job) -> Job:
    """The record of a row; a build's children are looked up."""
    made = _result_id(session, row)
    return Job(
        id=row.id,
        kind=JobKind(row.kind),
        state=JobState(row.state),
        parent_id=row.parent_id,
        children=[child.id for child in children_of(session, row)],
        attempt=row.attempt,
        progress=JobProgress(
            fraction=min(max(row.progress, 0.0), 1.0),
            message=row.message,
            seconds_left=None if row.eta_at is None else _seconds_until(row.eta_at),
        ),
        error=_error(row.error),
        result=_path(row.result_kind, made),
        result_id=made,
        cancel_requested=row.cancel_requested_at is not None,
        created_at=row.created_at,
        started_at=row.started_at,
        finished_at=row.ended_at,
    )


def children_of(session: Session, row: tables.Job) -> list[tables.Job]:
    """A build's child jobs, oldest first; of other jobs none."""
    if row.kind != JobKind.BUILD:
        return []
    page = jobs.list_jobs(session, tenant_id=row.tenant_id, parent_id=row.id, limit=MAX_LIMIT)
    return sorted(page.items, key=lambda child: child.id)


def present_event(row: tables.JobEvent) -> JobEvent:
    """The record of an event."""
    return JobEvent(seq=row.seq, job_id=row.job_id, kind=row.kind, data=row.data, created_at=row.at)


def _seconds_until(at: datetime) -> float:
    return max(0.0, (at - datetime.now(UTC)).total_seconds())


def _error(error: dict[str, Any] | None) -> JobError | None:
    if error is None:
        return None
    return JobError(
        type=str(error.get("type", "error")),
        message=str(error.get("message", "")),
        retryable=bool(error.get("retryable", False)),
    )


def _path(kind: str | None, made: str | None) -> str | None:
    return None if kind is None or made is None else f"/v1/{_COLLECTIONS.get(kind, kind)}/{made}"


def _result_id(session: Session, row: tables.Job) -> str | None:
    """The id of what the job made, as its path has it; None while there is nothing."""
    if row.result_kind != "package" or row.result_id is None:
        return row.result_id
    try:
        package = results.get_package_by_id(session, tenant_id=row.tenant_id, package_id=row.result_id)
    except NotFoundError:
        return None
    return package.digest
