"""Devices: invitations, enrolment, tokens, and the views of single devices and of the fleet."""

from datetime import date
from enum import StrEnum
from typing import Annotated, ClassVar, Final

from pydantic import Field, StringConstraints

from permille.schemas.fields import (
    EXAMPLE_ULID,
    TEXT_PATTERN,
    Closed,
    Count,
    Examples,
    Id,
    Name,
    Timestamp,
    WholeNumber,
)
from permille.schemas.releases import VersionResults

# Every signed message begins with the context of its purpose, so that its signature is worthless for any
# other purpose.
TOKEN_CONTEXT: Final = b"permille-device-token-1\0"
ENROLMENT_CONTEXT: Final = b"permille-enrolment-1\0"

# Of the 6 bits of the last character, 2 are unused and must be 0, so each key has only one valid text.
PublicKey = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9_-]{42}[AEIMQUYcgkosw048]$"),
    Field(
        description="Ed25519 public key: base64url without padding of its 32 bytes.",
        examples=["11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"],
    ),
]
# Of the 6 bits of the last character, 4 are unused and must be 0, so each signature has only one valid text.
Signature = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9_-]{85}[AQgw]$"),
    Field(description="Ed25519 signature: base64url without padding of its 64 bytes.", examples=["A" * 86]),
]
# Of the 6 bits of the last character before the dot, 4 are unused and must be 0. So each code has only one
# valid text.
InvitationCode = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9_-]{21}[AQgw]\.[0-9a-f]{32}$"),
    Field(
        description="128 random bits, base64url without padding; a dot; the first 32 hexadecimal digits of "
        "the SHA-256 of the tenant's root metadata, which is the device's first root of trust.",
        examples=["q83vASNFZ4mrze8BI0VniQ.0123456789abcdef0123456789abcdef"],
    ),
]
Nonce = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{22,86}$"), Field(examples=["q83vASNFZ4mrze8BI0VniQ"])
]
DeviceName = Annotated[
    str,
    StringConstraints(min_length=1, max_length=100, pattern=TEXT_PATTERN),
    Field(examples=["kitchen-laptop"]),
]
AgentVersion = Annotated[
    str, StringConstraints(pattern=r"^[0-9]{1,5}\.[0-9]{1,5}\.[0-9]{1,5}$"), Field(examples=["0.1.0"])
]


def token_message(device_id: str, nonce: str) -> bytes:
    r"""Return the message that a device signs to get a token: context, device id, NUL, nonce.

    Example:
        >>> token_message("dev_1", "q83v")
        b'permille-device-token-1\x00dev_1\x00q83v'
    """
    # The NUL separates the device id from the nonce. Neither can contain a NUL.
    return TOKEN_CONTEXT + device_id.encode("ascii") + b"\0" + nonce.encode("ascii")


def enrolment_message(invitation: str, public_key: str) -> bytes:
    """Return the message that a device signs to enrol: context, invitation, NUL, public key."""
    return ENROLMENT_CONTEXT + invitation.encode("ascii") + b"\0" + public_key.encode("ascii")


class DeviceState(StrEnum):
    """State of a device. Only an active device may use the API."""

    ACTIVE = "active"
    REVOKED = "revoked"
    UNENROLLED = "unenrolled"


class InvitationCreate(Closed):
    """An invitation for one device, which will follow one release."""

    examples: ClassVar[Examples] = {
        "a device that follows an alias": {"release": "tiny-llama", "alias": "stable"}
    }

    release: Name = Field(examples=["tiny-llama"])
    alias: Name = Field(default="stable", examples=["stable"])


class Invitation(Closed):
    """A one-time invitation. The code is shown only here."""

    id: Id
    invitation: InvitationCode
    release: Name
    alias: Name
    expires_at: Timestamp


class InvitationState(StrEnum):
    """State of an invitation."""

    OPEN = "open"
    USED = "used"
    EXPIRED = "expired"
    REVOKED = "revoked"


