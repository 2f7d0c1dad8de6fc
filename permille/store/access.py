"""Tenants, tokens of operators, and the callers behind tokens."""

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Select, bindparam, delete, func, or_, select, update
from sqlalchemy.orm import Session

from permille.schemas.access import Role
from permille.store import devices, rows
from permille.store.database import NOW, Database, moment, now
from permille.store.errors import ConflictError, require
from permille.store.ids import (
    DEVICE_TOKEN_PREFIX,
    OPERATOR_TOKEN_PREFIX,
    Prefix,
    hash_secret,
    new_id,
    new_operator_token,
)
from permille.store.rows import FIRST, Page, Window, fetch_page
from permille.store.tables import EndedSession, OperatorToken, Tenant

# Query of the valid token with the hash `token_hash`. It is built once, since building a statement costs more
# than running it.
_OPERATOR = select(
    OperatorToken.id.label("caller_id"),
    OperatorToken.tenant_id.label("caller_tenant_id"),
    OperatorToken.role.label("caller_role"),
    OperatorToken.last_used_at.label("caller_seen_at"),
).where(
    OperatorToken.token_hash == bindparam("token_hash"),
    OperatorToken.revoked_at.is_(None),
    or_(OperatorToken.expires_at.is_(None), OperatorToken.expires_at > NOW),
)
_ENDED = select(EndedSession.id).where(EndedSession.id == bindparam("session_id"))
# Our tokens have 47 characters. The limit bounds the work that a request with a false token causes.
MAX_TOKEN_CHARACTERS = 200
_CALLERS: dict[str, Select[*tuple[Any, ...]]] = {
    OPERATOR_TOKEN_PREFIX: _OPERATOR,
    DEVICE_TOKEN_PREFIX: devices.CALLER,
}


def create_tenant(session: Session, *, name: str) -> Tenant:
    """Add a tenant. Raises ConflictError if the name is taken."""
    if session.scalar(select(Tenant.id).where(Tenant.name == name)) is not None:
        raise ConflictError(f"There is a tenant {name!r} already. Choose another name.")
    # The oldest tenant administers the server. Even if the clock was set back, a new tenant must not become
    # the oldest.
    newest = session.scalar(select(func.max(Tenant.created_at)))
    at = now(session) if newest is None else max(now(session), newest + timedelta(microseconds=1))
    return rows.add(session, Tenant(id=new_id(Prefix.TENANT), name=name, created_at=at))


def get_tenant(session: Session, *, tenant_id: str) -> Tenant:
    """Read a tenant. Raises NotFoundError."""
    return require(session.get(Tenant, tenant_id), f"There is no tenant {tenant_id!r}.")


def first_tenant(session: Session) -> Tenant | None:
    """Return the oldest tenant, or None in an empty database. An embedded server has only this one."""
    return session.scalar(select(Tenant).order_by(Tenant.created_at, Tenant.id).limit(1))


def list_tenants(session: Session, *, window: Window = FIRST) -> Page[Tenant]:
    """List all tenants, newest first, for an administrator of the server."""
    return fetch_page(session, select(Tenant), window, Tenant.id)


def create_token(
    session: Session, *, tenant_id: str, name: str, role: Role, expires_at: datetime | None = None
) -> tuple[OperatorToken, str]:
    """Add a token of an operator. Return the row and the secret. The secret is not stored.

    Raises:
        NotFoundError: no such tenant.
    """
    get_tenant(session, tenant_id=tenant_id)
    secret = new_operator_token()
    token = rows.add(
        session,
        OperatorToken(
            id=new_id(Prefix.OPERATOR),
            tenant_id=tenant_id,
            name=name,
            role=Role(role).value,
            token_hash=hash_secret(secret),
            expires_at=expires_at,
            created_at=now(session),
        ),
    )
    return token, secret


def touch_token(session: Session, *, token_id: str) -> None:
    """Record that a token is used now. Skip this if another transaction has locked the row."""
    free = select(OperatorToken.id).where(OperatorToken.id == token_id).with_for_update(skip_locked=True)
    used = update(OperatorToken).where(OperatorToken.id.in_(free)).values(last_used_at=moment(session))
    session.execute(used.execution_options(synchronize_session=False))


def list_tokens(session: Session, *, tenant_id: str, window: Window = FIRST) -> Page[OperatorToken]:
    """List the tokens of a tenant that are not revoked, newest first."""
    query = select(OperatorToken).where(
        OperatorToken.tenant_id == tenant_id, OperatorToken.revoked_at.is_(None)
    )
    return fetch_page(session, query, window, OperatorToken.id)


def revoke_token(session: Session, *, tenant_id: str, token_id: str) -> None:
    """Revoke a token. The next request with it is refused. Idempotent. Raises NotFoundError."""
    token = rows.get(session, OperatorToken, tenant_id=tenant_id, row_id=token_id)
    # The row stays, because the audit log names its id.
    token.revoked_at = token.revoked_at or now(session)


def end_session(session: Session, *, tenant_id: str, session_id: str, expires_at: datetime) -> None:
    """Refuse a session of the web pages from now on, and delete the rows of expired sessions.
    Idempotent.
    """
    at = now(session)
    # An expired cookie is refused anyway, so its row is not needed.
    session.execute(delete(EndedSession).where(EndedSession.expires_at <= at))
    session.merge(EndedSession(id=session_id, tenant_id=tenant_id, expires_at=expires_at, created_at=at))


def is_session_ended(database: Database, session_id: str) -> bool:
    """Return whether the operator has signed out of this session of the web pages."""
    return database.first(_ENDED, session_id=session_id) is not None


def find_caller(database: Database, secret: str) -> Any | None:
    """Return the row of the operator or device to which a token belongs, or None if the token is not
    valid.

    The columns of the row are named `caller_...`.
    """
    # Reject nonsense before it is hashed, since anyone may send it.
    if len(secret) > MAX_TOKEN_CHARACTERS or not secret.isascii():
        return None
    # Both prefixes have the same length.
    statement = _CALLERS.get(secret[: len(OPERATOR_TOKEN_PREFIX)])
    return None if statement is None else database.first(statement, token_hash=hash_secret(secret))
