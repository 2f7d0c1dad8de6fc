"""Finished evaluations. A worker adds one in the transaction that completes its job; the blobs are there
before that."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from permille.store.database import now
from permille.store.errors import NotFoundError
from permille.store.ids import Prefix, new_id
from permille.store.paging import Page, fetch_page
from permille.store.tables import EvaluatedModel, Evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What an evaluation found: JSON lines and the tables of them, both blobs."""

    cells: int
    bad_rows: int
    failed_cells: int  # not measured, of wrong input
    results_digest: str
    report_digest: str
    size_bytes: int  # of the results


def add(
    session: Session,
    *,
    tenant_id: str,
    job_id: str,
    model_ids: Sequence[str],
    corpus_id: str,
    options: dict[str, Any],
    provenance: dict[str, Any],
    findings: Findings,
) -> Evaluation:
    """Add the result of an evaluation job."""
    evaluation = Evaluation(
        id=new_id(Prefix.EVALUATION),
        tenant_id=tenant_id,
        job_id=job_id,
        corpus_id=corpus_id,
        options=options,
        provenance=provenance,
        cells=findings.cells,
        bad_rows=findings.bad_rows,
        failed_cells=findings.failed_cells,
        results_digest=findings.results_digest,
        report_digest=findings.report_digest,
        size_bytes=findings.size_bytes,
        created_at=now(session),
    )
    session.add(evaluation)
    session.flush()
    for position, model_id in enumerate(model_ids):
        session.add(
            EvaluatedModel(
                evaluation_id=evaluation.id, model_id=model_id, tenant_id=tenant_id, position=position
            )
        )
    session.flush()
    return evaluation


def get(session: Session, *, tenant_id: str, evaluation_id: str) -> Evaluation:
    """Read one evaluation. Raises NotFoundError."""
    query = select(Evaluation).where(Evaluation.tenant_id == tenant_id, Evaluation.id == evaluation_id)
    evaluation = session.scalar(query)
    if evaluation is None:
        raise NotFoundError(f"no evaluation {evaluation_id!r}")
    return evaluation


def list_evaluations(
    session: Session,
    *,
    tenant_id: str,
    model_id: str | None = None,
    limit: int = 50,
    cursor: str | None = None,
) -> Page[Evaluation]:
    """List evaluations, newest first; those that compare one model, if it is named."""
    query = select(Evaluation).where(Evaluation.tenant_id == tenant_id)
    if model_id is not None:
        compared = select(EvaluatedModel.evaluation_id).where(EvaluatedModel.model_id == model_id)
        query = query.where(Evaluation.id.in_(compared))
    return fetch_page(session, query, Evaluation.id, limit=limit, cursor=cursor)


def model_ids_of(session: Session, *, evaluation: Evaluation) -> list[str]:
    """The models that an evaluation which the caller may read compares."""
    query = select(EvaluatedModel.model_id).where(EvaluatedModel.evaluation_id == evaluation.id)
    return list(session.scalars(query.order_by(EvaluatedModel.position)))
