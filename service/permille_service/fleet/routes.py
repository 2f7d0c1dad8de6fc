"""Route of the fleet's numbers. A watcher, who may not see each device, sees those of many alone."""

from fastapi import APIRouter

from permille.schemas.access import Role
from permille.schemas.devices import Fleet
from permille.store.fleet.few import LEAST
from permille.store.fleet.summary import summary
from permille_service.access.principals import Operator, Watcher
from permille_service.context import Served
from permille_service.problems import PRIVATE, documented

router = APIRouter(prefix="/v1/fleet", tags=["fleet"], responses=documented(*PRIVATE))


@router.get("")
def get_fleet(service: Served, operator: Watcher) -> Fleet:
    """Count devices: by version and what it did for them, by agent, by engine, by when they were seen."""
    with service.database.read() as session:
        return summary(session, tenant_id=operator.tenant_id, least=least_for(operator))


def least_for(operator: Operator) -> int:
    """Counts of fewer devices are not told to this operator."""
    return LEAST if operator.role is Role.WATCHER else 0
