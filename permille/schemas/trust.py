"""Trust: what operators see of a tenant's TUF roles, and how keys change hands.

The metadata itself is TUF's own format, served and taken as bytes.
"""

from typing import Annotated

from pydantic import Field, StringConstraints

from permille.schemas.devices import PublicKey
from permille.schemas.fields import Closed, Count, Positive, Timestamp, WholeNumber

ROLE_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,80}$"
FILE_PATTERN = r"^([1-9][0-9]{0,15}\.)?[a-z0-9][a-z0-9._-]{0,80}\.json$"
TARGET_PATTERN = r"^releases/[a-z0-9][a-z0-9._-]{0,62}/[0-9a-f]{64}\.[1-9][0-9]{0,15}\.json$"

RoleName = Annotated[str, StringConstraints(pattern=ROLE_PATTERN), Field(examples=["releases"])]


class TrustRole(Closed):
    """A role: its keys, and the expiry of its newest metadata."""

    role: RoleName
    version: Count
    expires_at: Timestamp
    threshold: Positive = Field(description="so many of the keys must sign")
    key_ids: list[str]
    signed_here: bool = Field(description="the service holds enough of the keys")


class Trust(Closed):
    """A tenant's roles, root first; `root_digest` is what invitations carry."""

    root_digest: str = Field(examples=["0123456789abcdef" * 2])
    roles: list[TrustRole]


class RoleKeys(Closed):
    """New keys of a role: public keys whose private halves are elsewhere, or none: the service makes one."""

    role: RoleName
    public_keys: Annotated[list[PublicKey], Field(max_length=20)] = Field(default=[])
    threshold: Annotated[int, Field(strict=True, ge=1, le=20), WholeNumber] = 1


class TrustRotation(Closed):
    """Roles that get new keys. `snapshot` and `timestamp` always have keys of the service."""

    roles: Annotated[list[RoleKeys], Field(min_length=1, max_length=20)]


class TrustRenewal(Closed):
    """Roles to sign again now, in addition to those that are due."""

    roles: Annotated[list[RoleName], Field(max_length=20)] = Field(default=[])


class TrustDraft(Closed):
    """A role's next metadata, which must be signed elsewhere before it counts."""

    role: RoleName
    metadata: str = Field(description="TUF metadata; send it signed, as it is then, to `PUT`")


class TrustChange(Closed):
    """The roles afterwards, and what must be signed elsewhere first, in the order in which to send it."""

    trust: Trust
    drafts: list[TrustDraft]
