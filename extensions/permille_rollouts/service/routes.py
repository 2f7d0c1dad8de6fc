"""Routes of groups and rollouts, for operators and for the reports of devices.

No route here tells a device which version to install. Devices read the version only from the signed metadata
(FORMAT 14).
"""

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel
from sqlalchemy.orm import Session

from permille.schemas.fields import Page
from permille.schemas.problems import ProblemType
from permille.store import rows, tables
from permille.trust.repository import Repository
from permille_rollouts.offer import Facts
from permille_rollouts.schemas.groups import DeviceGroup, DeviceTags, FactsPut, GroupCreate, TagsPut
from permille_rollouts.schemas.rollouts import Rollout, RolloutApproval, RolloutCreate, RolloutReport
from permille_rollouts.service.records import present, present_group
from permille_rollouts.service.signing import check_may_end, sign, sign_all
from permille_rollouts.store import groups, rollouts
from permille_service.access.principals import CallingDevice, Maker, Operator, Viewer, changing
from permille_service.context import Served, Service
from permille_service.creation import MADE_RESPONSES, Creating
from permille_service.parameters import DeviceId, Paging, key_of, page_of
from permille_service.problems import PRIVATE, documented
from permille_service.trust import repositories

router = APIRouter(prefix="/v1", tags=["rollouts"], responses=documented(*PRIVATE, ProblemType.NOT_FOUND))
device_router = APIRouter(prefix="/v1/device", tags=["rollouts"], responses=documented(*PRIVATE))
GroupId = Annotated[str, key_of("group")]
RolloutId = Annotated[str, key_of("rollout")]


@router.post("/groups", status_code=201, responses=MADE_RESPONSES)
def create_group(body: GroupCreate, creating: Creating) -> DeviceGroup:
    """Create a group, with a rule that selects its devices. A rollout evaluates the rule when it starts."""
    tenant_id = creating.operator.tenant_id

    def make(session: Session) -> DeviceGroup:
        row = groups.create(session, tenant_id=tenant_id, name=body.name, rule=body.rule)
        return present_group(row, groups.candidates(session, tenant_id=tenant_id))

    return creating.add(DeviceGroup, body, make, removable=tables.DeviceGroup)


@router.get("/groups")
def list_groups(service: Served, operator: Viewer, window: Paging) -> Page[DeviceGroup]:
    """List groups, newest first."""
    with service.database.read() as session:
        page = rows.list_all(session, tables.DeviceGroup, tenant_id=operator.tenant_id, window=window)
        found = groups.candidates(session, tenant_id=operator.tenant_id)
        return page_of(page, lambda row: present_group(row, found))


@router.get("/groups/{group_id}")
def get_group(group_id: GroupId, service: Served, operator: Viewer) -> DeviceGroup:
    """Read one group."""
    with service.database.read() as session:
        row = rows.get(session, tables.DeviceGroup, tenant_id=operator.tenant_id, row_id=group_id)
        return present_group(row, groups.candidates(session, tenant_id=operator.tenant_id))


@router.delete("/groups/{group_id}", status_code=204, responses=documented(ProblemType.CONFLICT))
def delete_group(group_id: GroupId, service: Served, operator: Maker) -> None:
    """Delete a group. If a rollout was ever made for the group, the request is refused."""
    with changing(service, operator) as session:
        groups.delete(session, tenant_id=operator.tenant_id, group_id=group_id)


@router.put("/devices/{device_id}/tags")
def put_device_tags(device_id: DeviceId, body: TagsPut, service: Served, operator: Maker) -> DeviceTags:
    """Replace the tags of a device. The rules of groups can select devices by these tags."""
    with changing(service, operator, body) as session:
        groups.put_tags(session, tenant_id=operator.tenant_id, device_id=device_id, tags=body.tags)
    return DeviceTags(device_id=device_id, tags=sorted(set(body.tags)))


@router.post("/rollouts", status_code=201, responses=MADE_RESPONSES)
def create_rollout(body: RolloutCreate, creating: Creating) -> Rollout:
    """Create a rollout, which brings a version to the devices of an alias, wave by wave. The first wave opens
    at once, unless the request asks for a draft."""
    service, operator = creating.service, creating.operator

    def make(session: Session) -> Rollout:
        with repositories.changing(service, session, operator.tenant_id) as repository:
            # The end of the previous rollout of this alias may still have to be signed. Sign it first.
            sign_all(service, session, repository, operator.tenant_id)
            row = rollouts.create(
                session, tenant_id=operator.tenant_id, token_id=operator.token_id, body=body
            )
            if not body.draft:
                _resume(service, session, repository, row)
        return present(session, row)

    return creating.add(Rollout, body, make)


@router.get("/rollouts")
def list_rollouts(service: Served, operator: Viewer, window: Paging) -> Page[Rollout]:
    """List rollouts, newest first."""
    with service.database.read() as session:
        page = rows.list_all(session, tables.Rollout, tenant_id=operator.tenant_id, window=window)
        return page_of(page, lambda row: present(session, row))


