"""Tenants and operators' tokens."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import bindparam, func, or_, select, update
from sqlalchemy.orm import Session

from permille.schemas.access import Role
from permille.store import rows
from permille.store.database import NOW, Database, moment, now
from permille.store.errors import ConflictError, NotFoundError
from permille.store.ids import Prefix, hash_secret, new_id, new_operator_token
from permille.store.rows import FIRST, Page, Window, fetch_page
from permille.store.tables import OperatorToken, Tenant

_FOUND = select(
    OperatorToken.id, OperatorToken.tenant_id, OperatorToken.role, OperatorToken.last_used_at
).where(
    OperatorToken.token_hash == bindparam("token_hash"),
    OperatorToken.revoked_at.is_(None),
    or_(OperatorToken.expires_at.is_(None), OperatorToken.expires_at > NOW),
)


@dataclass(frozen=True, slots=True)
class Authenticated:
    """The token of a secret."""

    id: str
    tenant_id: str
    role: str
    last_used_at: datetime | None


def create_tenant(session: Session, *, name: str) -> Tenant:
    """Add a tenant. Raises ConflictError when the name is taken."""
    if session.scalar(select(Tenant.id).where(Tenant.name == name)) is not None:
        raise ConflictError(f"there is a tenant {name!r} already")
    # Which tenant is the first decides who administers the server: no clock that went back may change it.
    newest = session.scalar(select(func.max(Tenant.created_at)))
    at = now(session) if newest is None else max(now(session), newest + timedelta(microseconds=1))
    tenant = Tenant(id=new_id(Prefix.TENANT), name=name, created_at=at)
    session.add(tenant)
    session.flush()
    return tenant


def get_tenant(session: Session, *, tenant_id: str) -> Tenant:
    """Read a tenant. Raises NotFoundError."""
    tenant = session.get(Tenant, tenant_id)
    if tenant is None:
        raise NotFoundError(f"no tenant {tenant_id!r}")
    return tenant


def first_tenant(session: Session) -> Tenant | None:
    """The oldest tenant (the embedded server's own), or None in an empty database."""
    return session.scalar(select(Tenant).order_by(Tenant.created_at, Tenant.id).limit(1))


def list_tenants(session: Session, *, window: Window = FIRST) -> Page[Tenant]:
    """List all tenants, newest first: for an administrator of the server."""
    return fetch_page(session, select(Tenant), window, Tenant.id)


def create_token(
    session: Session, *, tenant_id: str, name: str, role: Role, expires_at: datetime | None = None
) -> tuple[OperatorToken, str]:
    """Add an operator's token; return the row and the secret, which is not stored.

    Raises:
        NotFoundError: no such tenant.
    """
    get_tenant(session, tenant_id=tenant_id)
    secret = new_operator_token()
    token = OperatorToken(
        id=new_id(Prefix.OPERATOR),
        tenant_id=tenant_id,
        name=name,
        role=Role(role).value,
        token_hash=hash_secret(secret),
        expires_at=expires_at,
        created_at=now(session),
    )
    session.add(token)
    session.flush()
    return token, secret


def authenticate_operator(database: Database, secret: str) -> Authenticated | None:
    """The token of this secret, unless it is unknown, expired or revoked."""
    found = database.first(_FOUND, token_hash=hash_secret(secret))
    return None if found is None else Authenticated(*found)


def touch_token(session: Session, *, token_id: str) -> None:
    """Note that a token is used now."""
    used = update(OperatorToken).where(OperatorToken.id == token_id).values(last_used_at=moment(session))
    session.execute(used.execution_options(synchronize_session=False))


def list_tokens(session: Session, *, tenant_id: str, window: Window = FIRST) -> Page[OperatorToken]:
    """List a tenant's tokens that are not revoked, newest first."""
    query = select(OperatorToken).where(
        OperatorToken.tenant_id == tenant_id, OperatorToken.revoked_at.is_(None)
    )
    return fetch_page(session, query, window, OperatorToken.id)


def revoke_token(session: Session, *, tenant_id: str, token_id: str) -> None:
    """Revoke a token, with effect on the next request. Idempotent. Raises NotFoundError."""
    token = rows.get(session, OperatorToken, tenant_id=tenant_id, row_id=token_id)
    token.revoked_at = token.revoked_at or now(session)
