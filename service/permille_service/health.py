"""Route of health: open, and true only when the database answers."""

from fastapi import APIRouter

import permille
from permille.schemas.fields import Health
from permille.store import access
from permille_service.context import Served
from permille_service.problems import OPEN, documented

router = APIRouter(prefix="/v1/health", tags=["health"], responses=documented(*OPEN))


@router.get("")
def get_health(service: Served) -> Health:
    """Whether the service and its database answer."""
    with service.database.read() as session:
        access.first_tenant(session)
    return Health(status="ok", version=permille.__version__)
