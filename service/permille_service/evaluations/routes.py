"""Routes of evaluations."""

from typing import Annotated

from fastapi import APIRouter, Body, Request, Response
from sqlalchemy.orm import Session

from permille.schemas.evaluations import Evaluation, EvaluationCreate, EvaluationOptions
from permille.schemas.fields import Page
from permille.schemas.jobs import Job, JobKind
from permille.schemas.problems import ProblemType
from permille.store import evaluations, tables
from permille_service.access.principals import Viewer
from permille_service.context import Served
from permille_service.jobs.submission import JOB_RESPONSES, Submitting
from permille_service.openapi_examples import EVALUATION_EXAMPLES
from permille_service.paging import DEFAULT_LIMIT, Cursor, Limit, page_of, store_cursor
from permille_service.parameters import EvaluationId, OfModel
from permille_service.preflights.evaluations import check_evaluation
from permille_service.problems import PRIVATE, documented
from permille_service.reports import Responses, report_response

router = APIRouter(
    prefix="/v1/evaluations", tags=["evaluations"], responses=documented(*PRIVATE, ProblemType.NOT_FOUND)
)

LINES_MEDIA_TYPE = "application/x-ndjson"
TABLES_MEDIA_TYPE = "text/markdown; charset=utf-8"


def _text_responses(description: str, media_type: str) -> Responses:
    content = {media_type: {"schema": {"type": "string"}}}
    return {
        200: {"description": description, "content": content},
        206: {"description": "the range that was asked for", "content": content},
        304: {"description": "the content is the one that the client has"},
        **documented(ProblemType.PRECONDITION_FAILED, ProblemType.RANGE_NOT_SATISFIABLE),
    }


@router.post("", status_code=202, responses=JOB_RESPONSES)
def create_evaluation(
    body: Annotated[EvaluationCreate, Body(openapi_examples=EVALUATION_EXAMPLES)],
    submission: Submitting,
) -> Job:
    """Start comparing methods on tasks: a cell for each model, base, task, method and seed. The job's
    progress counts cells and names the one that runs; a job that is taken up again goes on after those that
    are done."""
    return submission.start(JobKind.EVALUATION, body.model_dump(mode="json"), check_evaluation, body)


@router.get("")
def list_evaluations(
    service: Served,
    operator: Viewer,
    model_id: OfModel = None,
    limit: Limit = DEFAULT_LIMIT,
    cursor: Cursor = None,
) -> Page[Evaluation]:
    """List finished evaluations, newest first."""
    with service.database.read() as session:
        page = evaluations.list_evaluations(
            session, tenant_id=operator.tenant_id, model_id=model_id, limit=limit, cursor=store_cursor(cursor)
        )
        return page_of(page, lambda row: present(session, row))


@router.get("/{evaluation_id}")
def get_evaluation(evaluation_id: EvaluationId, service: Served, operator: Viewer) -> Evaluation:
    """Read one finished evaluation. While it runs, its job tells how far it is."""
    with service.database.read() as session:
        row = evaluations.get(session, tenant_id=operator.tenant_id, evaluation_id=evaluation_id)
        return present(session, row)


@router.get(
    "/{evaluation_id}/results",
    response_class=Response,
    responses=_text_responses("a JSON object a line", LINES_MEDIA_TYPE),
)
def get_evaluation_results(
    evaluation_id: EvaluationId, request: Request, service: Served, operator: Viewer
) -> Response:
    """All that was measured, as JSON lines: `kind` is `sweep` (the first), `bad-row`, `trial` (of a search),
    `tuning` (what the search chose) or `cell`. A cell has accuracy, losses and the outcome of each test item,
    so that any two methods can be compared in pairs. Language modelling (`text`) has losses alone: `accuracy`
    and `majority` are null."""
    with service.database.read() as session:
        row = evaluations.get(session, tenant_id=operator.tenant_id, evaluation_id=evaluation_id)
    return report_response(request, service, row.results_digest, LINES_MEDIA_TYPE)


@router.get(
    "/{evaluation_id}/report",
    response_class=Response,
    responses=_text_responses("tables as Markdown", TABLES_MEDIA_TYPE),
)
def get_evaluation_report(
    evaluation_id: EvaluationId, request: Request, service: Served, operator: Viewer
) -> Response:
    """The tables: accuracy with its deviation over seeds, the loss of the right answers, average ranks,
    which tasks do not count, and why cells could not be measured."""
    with service.database.read() as session:
        row = evaluations.get(session, tenant_id=operator.tenant_id, evaluation_id=evaluation_id)
    return report_response(request, service, row.report_digest, TABLES_MEDIA_TYPE)


def present(session: Session, row: tables.Evaluation) -> Evaluation:
    """The record of a row; its models are looked up."""
    return Evaluation(
        id=row.id,
        model_ids=evaluations.model_ids_of(session, evaluation=row),
        corpus_id=row.corpus_id,
        job_id=row.job_id,
        options=EvaluationOptions.model_validate(row.options),
        cells=row.cells,
        bad_rows=row.bad_rows,
        failed_cells=row.failed_cells,
        digest=row.results_digest,
        size_bytes=row.size_bytes,
        created_at=row.created_at,
    )
