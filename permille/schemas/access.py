"""Tenants, roles, tokens of operators, the audit log, and the deletion of old objects."""

import hashlib
import json
from enum import StrEnum
from typing import Annotated, Any, ClassVar

from pydantic import Field

from permille.schemas.fields import (
    Closed,
    Count,
    Digest,
    Examples,
    Id,
    Name,
    Positive,
    Timestamp,
    WholeNumber,
)

# The chain of a tenant's audit log begins with this digest.
FIRST_DIGEST = "sha256:" + "0" * 64


class Role(StrEnum):
    """Rights of an operator token.

    Only an admin manages tenants, tokens, signing keys and retention, collects blobs, and reads tokens and
    the audit log. An operator may do everything else, and a viewer may read everything else. A watcher may
    only read numbers about many devices together.
    """

    ADMIN = "admin"
    OPERATOR = "operator"
    VIEWER = "viewer"
    WATCHER = "watcher"


class TenantCreate(Closed):
    """A new tenant."""

    examples: ClassVar[Examples] = {"a tenant": {"name": "acme"}}

    name: Name = Field(examples=["acme"])


class Tenant(Closed):
    """A tenant. Other tenants cannot see anything of it."""

    id: Id
    name: Name
    created_at: Timestamp


class TokenCreate(Closed):
    """A new operator token, in the caller's tenant. An admin of the first tenant may name another
    tenant.
    """

    examples: ClassVar[Examples] = {
        "read everything, without an end": {"name": "dashboard"},
        "make and publish packages for 90 days": {"name": "ci", "role": "operator", "expires_in_days": 90},
    }

    # People tell tokens apart by their names, since the secrets are never shown again.
    name: Name = Field(examples=["ci"], description="name of the token in lists")
    role: Role = Field(default=Role.VIEWER, description="rights of the token")
    tenant_id: Id | None = Field(default=None, description="tenant of the token (default: the caller's)")
    expires_in_days: Annotated[int, Field(strict=True, ge=1, le=3650), WholeNumber] | None = Field(
        default=None, description="days until the token expires (default: never)"
    )


class Token(Closed):
    """An operator token without its secret."""

    id: Id
    tenant_id: Id
    name: Name
    role: Role
    created_at: Timestamp
    last_used_at: Timestamp | None = None
    expires_at: Timestamp | None = None


class TokenSecret(Token):
    """A new operator token. `secret` is shown only here, and stored as a hash."""

    secret: str


class AuditEntry(Closed):
    """The record of a change by an operator, written in the same transaction as the change."""

    seq: Positive = Field(description="number of the entry: 1, 2, 3 ... within the tenant")
    at: Timestamp
    token_id: Id = Field(description="id of the operator's token")
    action: str = Field(description="operation id in this document", examples=["yank_release"])
    subject: str = Field(description="path of the request, with the id of the object that it made")
    request: dict[str, Any] | None = Field(description="body of the request, or null")
    digest: Digest = Field(description="digest of this entry together with the digest of the entry before it")

    def digest_after(self, previous: str) -> str:
        """Return the digest of this entry if it follows an entry with the digest `previous`."""
        # Anyone can repeat this computation with the entries of the API, so it must stay as it is.
        fields = self.model_dump(mode="json", exclude={"digest"})
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        chained = hashlib.sha256(f"permille-audit-1\0{previous}\0{text}".encode())
        return f"sha256:{chained.hexdigest()}"


class BlobCollection(Closed):
    """Result of a collection: the blobs that it found, and the blobs that it deleted. In a dry run, these are
    the blobs that it would delete.
    """

    dry_run: bool
    stored_bytes: Count = Field(description="bytes of all blobs before the collection")
    unreferenced_bytes: Count = Field(
        description="bytes of blobs to which nothing refers, including those that are too young to delete"
    )
    removed_bytes: Count = Field(
        description="bytes of deleted blobs, and of deleted folders of sparse models"
    )
    removed_count: Count
    removed: list[str] = Field(
        description="the 1,000 largest deleted objects: digests of blobs, and folders of sparse models",
        examples=[["sha256:" + "0123456789abcdef" * 4]],
    )


_Days = Annotated[int, Field(strict=True, ge=1, le=36_500), WholeNumber]


class RetentionRule(Closed):
    """A retention rule: the days until objects of each kind are deleted. Null keeps them."""

    examples: ClassVar[Examples] = {
        "unused results and shared logs for 90 days": {"result_days": 90, "keep_newest": 5, "log_days": 90},
        "everything for ever": {},
    }

    result_days: _Days | None = Field(
        default=None, description="days after which unused packages, quantizations and masks are deleted"
    )
    keep_newest: Annotated[
        int,
        Field(
            strict=True, ge=0, le=1_000_000, description="number of newest results to keep per model and kind"
        ),
        WholeNumber,
    ] = 3
    log_days: _Days | None = Field(
        default=None, description="days after which shared logs and states of runs are deleted"
    )
    report_days: _Days | None = Field(
        default=None, description="days after which reports of runs and their logs are deleted"
    )
    job_days: _Days | None = Field(
        default=None, description="days after which ended jobs without remaining results are deleted"
    )


class Retired(Closed):
    """Objects that the rule deleted, or would delete in a dry run. A call deletes at most 50 of each kind."""

    dry_run: bool
    packages: list[Digest]
    quantizations: list[Id]
    masks: list[Id]
    logs: Count
    reports: Count
    jobs: Count
