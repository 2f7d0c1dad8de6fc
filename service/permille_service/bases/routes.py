"""Routes of bases."""

from typing import Annotated

from fastapi import APIRouter, Body, Request, Response

from permille.schemas.bases import Basis, BasisCreate, BasisOptions
from permille.schemas.fields import Page
from permille.schemas.jobs import Job, JobKind
from permille.schemas.problems import ProblemType
from permille.store import results, tables
from permille_service.access.principals import Viewer
from permille_service.context import Served
from permille_service.jobs.submission import JOB_RESPONSES, Submitting
from permille_service.openapi_examples import BASIS_EXAMPLES
from permille_service.paging import DEFAULT_LIMIT, Cursor, Limit, page_of, store_cursor
from permille_service.parameters import BasisId, OfMask
from permille_service.preflights.planning import check_basis
from permille_service.problems import PRIVATE, documented
from permille_service.reports import REPORT_RESPONSES, report_response

router = APIRouter(prefix="/v1/bases", tags=["bases"], responses=documented(*PRIVATE, ProblemType.NOT_FOUND))


@router.post("", status_code=202, responses=JOB_RESPONSES)
def create_basis(
    body: Annotated[BasisCreate, Body(openapi_examples=BASIS_EXAMPLES)],
    submission: Submitting,
) -> Job:
    """Start learning directions for a mask's weights from public or consenting users' texts."""
    return submission.start(JobKind.BASIS, body.model_dump(mode="json"), check_basis, body)


@router.get("")
def list_bases(
    service: Served,
    operator: Viewer,
    mask_id: OfMask = None,
    limit: Limit = DEFAULT_LIMIT,
    cursor: Cursor = None,
) -> Page[Basis]:
    """List finished bases, newest first."""
    with service.database.read() as session:
        page = results.list_bases(
            session, tenant_id=operator.tenant_id, mask_id=mask_id, limit=limit, cursor=store_cursor(cursor)
        )
    return page_of(page, present)


@router.get("/{basis_id}")
def get_basis(basis_id: BasisId, service: Served, operator: Viewer) -> Basis:
    """Read one basis."""
    with service.database.read() as session:
        return present(results.get_basis(session, tenant_id=operator.tenant_id, basis_id=basis_id))


@router.get("/{basis_id}/report", response_class=Response, responses=REPORT_RESPONSES)
def get_basis_report(basis_id: BasisId, request: Request, service: Served, operator: Viewer) -> Response:
    """The evidence behind a basis: which share of the gradients of left-out texts its first columns hold."""
    with service.database.read() as session:
        digest = results.get_basis(session, tenant_id=operator.tenant_id, basis_id=basis_id).report_digest
    return report_response(request, service, digest, "application/json")


def present(row: tables.Basis) -> Basis:
    """The record of a row."""
    return Basis(
        id=row.id,
        model_id=row.model_id,
        mask_id=row.mask_id,
        corpus_id=row.corpus_id,
        job_id=row.job_id,
        options=BasisOptions.model_validate(row.options),
        k=row.k,
        digest=row.basis_digest,
        size_bytes=row.size_bytes,
        created_at=row.created_at,
    )
