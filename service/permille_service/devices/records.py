"""Device and invitation rows as records."""

from datetime import datetime

from permille.schemas.devices import Device, DeviceState, InvitationRecord, InvitationState
from permille.store import tables


def present(row: tables.Device) -> Device:
    """The record of a device."""
    return Device(
        id=row.id,
        tenant_id=row.tenant_id,
        name=row.name,
        state=state_of(row),
        release=row.release,
        alias=row.alias,
        agent_version=row.agent_version,
        enrolled_at=row.created_at,
        last_seen_at=row.last_seen_at,
    )


def state_of(row: tables.Device) -> DeviceState:
    """Revoked by an operator, left by itself, or active."""
    if row.revoked_at is not None:
        return DeviceState.REVOKED
    return DeviceState.ACTIVE if row.unenrolled_at is None else DeviceState.UNENROLLED


def present_invitation(row: tables.Invitation, at: datetime) -> InvitationRecord:
    """The record of an invitation at a moment."""
    if row.used_at is not None:
        state = InvitationState.USED
    elif row.revoked_at is not None:
        state = InvitationState.REVOKED
    else:
        state = InvitationState.OPEN if row.expires_at > at else InvitationState.EXPIRED
    return InvitationRecord(
        id=row.id,
        release=row.release,
        alias=row.alias,
        state=state,
        used_by=row.device_id,
        created_at=row.created_at,
        expires_at=row.expires_at,
    )
