"""Routes by which a device tells of itself, and of a rollout's version.

Which version it takes is signed (FORMAT 14), so no route tells that.
"""

from fastapi import APIRouter

from permille.fleet.offer import Facts
from permille.schemas.fleet.groups import FactsPut
from permille.schemas.fleet.rollouts import RolloutReport
from permille.schemas.problems import ProblemType
from permille.store import rows, tables
from permille.store.fleet import groups, rollouts
from permille_service.access.principals import CallingDevice
from permille_service.context import Served
from permille_service.problems import PRIVATE, documented
from permille_service.rollouts.routes import RolloutId

router = APIRouter(prefix="/v1/device", tags=["rollouts"], responses=documented(*PRIVATE))


@router.put("/facts", status_code=204)
def put_device_facts(body: FactsPut, service: Served, device: CallingDevice) -> None:
    """Tell agent, engine and memory, by which groups choose devices; again when they change."""
    service.sign_ins.check(f"{device.device_id} facts")
    facts = Facts(
        agent_version=body.agent_version,
        engine=None if body.engine is None else body.engine.value,
        memory_bytes=body.memory_bytes,
    )
    with service.database.write() as session:
        groups.put_facts(session, device_id=device.device_id, facts=facts)


@router.put(
    "/rollouts/{rollout_id}/report",
    status_code=204,
    responses=documented(ProblemType.NOT_FOUND, ProblemType.CONFLICT),
)
def put_rollout_report(
    rollout_id: RolloutId, body: RolloutReport, service: Served, device: CallingDevice
) -> None:
    """Tell how far the device has come. A device counts once, by its newest report."""
    service.sign_ins.check(f"{device.device_id} rollouts")
    with service.database.write() as session:
        own = rows.get(session, tables.Device, tenant_id=device.tenant_id, row_id=device.device_id)
        rollouts.report(session, device=own, rollout_id=rollout_id, report=body)
