"""Routes of runs.

A device writes and reads its own runs. Operators read the runs of their tenant. Devices and operators can
delete a run or its log. Instead of a log, a device may send a packed state by the same routes."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from anyio import CancelScope
from fastapi import APIRouter, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from permille.errors import PermilleError
from permille.package.blobs import BlobFolder
from permille.schemas.access import Role
from permille.schemas.fields import MAX_INTEGER, Name, Page
from permille.schemas.problems import ProblemType
from permille.schemas.runs import (
    LOG_MEDIA_TYPE,
    STATE_MEDIA_TYPE,
    UPLOAD_EXAMPLES,
    LogAccepted,
    LogForm,
    LogState,
    Outcome,
    Run,
    RunCreate,
    RunLog,
    RunMetrics,
)
from permille.store import runs, tables, uploads
from permille.store.jobs.dispatch import dispatch
from permille.zo.log import MAX_HEAD_BYTES
from permille.zo.replay import check_replay_work
from permille_service.access.principals import (
    Anyone,
    CallingDevice,
    DevicePrincipal,
    Operator,
    Viewer,
    changing,
    require_role,
)
from permille_service.context import Served, Service
from permille_service.parameters import (
    BINARY,
    MomentPaging,
    OfDevice,
    RunId,
    media_type_of,
    page_of,
    raw_body,
)
from permille_service.problems import PRIVATE, documented

logger = logging.getLogger(__name__)
router = APIRouter(prefix="/v1/runs", tags=["runs"], responses=documented(*PRIVATE, ProblemType.NOT_FOUND))

# `application/octet-stream` does not say what the body is. Such a body counts as a log.
_FORMS = {
    LOG_MEDIA_TYPE: LogForm.LOG,
    STATE_MEDIA_TYPE: LogForm.STATE,
    "application/octet-stream": LogForm.LOG,
}


@router.post(
    "",
    status_code=201,
    responses={
        200: {"model": Run, "description": "this run has already been reported"},
        **documented(ProblemType.CONFLICT, ProblemType.QUOTA_SPENT, ProblemType.TOO_MANY_REQUESTS),
    },
)
def create_run(body: RunCreate, response: Response, service: Served, device: CallingDevice) -> Run:
    """Report a run. A report holds numbers and words from fixed lists, never the user's text. The device
    chooses the id of the run, so that a report that it sends twice is stored once."""

    def work(session: Session) -> tuple[tables.Run, bool]:
        row, created = runs.report(
            session,
            tenant_id=device.tenant_id,
            device_id=device.device_id,
            run_id=body.run_id,
            metrics=body.metrics.model_dump(mode="json", exclude_unset=True),
        )
        if created:
            uploads.check_runs(session, device_id=device.device_id, quota=service.settings.quota)
        return row, created

    # If two equal reports come at once, the second one fails to insert its row. It then finds the first one.
    row, created = service.database.transact(work)
    response.status_code = 201 if created else 200
    response.headers["Location"] = f"/v1/runs/{row.run_id}"
    return present(row)


@router.get("")
def list_runs(
    service: Served,
    operator: Viewer,
    window: MomentPaging,
    device_id: OfDevice = None,
    release: Annotated[Name | None, Query(description="list only runs on this release")] = None,
    version: Annotated[
        int | None, Query(ge=1, le=MAX_INTEGER, description="list only runs on this version")
    ] = None,
    outcome: Annotated[Outcome | None, Query(description="list only runs with this outcome")] = None,
) -> Page[Run]:
    """List runs. Those that ended last come first."""
    wanted = runs.RunFilter(device_id=device_id, release=release, version=version, outcome=outcome)
    with service.database.read() as session:
        page = runs.list_runs(session, tenant_id=operator.tenant_id, wanted=wanted, window=window)
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
    openapi_extra=raw_body(UPLOAD_EXAMPLES, BINARY),
    responses=documented(
        ProblemType.CONFLICT,
        ProblemType.QUOTA_SPENT,
        ProblemType.UNSUPPORTED_MEDIA_TYPE,
        ProblemType.PACKAGE_REFUSED,
        ProblemType.TOO_MANY_REQUESTS,
    ),
)
async def put_run_log(run_id: RunId, request: Request, service: Served, device: CallingDevice) -> LogAccepted:
    """Share the log or the packed state of a run. The device's owner must have agreed. The service checks the
    upload once, keeps it private, and deletes it on request."""
    form = _FORMS[media_type_of(request, _FORMS)]
    upload_id = await run_in_threadpool(_begin, service, device, run_id)
    folder = uploads.open_folder(service.blobs, tenant_id=device.tenant_id, upload_id=upload_id)
    size_bytes = 0
    try:
        with uploads.writer(folder) as writer:
            async for chunk in request.stream():
                size_bytes += await run_in_threadpool(writer.write, chunk)
            digest = await run_in_threadpool(writer.commit)
        log = runs.SentLog(form=form, digest=digest, size_bytes=size_bytes, upload_id=upload_id)
        accepted = await run_in_threadpool(_attach, service, device, run_id, folder, log)
    except BaseException:
        # If the client disconnects, this task is cancelled. The upload must be given up nevertheless.
        with CancelScope(shield=True):
            await run_in_threadpool(_give_up, service, folder, upload_id, size_bytes)
        raise
    await run_in_threadpool(dispatch, service.dispatcher, [accepted.job_id])
    return accepted


@router.delete("/{run_id}/log", status_code=204)
def delete_run_log(run_id: RunId, service: Served, principal: Anyone) -> None:
    """Delete the log of a run, with the uploaded bytes. It is no error if the log is deleted already."""
    with _erasing(service, principal) as session:
        upload_id = runs.delete_log(
            session, tenant_id=principal.tenant_id, run_id=run_id, device_id=_device_of(principal)
        )
    _erase(service, principal.tenant_id, upload_id)


@router.delete("/{run_id}", status_code=204)
def delete_run(run_id: RunId, service: Served, principal: Anyone) -> None:
    """Delete a run, its metrics and its log."""
    with _erasing(service, principal) as session:
        upload_id = runs.delete_run(
            session, tenant_id=principal.tenant_id, run_id=run_id, device_id=_device_of(principal)
        )
    _erase(service, principal.tenant_id, upload_id)


def present(row: tables.Run) -> Run:
    """Return the record of a run."""
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
        ended_at=row.ended_at,
        metrics=RunMetrics.model_validate(row.metrics),
        log=log,
    )


def _device_of(principal: Operator | DevicePrincipal) -> str | None:
    return principal.device_id if isinstance(principal, DevicePrincipal) else None


@contextmanager
def _erasing(service: Service, principal: Operator | DevicePrincipal) -> Iterator[Session]:
    """Open the transaction in which a run or log is erased.

    A device may erase its own runs. An operator needs the role `operator`, and the audit log gets an entry.
    """
    if isinstance(principal, DevicePrincipal):
        with service.database.write() as session:
            yield session
        return
    with changing(service, require_role(principal, Role.OPERATOR)) as session:
        yield session


def _begin(service: Service, device: DevicePrincipal, run_id: str) -> str:
    """Add the row of an upload, and return its id.

    Raises:
        NotFoundError: the device has no such run.
        QuotaError: the device has reached a limit on uploads.
    """
    tenant_id, device_id = device.tenant_id, device.device_id
    with service.database.write() as session:
        runs.get(session, tenant_id=tenant_id, run_id=run_id, device_id=device_id)
        quota = service.settings.quota
        return uploads.begin(session, tenant_id=tenant_id, device_id=device_id, run_id=run_id, quota=quota).id


def _attach(
    service: Service, device: DevicePrincipal, run_id: str, folder: BlobFolder, log: runs.SentLog
) -> LogAccepted:
    """Attach the log to its run. If the run has the same log already, drop the new bytes.

    Raises:
        PackageError: `log-limit`: the replay of the log would take too long.
    """
    if log.form is LogForm.LOG:
        with folder.open(log.digest) as file:
            check_replay_work(file.read(MAX_HEAD_BYTES))
    with service.database.write() as session:
        run, job = runs.attach_log(
            session, tenant_id=device.tenant_id, device_id=device.device_id, run_id=run_id, log=log
        )
    if run.log_upload_id != log.upload_id:
        _give_up(service, folder, log.upload_id, log.size_bytes)
    return LogAccepted(job_id=job.id)


def _give_up(service: Service, folder: BlobFolder, upload_id: str, size_bytes: int) -> None:
    """Erase the bytes of an unused upload. If the database does not answer, a later sweep erases them."""
    try:
        with service.database.write() as session:
            ours = uploads.give_up(session, upload_id=upload_id, size_bytes=size_bytes)
    except DBAPIError as exc:
        logger.warning("cannot erase upload %s now, so the next sweep will: %s", upload_id, exc)
        return
    if ours:
        _erase_bytes(folder)


def _erase(service: Service, tenant_id: str, upload_id: str | None) -> None:
    if upload_id is not None:
        _erase_bytes(uploads.open_folder(service.blobs, tenant_id=tenant_id, upload_id=upload_id))


def _erase_bytes(folder: BlobFolder) -> None:
    """Erase the bytes of an upload that the database marks for deletion. If the bucket or the disk refuses, a
    later sweep erases them."""
    try:
        folder.erase()
    except (PermilleError, OSError) as exc:
        logger.warning("cannot erase an upload now, so the next sweep will: %s", exc)
