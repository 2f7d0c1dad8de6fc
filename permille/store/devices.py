"""Invitations, devices, their nonces and their access tokens.

An invitation enrols one device. A compare-and-set uses it up, so two devices cannot share it. A
device that enrols again with the same key is the same device, whether it uses the old code or a new
one. A device that is revoked or unenrolled has no valid token from that moment on.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import CursorResult, bindparam, delete, func, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from permille.errors import InputError
from permille.store import rows
from permille.store.database import NOW, moment, now
from permille.store.ids import Prefix, hash_secret, new_code, new_device_token, new_id
from permille.store.tables import Device, DeviceNonce, DeviceToken, Invitation

INVITATION_LIFE = timedelta(hours=24)
NONCE_LIFE = timedelta(minutes=5)
TOKEN_LIFE = timedelta(hours=1)
# Query of the active device whose valid access token has the hash `token_hash`.
CALLER = (
    select(
        Device.id.label("caller_id"),
        Device.tenant_id.label("caller_tenant_id"),
        Device.release.label("caller_release"),
        Device.alias.label("caller_alias"),
        Device.version.label("caller_version"),
        Device.last_seen_at.label("caller_seen_at"),
    )
    .join(DeviceToken, DeviceToken.device_id == Device.id)
    .where(
        DeviceToken.token_hash == bindparam("token_hash"),
        DeviceToken.expires_at > NOW,
        Device.revoked_at.is_(None),
        Device.unenrolled_at.is_(None),
    )
)


class InvitationError(InputError):
    """The code is unknown, used by another key, expired or revoked. The message does not say which."""

    def __init__(self) -> None:
        super().__init__("The invitation is unknown, used or expired. Ask the operator for another one.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Enrolment:
    """An enrolled device, and whether this call created it."""

    device: Device
    created: bool


def invite(
    session: Session,
    *,
    tenant_id: str,
    release: str,
    alias: str,
) -> tuple[Invitation, str]:
    """Add an invitation. Return the row and the code. The code is not stored."""
    code = new_code()
    at = now(session)
    invitation = rows.add(
        session,
        Invitation(
            id=new_id(Prefix.INVITATION),
            tenant_id=tenant_id,
            code_hash=hash_secret(code),
            release=release,
            alias=alias,
            expires_at=at + INVITATION_LIFE,
            created_at=at,
        ),
    )
    return invitation, code


def revoke_invitation(session: Session, *, tenant_id: str, invitation_id: str) -> None:
    """Revoke an invitation. Idempotent. Raises NotFoundError."""
    invitation = rows.get(session, Invitation, tenant_id=tenant_id, row_id=invitation_id)
    invitation.revoked_at = invitation.revoked_at or now(session)


def find_invitation(session: Session, *, code: str) -> Invitation | None:
    """Return the invitation with this code, or None. It may be used, expired or revoked."""
    return session.scalar(select(Invitation).where(Invitation.code_hash == hash_secret(code)))


def find_active(session: Session, *, device_id: str) -> Device | None:
    """Return a device that is neither revoked nor unenrolled, or None."""
    query = select(Device).where(
        Device.id == device_id, Device.revoked_at.is_(None), Device.unenrolled_at.is_(None)
    )
    return session.scalar(query)


def enrol(session: Session, *, code: str, public_key: str, name: str, agent_version: str) -> Enrolment:
    """Use an invitation: create a device, or return the device that has this key.

    Raises:
        InvitationError: the code is not valid, or the key belongs to a revoked device.
    """
    at = now(session)
    invitation = find_invitation(session, code=code)
    if invitation is None or invitation.revoked_at is not None:
        raise InvitationError()
    device = session.scalar(
        select(Device).where(Device.tenant_id == invitation.tenant_id, Device.public_key == public_key)
    )
    # A revoked key stays revoked, whatever invitation comes with it.
    if device is not None and device.revoked_at is not None:
        raise InvitationError()
    if invitation.used_at is not None:
        # A used code works only if the device that used it repeats its request.
        if device is None or invitation.device_id != device.id or device.unenrolled_at is not None:
            raise InvitationError()
        return Enrolment(device=device, created=False)
    created = device is None or device.unenrolled_at is not None
    if device is None:
        device = Device(
            id=new_id(Prefix.DEVICE),
            tenant_id=invitation.tenant_id,
            public_key=public_key,
            created_at=at,
        )
        session.add(device)
    device.name, device.agent_version = name, agent_version
    device.release, device.alias = invitation.release, invitation.alias
    # A device that comes back may follow another release, so forget its old version.
    device.version = device.unenrolled_at = None
    _use(session, invitation, device, at)
    return Enrolment(device=device, created=created)


def revoke(session: Session, *, tenant_id: str, device_id: str) -> Device:
    """Revoke a device for good, with effect on its next request. Idempotent. Raises NotFoundError.

    The caller must also end what the device takes part in (`ServiceExtension.leave`).
    """
    device = rows.get(session, Device, tenant_id=tenant_id, row_id=device_id)
    device.revoked_at = device.revoked_at or now(session)
    return device


def unenrol(session: Session, *, tenant_id: str, device_id: str) -> Device:
    """Unenrol a device at its own request. A new invitation lets it come back. Raises NotFoundError.

    The caller must also end what the device takes part in (`ServiceExtension.leave`).
    """
    device = rows.get(session, Device, tenant_id=tenant_id, row_id=device_id)
    at = now(session)
    device.unenrolled_at = device.unenrolled_at or at
    # Without this, old tokens would be valid again once the device comes back.
    session.execute(delete(DeviceToken).where(DeviceToken.device_id == device.id))
    # For the same reason, store a row that makes `use_nonce` refuse nonces that were issued before the device
    # left.
    session.merge(_used_nonce(device, _leaving(device.id), at))
    return device


def touch(session: Session, *, device_id: str, version: int | None = None) -> None:
    """Record that a device is seen now. Skip this if another transaction has locked the row.

    Args:
        version: the version of the release that the device is told to install.
    """
    free = select(Device.id).where(Device.id == device_id).with_for_update(skip_locked=True)
    values = {} if version is None else {"version": version}
    seen = update(Device).where(Device.id.in_(free)).values(last_seen_at=moment(session), **values)
    session.execute(seen.execution_options(synchronize_session=False))


def count_told(session: Session, *, tenant_id: str, release: str, version: int) -> int:
    """Count the active devices that were last told this version."""
    query = select(func.count()).where(
        Device.tenant_id == tenant_id,
        Device.release == release,
        Device.version == version,
        Device.revoked_at.is_(None),
        Device.unenrolled_at.is_(None),
    )
    return session.scalar(query) or 0


def use_nonce(session: Session, *, device_id: str, nonce: str, issued_at: datetime) -> Device | None:
    """Use up a nonce that a device has signed, and return the device.

    Returns:
        None if the device is not active, or if the nonce cannot be used: it was used before, is
        older than five minutes, or was issued before the device left.
    """
    # A nonce is stored when it is used, not when it is issued. Anyone who knows a device's id may ask for
    # nonces, and must not be able to fill the table.
    at, device = now(session), find_active(session, device_id=device_id)
    left = session.get(DeviceNonce, _leaving(device_id))
    stale = left is not None and left.used_at is not None and left.used_at >= issued_at
    if device is None or stale or not issued_at <= at < issued_at + NONCE_LIFE:
        return None
    try:
        # The unique key of the row makes a second use fail, also a concurrent one.
        with session.begin_nested():
            session.add(_used_nonce(device, hash_secret(nonce), at))
    except IntegrityError:
        return None
    return device


def issue_token(session: Session, *, device: Device) -> tuple[str, datetime]:
    """Create an access token for a device that has proved its key. Return the secret and its expiry."""
    secret, at = new_device_token(), now(session)
    session.add(
        DeviceToken(
            token_hash=hash_secret(secret),
            tenant_id=device.tenant_id,
            device_id=device.id,
            expires_at=at + TOKEN_LIFE,
            created_at=at,
        )
    )
    return secret, at + TOKEN_LIFE


def purge_expired(session: Session) -> None:
    """Delete expired nonces and access tokens."""
    at = now(session)
    # The limit keeps the transaction short. The next call deletes the rest.
    for table, key in ((DeviceNonce, DeviceNonce.nonce_hash), (DeviceToken, DeviceToken.token_hash)):
        expired = select(key).where(table.expires_at <= at).limit(1000)
        session.execute(delete(table).where(key.in_(expired)))


def _used_nonce(device: Device, nonce_hash: str, at: datetime) -> DeviceNonce:
    """Return the row of a used nonce. The row is kept until the nonce has expired."""
    return DeviceNonce(
        nonce_hash=nonce_hash,
        tenant_id=device.tenant_id,
        device_id=device.id,
        used_at=at,
        created_at=at,
        expires_at=at + NONCE_LIFE,
    )


def _leaving(device_id: str) -> str:
    """Return the key of the row that stores when a device left. Nonces from before that time stay void
    when the device comes back.
    """
    return hash_secret(f"left {device_id}")


def _use(session: Session, invitation: Invitation, device: Device, at: datetime) -> None:
    used = session.execute(
        update(Invitation)
        .where(
            Invitation.id == invitation.id,
            Invitation.used_at.is_(None),
            Invitation.revoked_at.is_(None),
            Invitation.expires_at > at,
        )
        .values(used_at=at, device_id=device.id)
    )
    # If no row was updated, another request has used the code, or it was revoked or has expired.
    if not isinstance(used, CursorResult) or used.rowcount != 1:
        raise InvitationError()
