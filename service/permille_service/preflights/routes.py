"""Route of preflights: the figures, whether they are enough or not."""

from typing import Annotated

from fastapi import APIRouter, Body

from permille.schemas.preflights import (
    BuildPreflight,
    MaskPreflight,
    Preflight,
    PreflightCreate,
)
from permille.schemas.problems import ProblemType
from permille_service.access.principals import Viewer
from permille_service.context import Served
from permille_service.preflights.machine import look
from permille_service.preflights.planning import (
    needs_of_build,
    needs_of_mask,
    needs_of_quantization,
)
from permille_service.preflights.verdict import judge
from permille_service.problems import PRIVATE, documented

router = APIRouter(
    prefix="/v1/preflights",
    tags=["preflights"],
    responses=documented(*PRIVATE, ProblemType.NOT_FOUND, ProblemType.CONFLICT),
)


@router.post("")
def check_preflight(body: Annotated[PreflightCreate, Body()], service: Served, operator: Viewer) -> Preflight:
    """Say what a piece of work needs and whether the machine has it. Nothing is made."""
    machine = look(service.settings)
    if isinstance(body, MaskPreflight):
        needs = needs_of_mask(service, operator.tenant_id, body.request, machine)
    elif isinstance(body, BuildPreflight):
        needs = needs_of_build(service, operator.tenant_id, body.request, machine)
    else:
        needs = needs_of_quantization(service, operator.tenant_id, body.request, machine)
    return judge(needs, machine)
