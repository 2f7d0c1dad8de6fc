"""Tenants and operators' tokens."""

from datetime import datetime, timedelta

from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from permille.schemas.access import Role
from permille.store import rows
from permille.store.database import now
from permille.store.errors import ConflictError, NotFoundError
from permille.store.ids import Prefix, hash_secret, new_id, new_operator_token
from permille.store.rows import FIRST, Page, Window, fetch_page
from permille.store.tables import OperatorToken, Tenant

_TOUCH_EVERY = timedelta(minutes=1)


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


def authenticate_operator(session: Session, secret: str) -> OperatorToken | None:
    """The token of this secret, unless it is unknown, expired or revoked."""
    query = select(OperatorToken).where(
        OperatorToken.token_hash == hash_secret(secret),
        OperatorToken.revoked_at.is_(None),
        or_(OperatorToken.expires_at.is_(None), OperatorToken.expires_at > now(session)),
    )
    return session.scalar(query)


def touch_token(session: Session, *, token_id: str) -> None:
    """Note that a token was used, at most once a minute."""
    token = session.get(OperatorToken, token_id)
    at = now(session)
    if token is not None and (token.last_used_at is None or at - token.last_used_at > _TOUCH_EVERY):
        token.last_used_at = at


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
