"""Routes by which a device enrols, proves that it holds its key, and reads its own record.

The routes of enrolment and tokens need no bearer token. A device enrols with an invitation, and gets a token
for its signature over a nonce.

The number of calls in a minute is limited:
- Attempts with a known invitation are counted for each invitation.
- Attempts with an unknown invitation are counted for each address. So strangers cannot lock out a device with
  a valid invitation, even from the same address.
- Sign-ins are counted for each device, but only after the signature is verified. Otherwise anyone who knows
  the id of a device could use up its limit.

A request without a valid signature writes nothing to the database. A nonce contains its own time of issue, in
encrypted form. The service therefore stores a nonce only when it is used.
"""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from datetime import datetime
from typing import Final

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from fastapi import APIRouter, Request, Response

from permille.addresses import address_key
from permille.schemas.devices import (
    Device,
    DeviceNonce,
    DeviceToken,
    DeviceTokenCreate,
    Enrolment,
    EnrolmentCreate,
    NonceCreate,
    enrolment_message,
    token_message,
)
from permille.schemas.problems import ProblemType
from permille.store import database, devices, rows, tables, trust
from permille.store.devices import InvitationError
from permille_service.access.principals import PUBLIC, CallingDevice
from permille_service.context import Served, Service
from permille_service.devices.records import presenter
from permille_service.extension import leave_all
from permille_service.problems import OPEN, PRIVATE, ApiError, documented

router = APIRouter(prefix="/v1", tags=["devices"], responses=documented(*OPEN))
_NONCE_CONTEXT: Final = "device nonce of "
own = APIRouter(prefix="/v1/device", tags=["devices"], responses=documented(*PRIVATE))


@router.post(
    "/enrolments",
    status_code=201,
    dependencies=[PUBLIC],
    responses={
        200: {"model": Enrolment, "description": "the device enrolled with this key before"},
        **documented(ProblemType.FORBIDDEN),
    },
)
def create_enrolment(
    body: EnrolmentCreate, request: Request, response: Response, service: Served
) -> Enrolment:
    """Enrol a device. The request holds an invitation and the device's public key, and is signed with the
    private key. If the key has enrolled before, the answer is the same device."""
    code, _, root_digest = body.invitation.partition(".")
    _limit_enrolment(service, request, code)
    message = enrolment_message(body.invitation, body.public_key)
    if not _is_signed(body.public_key, body.signature, message):
        raise ApiError(ProblemType.FORBIDDEN, "The enrolment is not signed by the key that it enrols.")
    with service.database.write() as session:
        try:
            enrolment = devices.enrol(
                session,
                code=code,
                public_key=body.public_key,
                name=body.name,
                agent_version=body.agent_version,
            )
        except InvitationError as exc:
            raise ApiError(ProblemType.FORBIDDEN, str(exc)) from exc
        device = enrolment.device
        # In the same transaction, look up the trust root that the invitation names. If there is no such root,
        # the enrolment is undone and the invitation stays valid.
        root = trust.root_by_digest(session, tenant_id=device.tenant_id, digest=root_digest)
        if root is None:
            raise ApiError(
                ProblemType.FORBIDDEN,
                "The part of the invitation after the dot is missing or wrong. Copy the whole invitation.",
            )
        at = database.now(session)
    response.status_code = 201 if enrolment.created else 200
    return Enrolment(
        device_id=device.id,
        tenant_id=device.tenant_id,
        release=device.release,
        alias=device.alias,
        root=root.decode(),
        server_time=at,
    )


@router.post(
    "/device-tokens/nonces",
    status_code=201,
    dependencies=[PUBLIC],
    responses=documented(ProblemType.NOT_FOUND),
)
def create_nonce(body: NonceCreate, service: Served) -> DeviceNonce:
    """Get a nonce to sign. It is valid for five minutes and for one token."""
    with service.database.read() as session:
        if devices.find_active(session, device_id=body.device_id) is None:
            raise ApiError(ProblemType.NOT_FOUND, f"no device {body.device_id!r}")
        at = database.now(session)
    return DeviceNonce(nonce=_seal_time(service, body.device_id, at), expires_at=at + devices.NONCE_LIFE)