class InvitationRecord(Closed):
    """An invitation without its code, as operators see it later."""

    id: Id
    release: Name
    alias: Name
    state: InvitationState
    used_by: Id | None = Field(description="device that used the invitation")
    created_at: Timestamp
    expires_at: Timestamp


class EnrolmentCreate(Closed):
    """A device's request to enrol. The signature of `enrolment_message` proves that the device owns
    the key.
    """

    examples: ClassVar[Examples] = {
        "a laptop": {
            "invitation": "q83vASNFZ4mrze8BI0VniQ.0123456789abcdef0123456789abcdef",
            "public_key": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo",
            "name": "kitchen-laptop",
            "agent_version": "0.1.0",
            "signature": "A" * 86,
        }
    }

    invitation: InvitationCode
    public_key: PublicKey
    name: DeviceName
    agent_version: AgentVersion
    signature: Signature


class Enrolment(Closed):
    """The enrolment that a device keeps: its identity, its release, and its root of trust."""

    device_id: Id
    tenant_id: Id
    release: Name
    alias: Name
    root: str = Field(
        # python-tuf accepts roots of at most 512,000 bytes.
        max_length=512_000,
        description="signed root metadata, as text; its digest is in the invitation",
    )
    server_time: Timestamp


class NonceCreate(Closed):
    """A device's request for a nonce."""

    examples: ClassVar[Examples] = {"a device": {"device_id": f"dev_{EXAMPLE_ULID}"}}

    device_id: Id


class DeviceNonce(Closed):
    """A nonce, to be signed once before it expires."""

    nonce: Nonce
    expires_at: Timestamp


class DeviceTokenCreate(Closed):
    """A signed nonce: Ed25519 over `token_message(device_id, nonce)`."""

    examples: ClassVar[Examples] = {
        "a signed nonce": {
            "device_id": f"dev_{EXAMPLE_ULID}",
            "nonce": "q83vASNFZ4mrze8BI0VniQ",
            "signature": "A" * 86,
        }
    }

    device_id: Id
    nonce: Nonce
    signature: Signature


class DeviceToken(Closed):
    """A bearer token that is valid for one hour."""

    access_token: str
    token_type: str = Field(default="Bearer", examples=["Bearer"])
    expires_in: Annotated[int, Field(strict=True, ge=1, le=86_400), WholeNumber] = Field(
        description="seconds until the token expires", examples=[3600]
    )


class DeviceStorage(Closed):
    """The amounts that the service stores for a device, and their limits."""

    reports: Count
    most_reports: Count
    uploads: Count = Field(description="number of shared logs and states")
    most_uploads: Count
    upload_bytes: Count
    most_upload_bytes: Count


class Device(Closed):
    """A device, as its owner and the operators see it."""

    id: Id
    tenant_id: Id
    name: str
    state: DeviceState
    release: Name
    alias: Name
    agent_version: str | None
    enrolled_at: Timestamp
    last_seen_at: Timestamp | None
    storage: DeviceStorage


class Group(Closed):
    """The number of devices with a common property. Null means that there are too few to show."""

    name: str
    devices: Count | None


class RunsOfDay(Closed):
    """The runs of one day (UTC)."""

    day: date
    runs: Count
    adopted: Count


class Fleet(Closed):
    """Counts of all active devices of a tenant.

    A watcher sees no count of fewer than ten devices. For a watcher, all other counts are rounded to tens,
    and a property that fewer than ten devices share is not named.
    """

    devices: Count | None
    # These are lists of groups instead of objects, because the names are data, such as versions of agents.
    seen: list[Group] = Field(description="devices by the time when they were last seen")
    agents: list[Group] = Field(description="devices by the version of their agent")
    engines: list[Group] = Field(description="devices by the engine of their newest run")
    versions: list[VersionResults] = Field(description="versions that devices have or report, newest first")
    days: list[RunsOfDay] = Field(description="runs of the last 30 days, oldest day first")
