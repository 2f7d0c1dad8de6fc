"""Operators: tenants, roles, tokens, the log of what operators changed, and what they have kept."""

import hashlib
import json
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from permille.schemas.fields import Closed, Count, Digest, Id, Name, Positive, Timestamp, WholeNumber

# The digest before the first entry of a tenant.
FIRST_DIGEST = "sha256:" + "0" * 64


class Role(StrEnum):
    """Rights of an operator token: admin everything, operator all but access, viewer reads, watcher sees
    numbers of many devices alone."""

    ADMIN = "admin"
    OPERATOR = "operator"
    VIEWER = "viewer"
    WATCHER = "watcher"


class TenantCreate(Closed):
    """A new tenant."""

    name: Name = Field(examples=["acme"])


class Tenant(Closed):
    """A tenant. Nothing of it is visible to other tenants."""

    id: Id
    name: Name
    created_at: Timestamp


class TokenCreate(Closed):
    """A new operator token, in the caller's tenant or, for an admin of the first tenant, in a named one."""

    name: Name = Field(examples=["ci"], description="what the token is called in lists")
    role: Role = Field(default=Role.VIEWER, description="what it may do")
    tenant_id: Id | None = Field(default=None, description="another tenant; else the caller's")
    expires_in_days: Annotated[int, Field(strict=True, ge=1, le=3650), WholeNumber] | None = Field(
        default=None, description="days until it is refused; else never"
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
    """A new operator token; `secret` is shown once, here, and stored hashed."""

    secret: str


class AuditEntry(Closed):
    """A change by an operator, written in the transaction that made it."""

    seq: Positive = Field(description="1, 2, 3 ... within the tenant")
    at: Timestamp
    token_id: Id = Field(description="of the operator's token")
    action: str = Field(description="the operation of this document", examples=["yank_release"])
    subject: str = Field(description="the path of the request, with the id of what it made")
    request: dict[str, Any] | None = Field(description="its body; null where it had none")
    digest: Digest = Field(description="of this entry and of the digest before it")

    def digest_after(self, previous: str) -> str:
        """The digest that this entry has after another one's."""
        fields = self.model_dump(mode="json", exclude={"digest"})
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        chained = hashlib.sha256(f"permille-audit-1\0{previous}\0{text}".encode())
        return f"sha256:{chained.hexdigest()}"


class BlobCollection(Closed):
    """Result of a collection: the blobs that it found, and deleted or (in a dry run) would delete."""

    dry_run: bool
    stored_bytes: Count = Field(description="of all blobs, before it")
    unreferenced_bytes: Count = Field(description="of those that no row names, too young ones included")
    removed_bytes: Count = Field(description="of those that are old, and of files of sparse models")
    removed_count: Count
    removed: list[str] = Field(
        description="the largest, at most 1,000: digests of blobs, folders of sparse models",
        examples=[["sha256:" + "0123456789abcdef" * 4]],
    )


_Days = Annotated[int, Field(strict=True, ge=1, le=36_500), WholeNumber]


class RetentionRule(Closed):
    """Retention rule: days until objects of each kind are deleted. Null keeps them."""

    result_days: _Days | None = Field(
        default=None, description="packages, quantizations and masks that nothing names, no release either"
    )
    keep_newest: Annotated[
        int,
        Field(strict=True, ge=0, le=1_000_000, description="of each of these, the newest of a model stay"),
        WholeNumber,
    ] = 3
    log_days: _Days | None = Field(default=None, description="shared logs and states of runs")
    report_days: _Days | None = Field(default=None, description="reports of runs, with their logs")
    job_days: _Days | None = Field(
        default=None, description="records of jobs that have ended, once what they made is gone"
    )


class Retired(Closed):
    """Objects that the rule deleted or (in a dry run) would delete, at most 500 of each at a time."""

    dry_run: bool
    packages: list[Digest]
    quantizations: list[Id]
    masks: list[Id]
    logs: Count
    reports: Count
    jobs: Count
