"""Trust: the TUF roles of a tenant as operators see them, and rotations of their keys.

The metadata itself has the format of TUF. The API sends and takes it as bytes.
"""

from typing import Annotated, ClassVar, Final

from pydantic import Field, StringConstraints

from permille.schemas.devices import PublicKey
from permille.schemas.fields import Closed, Count, Examples, Positive, Timestamp, WholeNumber

ROLE_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,80}$"
FILE_PATTERN = r"^([1-9][0-9]{0,15}\.)?[a-z0-9][a-z0-9._-]{0,80}\.json$"
# With consistent snapshots, clients put the hash of a target before its file name.
TARGET_PATTERN = r"^releases/[a-z0-9][a-z0-9._-]{0,62}/[0-9a-f]{64}\.[1-9][0-9]{0,15}\.json$"

METADATA_EXAMPLES: Final = {
    "delegated targets without a release": {
        "signatures": [
            {
                "keyid": "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
                "sig": "ab" * 64,
            }
        ],
        "signed": {
            "_type": "targets",
            "expires": "2030-01-01T00:00:00Z",
            "spec_version": "1.0.31",
            "targets": {},
            "version": 2,
        },
    }
}
RoleName = Annotated[str, StringConstraints(pattern=ROLE_PATTERN), Field(examples=["releases"])]


class TrustRole(Closed):
    """A role: its keys, and the expiry of its newest metadata."""

    role: RoleName
    version: Count
    expires_at: Timestamp
    threshold: Positive = Field(description="number of keys that must sign")
    key_ids: list[str]
    # If false, a change of the role becomes a draft.
    signed_here: bool = Field(description="true if the service holds enough of the keys")


class Trust(Closed):
    """The roles of a tenant, root first. Invitations contain `root_digest`."""

    root_digest: str = Field(examples=["0123456789abcdef" * 2])
    roles: list[TrustRole]


class RoleKeys(Closed):
    """New public keys of a role. Their private keys are elsewhere. If the list is empty, the service makes a
    key.
    """

    role: RoleName
    # The service computes the TUF ids of these raw keys, so a caller cannot give a wrong id.
    public_keys: Annotated[list[PublicKey], Field(max_length=20)] = Field(default=[])
    threshold: Annotated[int, Field(strict=True, ge=1, le=20), WholeNumber] = 1


class TrustRotation(Closed):
    """Roles that get new keys. The service always holds the keys of `snapshot` and `timestamp`."""

    examples: ClassVar[Examples] = {
        "a new key that the service makes": {"roles": [{"role": "releases"}]},
        "two keys that are kept elsewhere": {
            "roles": [
                {
                    "role": "root",
                    "public_keys": [
                        "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo",
                        "PUAXw-hDiVqStwqnTRt-vJyYLM8uxJaMwM1V8Sr0Zgw",
                    ],
                    "threshold": 2,
                }
            ]
        },
    }

    roles: Annotated[list[RoleKeys], Field(min_length=1, max_length=20)]


class TrustRenewal(Closed):
    """Roles to sign again now, in addition to those that are due."""

    examples: ClassVar[Examples] = {"all that is due": {}, "also the root": {"roles": ["root"]}}

    roles: Annotated[list[RoleName], Field(max_length=20)] = Field(default=[])


class TrustDraft(Closed):
    """The next metadata of a role, which must be signed elsewhere before it takes effect."""

    role: RoleName
    metadata: str = Field(description="TUF metadata; sign it, and send the signed file with `PUT`")


class TrustChange(Closed):
    """The roles after a change, and the drafts to sign elsewhere, in the order in which to send them."""

    trust: Trust
    drafts: list[TrustDraft]
