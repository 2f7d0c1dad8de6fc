"""The page of a sparsification."""

from typing import Annotated

from fastapi import APIRouter, Response
from pydantic import BaseModel

from permille.schemas.jobs import JobKind
from permille.store import artifacts
from permille_console.rendering import PageRoute, ViewerPage
from permille_console.work import Perplexity, model_names, report_of
from permille_service.parameters import key_of
from permille_service.work.routes import present_artifact
from permille_sparsify.kind import KIND

router = APIRouter(prefix="/ui", include_in_schema=False, route_class=PageRoute)
SparsificationId = Annotated[str, key_of("sparse")]


class ZerosRow(BaseModel):
    """The share of zeros in a decoder layer or a linear layer, and the error of its outputs."""

    name: str
    zeros: float
    relative_error: float


class SparseReport(BaseModel):
    """The part of a sparsification's report that says how much accuracy the sparsification costs."""

    zeros: float
    perplexity: Perplexity | None
    layers: list[ZerosRow]
    tensors: list[ZerosRow]


@router.get("/sparsifications/{sparsification_id}")
def show_sparsification(sparsification_id: SparsificationId, page: ViewerPage) -> Response:
    """Show one sparse model: its zeros and their cost, in total, by decoder layer, and by linear layer."""
    with page.service.database.read() as session:
        row = artifacts.get(
            session, tenant_id=page.tenant_id, kind=JobKind.SPARSIFICATION, key=sparsification_id
        )
        names = model_names(session, page.tenant_id)
    return page.render(
        "sparsification",
        made=present_artifact(KIND, row),
        names=names,
        report=report_of(page.service.blobs, row, SparseReport),
    )
