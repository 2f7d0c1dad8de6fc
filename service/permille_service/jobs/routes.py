"""Routes of jobs."""

from typing import Annotated

from fastapi import APIRouter, Depends, Header, Response
from fastapi.responses import StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials

from permille.schemas.fields import MAX_INTEGER, Page
from permille.schemas.jobs import ENDED, Job, JobEvent, JobKind, JobState
from permille.schemas.problems import ProblemType
from permille.store import rows, tables
from permille.store.jobs import queue
from permille.store.jobs.dispatch import dispatch
from permille_service.access.principals import Maker, Viewer, bearer, changing, find_principal
from permille_service.context import Served
from permille_service.jobs import records
from permille_service.jobs.stream import EventStream, stream_events
from permille_service.parameters import DEFAULT_LIMIT, After, JobId, Limit, Paging, page_of
from permille_service.problems import PRIVATE, documented

router = APIRouter(prefix="/v1/jobs", tags=["jobs"], responses=documented(*PRIVATE, ProblemType.NOT_FOUND))

STREAM_SCHEMA = {
    "type": "object",
    "description": "one event of the stream; `data` is a JobEvent as one line of JSON",
    "properties": {name: {"type": "string"} for name in ("id", "event", "data")},
    "required": ["id", "event", "data"],
}
LastEventId = Annotated[
    int | None,
    Header(alias="Last-Event-ID", ge=0, le=MAX_INTEGER, description="resume after this event", examples=[0]),
]


@router.get("")
def list_jobs(
    service: Served,
    operator: Viewer,
    window: Paging,
    kind: JobKind | None = None,
    state: JobState | None = None,
) -> Page[Job]:
    """List jobs, newest first. The list includes jobs that are parts of other jobs."""
    with service.database.read() as session:
        wanted = queue.JobFilter(kind=kind, state=state)
        page = queue.list_jobs(session, tenant_id=operator.tenant_id, wanted=wanted, window=window)
        return page_of(page, lambda row: records.present(session, row))


@router.get("/{job_id}")
def get_job(job_id: JobId, service: Served, operator: Viewer) -> Job:
    """Read one job: its state, its progress and its result."""
    with service.database.read() as session:
        row = rows.get(session, tables.Job, tenant_id=operator.tenant_id, row_id=job_id)
        return records.present(session, row)


@router.post("/{job_id}/cancel", status_code=202)
def cancel_job(job_id: JobId, service: Served, operator: Maker) -> Job:
    """Cancel a job. A queued job ends at once. A running job ends when its worker next checks for a
    cancellation. Idempotent."""
    with changing(service, operator) as session:
        row = queue.request_cancel(session, tenant_id=operator.tenant_id, job_id=job_id)
        return records.present(session, row)


@router.post("/{job_id}/retry", status_code=202, responses=documented(ProblemType.CONFLICT))
def retry_job(job_id: JobId, service: Served, operator: Maker) -> Job:
    """Put a failed, dead or cancelled job back into the queue."""
    with changing(service, operator) as session:
        limit = service.settings.queued_jobs_per_tenant
        queue.check_room(session, tenant_id=operator.tenant_id, limit=limit)
        row = queue.retry(session, tenant_id=operator.tenant_id, job_id=job_id)
        record = records.present(session, row)
    dispatch(service.dispatcher, record.children or [record.id])
    return record


@router.get("/{job_id}/events")
def list_job_events(
    job_id: JobId, service: Served, operator: Viewer, after: After = 0, limit: Limit = DEFAULT_LIMIT
) -> list[JobEvent]:
    """List a job's events, oldest first."""
    with service.database.read() as session:
        found = queue.events_after(
            session, tenant_id=operator.tenant_id, job_id=job_id, seq=after, limit=limit
        )
        return rows.records_of(found, records.present_event)


@router.get(
    "/{job_id}/events/stream",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "the events; the stream ends with the job",
            "content": {"text/event-stream": {"schema": STREAM_SCHEMA}},
        },
        204: {"description": "the job has ended, and the client has received all events: do not reconnect"},
    },
)
def stream_job_events(
    job_id: JobId,
    service: Served,
    operator: Viewer,
    credentials: Annotated[HTTPAuthorizationCredentials, Depends(bearer)],
    last_event_id: LastEventId = None,
) -> Response:
    """Follow a job's events as they come (server-sent events)."""
    after = last_event_id or 0
    with service.database.read() as session:
        job = rows.get(session, tables.Job, tenant_id=operator.tenant_id, row_id=job_id)
        if last_event_id is not None and job.state in ENDED and job.event_seq <= after:
            return Response(status_code=204)
    events = stream_events(
        service,
        tenant_id=operator.tenant_id,
        job_id=job_id,
        after=after,
        still_allowed=lambda: find_principal(service, credentials.credentials) is not None,
    )
    return EventStream(
        events,
        places=(service.streams.hold(operator.token_id), service.tenant_streams.hold(operator.tenant_id)),
    )