@router.get("/rollouts/{rollout_id}")
def get_rollout(rollout_id: RolloutId, service: Served, operator: Viewer) -> Rollout:
    """Read one rollout. The record shows how far the devices of each wave have come."""
    with service.database.read() as session:
        row = rows.get(session, tables.Rollout, tenant_id=operator.tenant_id, row_id=rollout_id)
        return present(session, row)


@router.post("/rollouts/{rollout_id}/resume", responses=documented(ProblemType.CONFLICT))
def resume_rollout(rollout_id: RolloutId, service: Served, operator: Maker) -> Rollout:
    """Start a draft, or continue a rollout after a pause. Earlier results no longer count."""

    def resume(session: Session, repository: Repository, row: tables.Rollout) -> None:
        _resume(service, session, repository, row)

    return _change(service, operator, rollout_id, resume)


@router.post("/rollouts/{rollout_id}/pause", responses=documented(ProblemType.CONFLICT))
def pause_rollout(rollout_id: RolloutId, service: Served, operator: Maker) -> Rollout:
    """Pause a rollout. No further device starts the update until it resumes."""
    return _change(service, operator, rollout_id, lambda _session, _repository, row: rollouts.pause(row))


@router.post("/rollouts/{rollout_id}/approve", responses=documented(ProblemType.CONFLICT))
def approve_rollout(
    rollout_id: RolloutId, body: RolloutApproval, service: Served, operator: Maker
) -> Rollout:
    """Approve the next wave of a rollout whose rules require approval. A program may call this after checks
    of its own."""
    return _change(
        service, operator, rollout_id, lambda _session, _, row: rollouts.approve(row, body.wave), body
    )


@router.post("/rollouts/{rollout_id}/stop", responses=documented(ProblemType.CONFLICT))
def stop_rollout(rollout_id: RolloutId, service: Served, operator: Maker) -> Rollout:
    """Stop a rollout. Devices that have the version keep it, and no other device gets it."""
    return _change(service, operator, rollout_id, lambda session, _, row: rollouts.stop(session, row))


@router.post("/rollouts/{rollout_id}/revert", responses=documented(ProblemType.CONFLICT))
def revert_rollout(rollout_id: RolloutId, service: Served, operator: Maker) -> Rollout:
    """Stop a rollout and undo it. The service publishes the earlier package as a new version, which all
    devices install. If the service lacks the key to sign a new version, devices go back to the earlier
    one."""
    return _change(service, operator, rollout_id, lambda session, _, row: rollouts.want_revert(session, row))


def _resume(service: Service, session: Session, repository: Repository, row: tables.Rollout) -> None:
    # At the end of the rollout, the service must point the alias at the version and sign this. Check now that
    # the service has the key.
    check_may_end(repository, row)
    rollouts.resume(session, row)
    sign(service, session, repository, row)


def _change(
    service: Service,
    operator: Operator,
    rollout_id: str,
    change: Callable[[Session, Repository, tables.Rollout], None],
    body: BaseModel | None = None,
) -> Rollout:
    """Change a rollout, sign the change, and add an entry to the audit log, all in one transaction."""

    def run(session: Session, repository: Repository) -> Rollout:
        row = rows.lock(session, tables.Rollout, tenant_id=operator.tenant_id, row_id=rollout_id)
        change(session, repository, row)
        # Most changes alter the signed record. Others, such as an approval, need no new signature.
        if row.signed_revision < row.revision:
            sign(service, session, repository, row)
        return present(session, row)

    return repositories.change_by(service, operator, run, body)


@device_router.put("/facts", status_code=204)
def put_device_facts(body: FactsPut, service: Served, device: CallingDevice) -> None:
    """Report the agent's version, the engine, the memory and the owner's tags. Groups select devices by these
    facts. A device sends them again when one of them changes."""
    service.sign_ins.check(f"{device.device_id} facts")
    facts = Facts(
        agent_version=body.agent_version,
        engine=None if body.engine is None else body.engine.value,
        memory_bytes=body.memory_bytes,
        tags=tuple(body.tags),
    )
    with service.database.write() as session:
        groups.put_facts(session, device_id=device.device_id, facts=facts)


@device_router.put(
    "/rollouts/{rollout_id}/report",
    status_code=204,
    responses=documented(ProblemType.NOT_FOUND, ProblemType.CONFLICT),
)
def put_rollout_report(
    rollout_id: RolloutId, body: RolloutReport, service: Served, device: CallingDevice
) -> None:
    """Report how far the calling device has come in a rollout. Only its newest report counts."""
    service.sign_ins.check(f"{device.device_id} rollouts")
    with service.database.write() as session:
        own = rows.get(session, tables.Device, tenant_id=device.tenant_id, row_id=device.device_id)
        rollouts.report(session, device=own, rollout_id=rollout_id, report=body)
