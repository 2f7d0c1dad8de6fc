"""Routes of builds."""

from typing import Annotated

from fastapi import APIRouter, Body
from sqlalchemy.orm import Session

from permille.schemas.builds import Build, BuildCreate
from permille.schemas.fields import Page
from permille.schemas.jobs import Job, JobKind, JobState
from permille.schemas.problems import ProblemType
from permille.schemas.quantizations import payload_of
from permille.store import jobs, results, tables
from permille_service.access.principals import Viewer
from permille_service.context import Served
from permille_service.jobs.records import children_of
from permille_service.jobs.submission import JOB_RESPONSES, Submitting
from permille_service.masks.routes import corpus_of, options_of
from permille_service.openapi_examples import BUILD_EXAMPLES
from permille_service.paging import DEFAULT_LIMIT, Cursor, Limit, page_of, store_cursor
from permille_service.parameters import JobId
from permille_service.preflights.planning import check_build
from permille_service.problems import PRIVATE, ApiError, documented

router = APIRouter(
    prefix="/v1/builds", tags=["builds"], responses=documented(*PRIVATE, ProblemType.NOT_FOUND)
)


@router.post("", status_code=202, responses=JOB_RESPONSES)
def create_build(
    body: Annotated[BuildCreate, Body(openapi_examples=BUILD_EXAMPLES)],
    submission: Submitting,
) -> Job:
    """Start making a package of a model: mask, quantization, package."""
    payload = {
        "model_id": body.model_id,
        "corpus_id": corpus_of(body.mask),
        "mask": options_of(body.mask),
        "quantization": payload_of(body.quantization),
        "evaluation_corpus_id": body.evaluation_corpus_id,
        "fisher_exponents": body.fisher_exponents,
    }
    return submission.start(JobKind.BUILD, payload, check_build, body)


@router.get("")
def list_builds(
    service: Served, operator: Viewer, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = None
) -> Page[Build]:
    """List builds, newest first."""
    with service.database.read() as session:
        page = jobs.list_jobs(
            session,
            tenant_id=operator.tenant_id,
            kind=JobKind.BUILD,
            limit=limit,
            cursor=store_cursor(cursor),
        )
        return page_of(page, lambda row: present(session, row))


@router.get("/{build_id}")
def get_build(build_id: JobId, service: Served, operator: Viewer) -> Build:
    """Read one build and what it has made so far."""
    with service.database.read() as session:
        row = jobs.get(session, tenant_id=operator.tenant_id, job_id=build_id)
        if row.kind != JobKind.BUILD:
            raise ApiError(ProblemType.NOT_FOUND, f"expected a build, got a job of kind {row.kind}")
        return present(session, row)


def present(session: Session, row: tables.Job) -> Build:
    """The record of a build's row and of its parts."""
    made = {child.kind: child.result_id for child in children_of(session, row)}
    package_id = made.get("package")
    package = (
        results.get_package_by_id(session, tenant_id=row.tenant_id, package_id=package_id)
        if package_id
        else None
    )
    return Build(
        id=row.id,
        state=JobState(row.state),
        model_id=str(row.payload["model_id"]),
        mask_id=made.get("mask"),
        quantization_id=made.get("quantization"),
        package_digest=package.digest if package else None,
        created_at=row.created_at,
    )
