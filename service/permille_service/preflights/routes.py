"""Route of preflights: the figures, whether they are enough or not."""

from typing import Annotated

from fastapi import APIRouter, Body

from permille.schemas.jobs import Preflight
from permille.schemas.kinds import PreflightCreate
from permille.schemas.problems import ProblemType
from permille_service.access.principals import Viewer
from permille_service.context import Served
from permille_service.preflights.planning import preflight_of
from permille_service.problems import PRIVATE, documented

router = APIRouter(
    prefix="/v1/preflights",
    tags=["preflights"],
    responses=documented(*PRIVATE, ProblemType.NOT_FOUND, ProblemType.CONFLICT),
)


@router.post("")
def check_preflight(
    body: Annotated[PreflightCreate, Body()],
    service: Served,
    operator: Viewer,
) -> Preflight:
    """Say what a piece of work needs and whether the machine has it. Nothing is made."""
    return preflight_of(service, operator.tenant_id, body.request)