@router.post(
    "/device-tokens",
    status_code=201,
    dependencies=[PUBLIC],
    responses=documented(ProblemType.UNAUTHENTICATED),
)
def create_device_token(body: DeviceTokenCreate, service: Served) -> DeviceToken:
    """Exchange a signed nonce for an access token, which is valid for one hour.

    Each nonce gives one token.
    """
    # The refusal is the same for all reasons, so that a stranger learns nothing about keys and nonces.
    refusal = ApiError(ProblemType.UNAUTHENTICATED, "The nonce is old, or not signed by the device's key.")
    issued_at = _open_time(service, body.device_id, body.nonce)
    # Check in a read transaction first. SQLite allows one writer, and strangers must not block it.
    with service.database.read() as session:
        known = devices.find_active(session, device_id=body.device_id)
    message = token_message(body.device_id, body.nonce)
    if issued_at is None or known is None or not _is_signed(known.public_key, body.signature, message):
        raise refusal
    service.sign_ins.check(body.device_id)
    with service.database.write() as session:
        devices.purge_expired(session)
        device = devices.use_nonce(session, device_id=body.device_id, nonce=body.nonce, issued_at=issued_at)
        if device is None:
            raise refusal
        secret, expires_at = devices.issue_token(session, device=device)
        at = database.now(session)
    return DeviceToken(access_token=secret, expires_in=int((expires_at - at).total_seconds()))


@own.get("")
def get_own_device(service: Served, device: CallingDevice) -> Device:
    """Return the service's record of the calling device."""
    with service.database.read() as session:
        row = rows.get(session, tables.Device, tenant_id=device.tenant_id, row_id=device.device_id)
        return presenter(service, session, [row])(row)


@own.delete("", status_code=204)
def delete_own_device(service: Served, device: CallingDevice) -> None:
    """Unenrol the calling device. Its tokens become invalid at once. To enrol again, it needs a new
    invitation."""
    with service.database.write() as session:
        devices.unenrol(session, tenant_id=device.tenant_id, device_id=device.device_id)
        session.flush()
        leave_all(session, device.device_id)


def _limit_enrolment(service: Service, request: Request, code: str) -> None:
    """Count an attempt to enrol: for its invitation if the code is known, otherwise for the caller's address.

    Raises:
        ApiError: `forbidden`: the code is unknown. `too-many-requests`: the limit is reached.
    """
    with service.database.read() as session:
        invitation = devices.find_invitation(session, code=code)
    if invitation is not None:
        service.sign_ins.check(invitation.id)
        return
    service.sign_ins.check(address_key(request.client.host if request.client else ""))
    raise ApiError(ProblemType.FORBIDDEN, str(InvitationError()))


def _seal_time(service: Service, device_id: str, at: datetime) -> str:
    """Make a nonce: the time of issue, encrypted for this device."""
    sealed = service.seal.close(at.isoformat().encode(), _NONCE_CONTEXT + device_id)
    return urlsafe_b64encode(sealed).decode().rstrip("=")


def _open_time(service: Service, device_id: str, nonce: str) -> datetime | None:
    """Return the time of issue of a nonce, or None if the service never issued it to this device."""
    try:
        sealed = _decode(nonce)
        return datetime.fromisoformat(service.seal.open(sealed, _NONCE_CONTEXT + device_id).decode())
    except (InvalidTag, ValueError):
        return None


def _is_signed(public_key: str, signature: str, message: bytes) -> bool:
    key = Ed25519PublicKey.from_public_bytes(_decode(public_key))
    try:
        key.verify(_decode(signature), message)
    except InvalidSignature:
        return False
    return True


def _decode(text: str) -> bytes:
    """Decode base64url without padding. The schema has checked the pattern."""
    return urlsafe_b64decode(text + "=" * (-len(text) % 4))
