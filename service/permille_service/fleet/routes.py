"""Route of the fleet's counts.

An operator with the role of a watcher may not see single devices, so counts of few devices are hidden.
"""

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
    """Count devices by version, agent, engine, and the time they were last seen. For each version, also
    report its effect on the devices."""
    with service.database.read() as session:
        return summary(session, tenant_id=operator.tenant_id, least=least_for(operator))


def least_for(operator: Operator) -> int:
    """Return the smallest count of devices that this operator may see. Smaller counts are hidden."""
    return LEAST if operator.role is Role.WATCHER else 0
