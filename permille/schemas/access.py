"""Operators: tenants, roles and tokens."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from permille.schemas.fields import Closed, Id, Name, Timestamp, WholeNumber


class Role(StrEnum):
    """What an operator token may do: admin everything, operator all but access, viewer reads."""

    ADMIN = "admin"
    OPERATOR = "operator"
    VIEWER = "viewer"


class TenantCreate(Closed):
    """A new tenant."""

    name: Name = Field(examples=["acme"])


class Tenant(Closed):
    """One tenant: nothing of it is visible to another."""

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
