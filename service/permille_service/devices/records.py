"""Conversion of the database rows of devices and invitations to records of the API."""

from collections.abc import Callable, Sequence
from datetime import datetime

from sqlalchemy.orm import Session

from permille.schemas.devices import (
    Device,
    DeviceState,
    DeviceStorage,
    InvitationRecord,
    InvitationState,
)
from permille.store import tables, uploads
from permille.store.settings import Quota
from permille.store.uploads import Kept
from permille_service.context import Service


def presenter(
    service: Service, session: Session, rows: Sequence[tables.Device]
) -> Callable[[tables.Device], Device]:
    """Return a function that returns the record of one of these devices, with the storage that it uses."""
    # Read the storage of all devices at once. Queries for each device would be slow.
    kept = uploads.kept_of(session, [row.id for row in rows])
    return lambda row: _present(row, kept[row.id], service.settings.quota)


def _present(row: tables.Device, kept: Kept, most: Quota) -> Device:
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
        storage=DeviceStorage(
            reports=kept.runs,
            most_reports=most.runs_kept,
            uploads=kept.uploads,
            most_uploads=most.uploads_kept,
            upload_bytes=kept.bytes,
            most_upload_bytes=most.bytes_kept,
        ),
    )


def state_of(row: tables.Device) -> DeviceState:
    """Return the state of a device."""
    if row.revoked_at is not None:
        return DeviceState.REVOKED
    return DeviceState.ACTIVE if row.unenrolled_at is None else DeviceState.UNENROLLED


def present_invitation(row: tables.Invitation, at: datetime) -> InvitationRecord:
    """Return the record of an invitation, with its state at a given time."""
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
