"""The routes of every kind of work: create, list, read, delete, and read the report.

`permille.schemas.kinds` describes each kind of work: its request, record, path and texts. This module makes
the routes from these descriptions.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Body, Query, Request, Response
from sqlalchemy.orm import Session

from permille.schemas.fields import Closed, Page
from permille.schemas.jobs import Job, JobKind, JobState
from permille.schemas.kinds import WORK
from permille.schemas.packages import Build
from permille.schemas.problems import ProblemType
from permille.schemas.work import WorkKind
from permille.store import artifacts, rows, tables
from permille.store.artifacts import REPORT
from permille.store.jobs import queue
from permille_service.access.principals import Maker, Viewer, changing
from permille_service.content import blob_response, content_responses
from permille_service.context import Served
from permille_service.creation import JOB_RESPONSES, Creating
from permille_service.parameters import OfModel, Paging, key_of, page_of
from permille_service.problems import PRIVATE, ApiError, documented

Again = Annotated[
    bool, Query(description="do the work again, even if an equal request has already succeeded")
]


def router_of(work: WorkKind) -> APIRouter:
    """Return a router with all routes of a kind."""
    router = APIRouter(
        prefix=f"/v1/{work.collection}",
        tags=[work.collection],
        responses=documented(*PRIVATE, ProblemType.NOT_FOUND),
    )
    _add_create(router, work)
    if work.kind in _PRESENTED:
        _add_jobs(router, work)
    else:
        _add_artifacts(router, work)
    if work.shows is not None:
        _add_report(router, work, work.shows)
    return router


def _add_create(router: APIRouter, work: WorkKind) -> None:
    def create(
        body: Annotated[work.request, Body()],  # type: ignore[name-defined]
        creating: Creating,
        again: Again = False,
    ) -> Job:
        return creating.start(work.kind, body, again=again)

    router.add_api_route(
        "",
        create,
        methods=["POST"],
        status_code=202,
        name=f"create_{work.kind}",
        description=work.starts,
        responses=JOB_RESPONSES,
    )


def _add_artifacts(router: APIRouter, work: WorkKind) -> None:
    def list_rows(
        service: Served, operator: Viewer, window: Paging, model_id: OfModel = None
    ) -> Page[Closed]:
        with service.database.read() as session:
            page = artifacts.list_artifacts(
                session, tenant_id=operator.tenant_id, kind=work.kind, model_id=model_id, window=window
            )
        return page_of(page, lambda row: present_artifact(work, row))

    def read_row(
        key: Annotated[str, key_of(work.prefix, alias=work.key)], service: Served, operator: Viewer
    ) -> Closed:
        with service.database.read() as session:
            row = artifacts.get(session, tenant_id=operator.tenant_id, kind=work.kind, key=key)
        return present_artifact(work, row)

    def remove(
        key: Annotated[str, key_of(work.prefix, alias=work.key)], service: Served, operator: Maker
    ) -> None:
        with changing(service, operator) as session:
            artifacts.remove(session, tenant_id=operator.tenant_id, kind=work.kind, key=key)

    _add_reads(router, work, list_rows, read_row)
    _add_removal(
        router,
        work,
        remove,
        f"Delete a {work.kind} that nothing uses. The next collection of blobs frees its disk space.",
    )


def _add_jobs(router: APIRouter, work: WorkKind) -> None:
    """Add the routes of a kind whose records are its jobs.

    For example, the records of builds are jobs, and the packages that builds make are in another collection.
    """
    present = _PRESENTED[work.kind]

    def list_rows(service: Served, operator: Viewer, window: Paging) -> Page[Closed]:
        with service.database.read() as session:
            wanted = queue.JobFilter(kind=work.kind)
            page = queue.list_jobs(session, tenant_id=operator.tenant_id, wanted=wanted, window=window)
            return page_of(page, lambda row: present(session, row))

    def read_row(
        key: Annotated[str, key_of(work.prefix, alias=work.key)], service: Served, operator: Viewer
    ) -> Closed:
        with service.database.read() as session:
            row = rows.get(session, tables.Job, tenant_id=operator.tenant_id, row_id=key)
            if row.kind != work.kind:  # ids of all kinds of jobs have the same form
                raise ApiError(ProblemType.NOT_FOUND, f"This job is not of kind {work.kind}, but {row.kind}.")
            return present(session, row)

    def remove(
        key: Annotated[str, key_of(work.prefix, alias=work.key)], service: Served, operator: Maker
    ) -> None:
        with changing(service, operator) as session:
            queue.remove(session, tenant_id=operator.tenant_id, kind=work.kind, job_id=key)

    _add_reads(router, work, list_rows, read_row)
    _add_removal(router, work, remove, "Delete a job that has ended. Delete its results first.")


def _add_removal(router: APIRouter, work: WorkKind, remove: Any, text: str) -> None:
    router.add_api_route(
        f"/{{{work.key}}}",
        remove,
        methods=["DELETE"],
        status_code=204,
        name=f"delete_{work.kind}",
        description=text,
        responses=documented(ProblemType.CONFLICT),
    )


def _add_reads(router: APIRouter, work: WorkKind, list_rows: Any, read_row: Any) -> None:
    router.add_api_route(
        "",
        list_rows,
        name=f"list_{work.collection}",
        response_model=Page[work.record],  # type: ignore[name-defined]
        description=f"List {work.collection}, newest first.",
    )
    router.add_api_route(
        f"/{{{work.key}}}",
        read_row,
        name=f"get_{work.kind}",
        response_model=work.record,
        description=f"Read one {work.kind}.",
    )


def _add_report(router: APIRouter, work: WorkKind, text: str) -> None:
    def read_report(
        key: Annotated[str, key_of(work.prefix, alias=work.key)],
        request: Request,
        service: Served,
        operator: Viewer,
    ) -> Response:
        with service.database.read() as session:
            row = artifacts.get(session, tenant_id=operator.tenant_id, kind=work.kind, key=key)
        blob = artifacts.blob_of(row, REPORT)
        if blob is None:
            raise ApiError(ProblemType.NOT_FOUND, f"This {work.kind} has no report.")
        return blob_response(request, service, blob)

    router.add_api_route(
        f"/{{{work.key}}}/report",
        read_report,
        name=f"get_{work.kind}_report",
        response_class=Response,
        responses=content_responses("the report", "application/json"),
        description=text,
    )


def present_artifact(work: WorkKind, row: tables.Artifact) -> Closed:
    """Return the record of an artifact's row, with the fields that its kind declares."""
    known = {
        "id": row.id,
        "model_id": row.model_id,
        "job_id": row.job_id,
        "request": row.request,
        "digest": row.digest,
        "k": row.k,
        "made_model_id": row.made_model_id,
        "size_bytes": row.size_bytes,
        "created_at": row.created_at,
        "layers": [
            {
                "role": blob.role,
                "media_type": blob.media_type,
                "digest": blob.digest,
                "size_bytes": blob.size_bytes,
                "path": blob.path,
            }
            for blob in row.blobs
            if blob.role != artifacts.MANIFEST
        ],
    }
    return work.record.model_validate({name: known[name] for name in work.record.model_fields})


def present_build(session: Session, row: tables.Job) -> Build:
    """Return the record of a build. It names the results of the build's parts."""
    made = {part.kind: part.result_id for part in queue.parts_of(session, row)}
    return Build.model_validate(
        {
            "id": row.id,
            "state": JobState(row.state),
            "model_id": row.payload["model_id"],
            "request": row.payload,
            "mask_id": made.get(JobKind.MASK),
            "quantization_id": made.get(JobKind.QUANTIZATION),
            "package_digest": made.get(JobKind.PACKAGE),
            "created_at": row.created_at,
        }
    )


def present_made(_: Session, row: tables.Job) -> Closed:
    """Return the record of a job that makes a package from another package."""
    return WORK[JobKind(row.kind)].record.model_validate(
        {
            "id": row.id,
            "state": JobState(row.state),
            "request": row.payload,
            "package_digest": row.result_id,
            "created_at": row.created_at,
        }
    )


_PRESENTED = {JobKind.BUILD: present_build, JobKind.EXPORT: present_made}
