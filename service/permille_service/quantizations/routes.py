"""Routes of quantizations."""

from typing import Annotated

from fastapi import APIRouter, Body, Request, Response

from permille.schemas.fields import Page
from permille.schemas.jobs import Job, JobKind
from permille.schemas.problems import ProblemType
from permille.schemas.quantizations import Quantization, QuantizationCreate, options_of, payload_of
from permille.store import results, tables
from permille_service.access.principals import Viewer
from permille_service.context import Served
from permille_service.jobs.submission import JOB_RESPONSES, Submitting
from permille_service.openapi_examples import QUANTIZATION_EXAMPLES
from permille_service.paging import DEFAULT_LIMIT, Cursor, Limit, page_of, store_cursor
from permille_service.parameters import OfModel, QuantizationId
from permille_service.preflights.planning import check_quantization
from permille_service.problems import PRIVATE, documented
from permille_service.reports import PICTURE_RESPONSES, REPORT_RESPONSES, report_response

router = APIRouter(
    prefix="/v1/quantizations",
    tags=["quantizations"],
    responses=documented(*PRIVATE, ProblemType.NOT_FOUND),
)


@router.post("", status_code=202, responses=JOB_RESPONSES)
def create_quantization(
    body: Annotated[QuantizationCreate, Body(openapi_examples=QUANTIZATION_EXAMPLES)],
    submission: Submitting,
) -> Job:
    """Start coding a model's dense weights."""
    payload = {
        "model_id": body.model_id,
        "evaluation_corpus_id": body.evaluation_corpus_id,
        **payload_of(body.options),
    }
    return submission.start(JobKind.QUANTIZATION, payload, check_quantization, body)


@router.get("")
def list_quantizations(
    service: Served,
    operator: Viewer,
    model_id: OfModel = None,
    limit: Limit = DEFAULT_LIMIT,
    cursor: Cursor = None,
) -> Page[Quantization]:
    """List finished quantizations, newest first."""
    with service.database.read() as session:
        page = results.list_quantizations(
            session,
            tenant_id=operator.tenant_id,
            model_id=model_id,
            limit=limit,
            cursor=store_cursor(cursor),
        )
    return page_of(page, present)


@router.get("/{quantization_id}")
def get_quantization(quantization_id: QuantizationId, service: Served, operator: Viewer) -> Quantization:
    """Read one quantization."""
    with service.database.read() as session:
        row = results.get_quantization(session, tenant_id=operator.tenant_id, quantization_id=quantization_id)
    return present(row)


@router.get("/{quantization_id}/report", response_class=Response, responses=REPORT_RESPONSES)
def get_quantization_report(
    quantization_id: QuantizationId, request: Request, service: Served, operator: Viewer
) -> Response:
    """What a quantization costs: reconstruction error by tensor, perplexity before and after."""
    with service.database.read() as session:
        row = results.get_quantization(session, tenant_id=operator.tenant_id, quantization_id=quantization_id)
    return report_response(request, service, row.report_digest, "application/json")


@router.get("/{quantization_id}/report.png", response_class=Response, responses=PICTURE_RESPONSES)
def get_quantization_picture(
    quantization_id: QuantizationId, request: Request, service: Served, operator: Viewer
) -> Response:
    """What a quantization costs, as a picture."""
    with service.database.read() as session:
        row = results.get_quantization(session, tenant_id=operator.tenant_id, quantization_id=quantization_id)
    return report_response(request, service, row.picture_digest, "image/png")


def present(row: tables.QuantizationRow) -> Quantization:
    """The record of a row."""
    return Quantization(
        id=row.id,
        model_id=row.model_id,
        job_id=row.job_id,
        options=options_of(row.options),
        evaluation_corpus_id=row.evaluation_corpus_id,
        digest=row.dense_digest,
        size_bytes=row.size_bytes,
        created_at=row.created_at,
    )
