"""Routes by which operators invite, list and revoke devices."""

from fastapi import APIRouter
from sqlalchemy.orm import Session

from permille.schemas.devices import Device, Invitation, InvitationCreate, InvitationRecord
from permille.schemas.fields import Page
from permille.schemas.problems import ProblemType
from permille.store import database, devices, rows, tables, trust
from permille.trust.metadata import root_digest
from permille_service.access.principals import Maker, Viewer, changing
from permille_service.context import Served
from permille_service.creation import Creating
from permille_service.devices.records import present_invitation, presenter
from permille_service.extension import leave_all
from permille_service.parameters import DeviceId, InvitationId, Paging, page_of
from permille_service.problems import PRIVATE, documented
from permille_service.trust import repositories

router = APIRouter(prefix="/v1", tags=["devices"], responses=documented(*PRIVATE))


@router.post("/invitations", status_code=201, responses=documented(ProblemType.IDEMPOTENCY_CONFLICT))
def create_invitation(body: InvitationCreate, creating: Creating) -> Invitation:
    """Invite one device to follow a release. Only this answer shows the invitation. It is valid for one
    device and for 24 hours. It also contains the digest of the trust root that the device must start from."""
    tenant_id = creating.operator.tenant_id

    def make(session: Session) -> Invitation:
        # An invitation names the tenant's trust root, so the first one creates the tenant's TUF repository.
        repositories.ensure(creating.service, session, tenant_id)
        root = root_digest(trust.newest_root(session, tenant_id=tenant_id))
        row, code = devices.invite(session, tenant_id=tenant_id, release=body.release, alias=body.alias)
        return Invitation(
            id=row.id,
            invitation=f"{code}.{root}",
            release=row.release,
            alias=row.alias,
            expires_at=row.expires_at,
        )

    return creating.once(Invitation, body, make, private=True, removable=tables.Invitation)


@router.get("/invitations")
def list_invitations(service: Served, operator: Viewer, window: Paging) -> Page[InvitationRecord]:
    """List invitations, newest first, without their codes."""
    with service.database.read() as session:
        at = database.now(session)
        page = rows.list_all(session, tables.Invitation, tenant_id=operator.tenant_id, window=window)
    return page_of(page, lambda row: present_invitation(row, at))


@router.post(
    "/invitations/{invitation_id}/revoke", status_code=204, responses=documented(ProblemType.NOT_FOUND)
)
def revoke_invitation(invitation_id: InvitationId, service: Served, operator: Maker) -> None:
    """Revoke an invitation. Idempotent. A device that has used it stays enrolled."""
    with changing(service, operator) as session:
        devices.revoke_invitation(session, tenant_id=operator.tenant_id, invitation_id=invitation_id)


@router.get("/devices")
def list_devices(service: Served, operator: Viewer, window: Paging) -> Page[Device]:
    """List devices, newest first, including revoked and unenrolled ones."""
    with service.database.read() as session:
        page = rows.list_all(session, tables.Device, tenant_id=operator.tenant_id, window=window)
        return page_of(page, presenter(service, session, page.items))


@router.get("/devices/{device_id}", responses=documented(ProblemType.NOT_FOUND))
def get_device(device_id: DeviceId, service: Served, operator: Viewer) -> Device:
    """Read one device."""
    with service.database.read() as session:
        row = rows.get(session, tables.Device, tenant_id=operator.tenant_id, row_id=device_id)
        return presenter(service, session, [row])(row)


@router.post("/devices/{device_id}/revoke", responses=documented(ProblemType.NOT_FOUND))
def revoke_device(device_id: DeviceId, service: Served, operator: Maker) -> Device:
    """Revoke a device for good. Its next request is refused. Idempotent."""
    with changing(service, operator) as session:
        row = devices.revoke(session, tenant_id=operator.tenant_id, device_id=device_id)
        session.flush()
        leave_all(session, device_id)
        return presenter(service, session, [row])(row)
