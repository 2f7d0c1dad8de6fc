"""Routes of runs. A device writes and reads its own; operators read those of their tenant; either deletes a
log. What stands for one, a packed state, comes and goes the same way."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from sqlalchemy.orm import Session

from permille.schemas.access import Role
from permille.schemas.fields import Page
from permille.schemas.problems import ProblemType
from permille.schemas.runs import (
    LOG_MEDIA_TYPE,
    STATE_MEDIA_TYPE,
    LogAccepted,
    LogForm,
    LogState,
    Run,
    RunCreate,
    RunLog,
    RunMetrics,
)
from permille.store import runs, tables
from permille.store.jobs.dispatch import dispatch
from permille_service.access.principals import (
    RANK,
    Anyone,
    CallingDevice,
    DevicePrincipal,
    Operator,
    Viewer,
    changing,
)
from permille_service.context import Served, Service
from permille_service.parameters import MomentPaging, OfDevice, RunId, page_of
from permille_service.problems import PRIVATE, ApiError, documented

router = APIRouter(prefix="/v1/runs", tags=["runs"], responses=documented(*PRIVATE, ProblemType.NOT_FOUND))

_FORMS = {LOG_MEDIA_TYPE: LogForm.LOG, STATE_MEDIA_TYPE: LogForm.STATE}
_LOG_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {media_type: {"schema": {"type": "string", "format": "binary"}} for media_type in _FORMS},
    }
}


@router.post(
    "",
    status_code=201,
    responses={
        200: {"model": Run, "description": "this run was reported before"},
        **documented(ProblemType.CONFLICT),
    },
)
def create_run(body: RunCreate, response: Response, service: Served, device: CallingDevice) -> Run:
    """Report a run: numbers and closed sets only. The id is the device's, so that a report may be sent
    again."""
    with service.database.write() as session:
        row, created = runs.report(
            session,
            tenant_id=device.tenant_id,
            device_id=device.device_id,
            run_id=body.run_id,
            metrics=body.metrics.model_dump(mode="json"),
        )
    response.status_code = 201 if created else 200
    response.headers["Location"] = f"/v1/runs/{row.run_id}"
    return present(row)


@router.get("")
def list_runs(
    service: Served,
    operator: Viewer,
    window: MomentPaging,
    device_id: OfDevice = None,
) -> Page[Run]:
    """List runs, the newest first."""
    with service.database.read() as session:
        page = runs.list_runs(session, tenant_id=operator.tenant_id, device_id=device_id, window=window)
    return page_of(page, present)


@router.get("/{run_id}")
def get_run(run_id: RunId, service: Served, principal: Anyone) -> Run:
    """Read one run and the state of its log."""
    with service.database.read() as session:
        row = runs.get(session, tenant_id=principal.tenant_id, run_id=run_id, device_id=_device_of(principal))
    return present(row)


@router.put(
    "/{run_id}/log",
    status_code=202,
    openapi_extra=_LOG_BODY,
    responses=documented(ProblemType.CONFLICT, ProblemType.UNSUPPORTED_MEDIA_TYPE),
)
async def put_run_log(run_id: RunId, request: Request, service: Served, device: CallingDevice) -> LogAccepted:
    """Share the log of a run, or the packed state where that is shorter, by the user's choice: stored,
    checked once, kept private, deleted on request."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in _FORMS:
        raise ApiError(
            ProblemType.UNSUPPORTED_MEDIA_TYPE, f"expected {' or '.join(_FORMS)}, got {media_type[:60]!r}"
        )
    await run_in_threadpool(_check_run, service, device, run_id)
    with service.blobs.writer() as writer:
        async for chunk in request.stream():
            await run_in_threadpool(writer.write, chunk)
        digest = await run_in_threadpool(writer.commit)
        log = runs.SentLog(form=_FORMS[media_type], digest=digest, size_bytes=writer.size_bytes)
    job_id = await run_in_threadpool(_attach, service, device, run_id, log)
    await run_in_threadpool(dispatch, service.dispatcher, [job_id])
    return LogAccepted(job_id=job_id)


@router.delete("/{run_id}/log", status_code=204)
def delete_run_log(run_id: RunId, service: Served, principal: Anyone) -> None:
    """Forget the log of a run and its bytes. Idempotent."""
    with _erasing(service, principal) as session:
        digest = runs.delete_log(
            session, tenant_id=principal.tenant_id, run_id=run_id, device_id=_device_of(principal)
        )
    if digest is not None:
        service.blobs.delete(digest)


@router.delete("/{run_id}", status_code=204)
def delete_run(run_id: RunId, service: Served, principal: Anyone) -> None:
    """Forget a run, its metrics and its log."""
    with _erasing(service, principal) as session:
        digest = runs.delete_run(
            session, tenant_id=principal.tenant_id, run_id=run_id, device_id=_device_of(principal)
        )
    if digest is not None:
        service.blobs.delete(digest)


def present(row: tables.Run) -> Run:
    """The record of a row."""
    log = None
    if row.log_state is not None and row.log_form is not None and row.log_digest is not None:
        log = RunLog(
            form=LogForm(row.log_form),
            state=LogState(row.log_state),
            log_digest=row.log_digest,
            state_digest=row.state_digest,
            reason=row.log_reason,
            size_bytes=row.log_size_bytes or 0,
            job_id=row.log_job_id,
        )
    return Run(
        run_id=row.run_id,
        device_id=row.device_id,
        created_at=row.created_at,
        metrics=RunMetrics.model_validate(row.metrics),
        log=log,
    )


def _device_of(principal: Operator | DevicePrincipal) -> str | None:
    return principal.device_id if isinstance(principal, DevicePrincipal) else None


@contextmanager
def _erasing(service: Service, principal: Operator | DevicePrincipal) -> Iterator[Session]:
    """The transaction of an erasure: an operator's is noted, and a viewer's is refused."""
    if isinstance(principal, DevicePrincipal):
        with service.database.write() as session:
            yield session
        return
    if RANK[principal.role] < RANK[Role.OPERATOR]:
        raise ApiError(ProblemType.FORBIDDEN, f"expected the role operator, got {principal.role}")
    with changing(service, principal) as session:
        yield session


def _check_run(service: Service, device: DevicePrincipal, run_id: str) -> None:
    with service.database.read() as session:
        runs.get(session, tenant_id=device.tenant_id, run_id=run_id, device_id=device.device_id)


def _attach(service: Service, device: DevicePrincipal, run_id: str, log: runs.SentLog) -> str:
    """Store that the log has come; where that is refused or fails, its bytes go again."""
    try:
        with service.database.write() as session:
            _, job = runs.attach_log(
                session,
                tenant_id=device.tenant_id,
                device_id=device.device_id,
                run_id=run_id,
                log=log,
            )
            return job.id
    except BaseException:
        with service.database.read() as session:
            kept = runs.log_is_kept(session, log_digest=log.digest)
        if not kept:
            service.blobs.delete(log.digest)
        raise
