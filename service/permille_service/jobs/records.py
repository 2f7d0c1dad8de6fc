"""Conversion of the database rows of jobs and events to records of the API."""

from datetime import UTC, datetime

from sqlalchemy.orm import Session

from permille.schemas.jobs import (
    EventData,
    EventKind,
    Job,
    JobError,
    JobEvent,
    JobKind,
    JobProgress,
    JobState,
)
from permille.schemas.kinds import result_path
from permille.store import tables
from permille.store.jobs import queue

_PUBLISHED = set(EventData.model_fields) - {"error"}


def present(session: Session, row: tables.Job) -> Job:
    """Return the record of a job, with the ids of its parts."""
    kind = JobKind(row.kind)
    return Job(
        id=row.id,
        kind=kind,
        state=JobState(row.state),
        parent_id=row.parent_id,
        children=queue.ids_of_parts(session, row),
        attempt=row.attempt,
        progress=JobProgress(
            fraction=min(max(row.progress, 0.0), 1.0),
            message=row.message,
            seconds_left=None if row.eta_at is None else _seconds_until(row.eta_at),
        ),
        error=_error(row.error),
        result=None if row.result_id is None else result_path(kind, row.result_id),
        result_id=row.result_id,
        cancel_requested=row.cancel_requested_at is not None,
        created_at=row.created_at,
        started_at=row.started_at,
        finished_at=row.ended_at,
    )


def present_event(row: tables.JobEvent) -> JobEvent:
    """Return the record of an event. Leave out the fields that only the log may show, such as tracebacks."""
    told = {name: value for name, value in row.data.items() if name in _PUBLISHED}
    return JobEvent(
        seq=row.seq,
        job_id=row.job_id,
        kind=EventKind(row.kind),
        data=EventData.model_validate({**told, "error": _error(row.data.get("error"))}),
        created_at=row.at,
    )


def _seconds_until(at: datetime) -> float:
    return max(0.0, (at - datetime.now(UTC)).total_seconds())


def _error(error: object) -> JobError | None:
    if not isinstance(error, dict):
        return None
    return JobError(
        type=str(error.get("type", "error")),
        message=str(error.get("message", "")),
        retryable=bool(error.get("retryable", False)),
    )
