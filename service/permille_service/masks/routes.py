"""Routes of masks."""

from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response

from permille.schemas.fields import Page
from permille.schemas.jobs import Job, JobKind
from permille.schemas.masks import FisherMask, Mask, MaskCreate, MaskOptions, WeightMask
from permille.schemas.problems import ProblemType
from permille.store import results, tables
from permille_service.access.principals import Viewer
from permille_service.context import Served
from permille_service.jobs.submission import JOB_RESPONSES, Submitting
from permille_service.openapi_examples import MASK_EXAMPLES
from permille_service.paging import DEFAULT_LIMIT, Cursor, Limit, page_of, store_cursor
from permille_service.parameters import MaskId, OfModel
from permille_service.preflights.planning import check_mask
from permille_service.problems import PRIVATE, documented
from permille_service.reports import PICTURE_RESPONSES, REPORT_RESPONSES, report_response

router = APIRouter(prefix="/v1/masks", tags=["masks"], responses=documented(*PRIVATE, ProblemType.NOT_FOUND))


@router.post("", status_code=202, responses=JOB_RESPONSES)
def create_mask(
    body: Annotated[MaskCreate, Body(openapi_examples=MASK_EXAMPLES)],
    submission: Submitting,
) -> Job:
    """Start choosing the sensitive weights of a model."""
    return submission.start(
        JobKind.MASK,
        {"model_id": body.model_id, "corpus_id": corpus_of(body), **options_of(body)},
        check_mask,
        body,
    )


@router.get("")
def list_masks(
    service: Served,
    operator: Viewer,
    model_id: OfModel = None,
    limit: Limit = DEFAULT_LIMIT,
    cursor: Cursor = None,
) -> Page[Mask]:
    """List finished masks, newest first."""
    with service.database.read() as session:
        page = results.list_masks(
            session,
            tenant_id=operator.tenant_id,
            model_id=model_id,
            limit=limit,
            cursor=store_cursor(cursor),
        )
    return page_of(page, present)


@router.get("/{mask_id}")
def get_mask(mask_id: MaskId, service: Served, operator: Viewer) -> Mask:
    """Read one mask."""
    with service.database.read() as session:
        return present(results.get_mask(session, tenant_id=operator.tenant_id, mask_id=mask_id))


@router.get("/{mask_id}/report", response_class=Response, responses=REPORT_RESPONSES)
def get_mask_report(mask_id: MaskId, request: Request, service: Served, operator: Viewer) -> Response:
    """The evidence behind a mask: the coverage curve and the table by tensor."""
    with service.database.read() as session:
        digest = results.get_mask(session, tenant_id=operator.tenant_id, mask_id=mask_id).report_digest
    return report_response(request, service, digest, "application/json")


@router.get("/{mask_id}/report.png", response_class=Response, responses=PICTURE_RESPONSES)
def get_mask_picture(mask_id: MaskId, request: Request, service: Served, operator: Viewer) -> Response:
    """The evidence behind a mask as a picture."""
    with service.database.read() as session:
        digest = results.get_mask(session, tenant_id=operator.tenant_id, mask_id=mask_id).picture_digest
    return report_response(request, service, digest, "image/png")


def present(row: tables.Mask) -> Mask:
    """The record of a row."""
    return Mask(
        id=row.id,
        model_id=row.model_id,
        corpus_id=row.corpus_id,
        job_id=row.job_id,
        options=MaskOptions.model_validate(
            {name: row.options.get(name) for name in MaskOptions.model_fields}
        ),
        k=row.k,
        digest=row.mask_digest,
        created_at=row.created_at,
    )


def corpus_of(mask: FisherMask | WeightMask) -> str | None:
    """The corpus that a mask reads, if any."""
    return mask.corpus_id if isinstance(mask, FisherMask) else None


def options_of(mask: FisherMask | WeightMask) -> dict[str, Any]:
    """The options as a job's payload has them."""
    return mask.model_dump(mode="json", include=set(MaskOptions.model_fields))
