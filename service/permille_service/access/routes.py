"""Routes of tenants and operator tokens, for administrators. `ensure_token` makes the first token."""

from datetime import timedelta
from pathlib import Path

from fastapi import APIRouter
from sqlalchemy.orm import Session

from permille.files import write_atomic
from permille.schemas.access import AuditEntry, Role, Tenant, TenantCreate, Token, TokenCreate, TokenSecret
from permille.schemas.fields import Page
from permille.schemas.problems import ProblemType
from permille.store import access, audit, database, inputs, tables
from permille_service.access.principals import Admin, changing, require_first_tenant
from permille_service.context import Served, Service
from permille_service.creation import AdminCreating
from permille_service.parameters import DEFAULT_LIMIT, After, Limit, Paging, TokenId, page_of
from permille_service.problems import PRIVATE, ApiError, documented

FIRST_TENANT = "main"
FIRST_TOKEN = "first"  # noqa: S105 - the token's name, not its secret

router = APIRouter(prefix="/v1", tags=["access"], responses=documented(*PRIVATE))


@router.post(
    "/tenants",
    status_code=201,
    responses=documented(ProblemType.CONFLICT, ProblemType.IDEMPOTENCY_CONFLICT),
)
def create_tenant(body: TenantCreate, creating: AdminCreating) -> Tenant:
    """Add a tenant, with folders for its models and corpora. Only administrators of the first tenant may do
    this."""

    def make(session: Session) -> Tenant:
        require_first_tenant(session, creating.operator)
        return present_tenant(access.create_tenant(session, name=body.name))

    tenant = creating.once(Tenant, body, make)
    settings = creating.service.settings
    with creating.service.database.read() as session:
        roots = inputs.roots_of(session, settings, tenant_id=tenant.id)
    # Make the folders after the commit. If this fails, a repetition with the same Idempotency-Key makes them.
    for root in (roots.models, roots.corpora):
        root.mkdir(parents=True, exist_ok=True)
    return tenant


@router.get("/tenants")
def list_tenants(service: Served, operator: Admin, window: Paging) -> Page[Tenant]:
    """List tenants. Only administrators of the first tenant may do this."""
    with service.database.read() as session:
        require_first_tenant(session, operator)
        page = access.list_tenants(session, window=window)
    return page_of(page, present_tenant)


@router.post(
    "/tokens",
    status_code=201,
    responses=documented(ProblemType.NOT_FOUND, ProblemType.IDEMPOTENCY_CONFLICT),
)
def create_token(body: TokenCreate, creating: AdminCreating) -> TokenSecret:
    """Make an operator token. Only this answer shows its secret."""
    operator = creating.operator

    def make(session: Session) -> TokenSecret:
        tenant_id = body.tenant_id or operator.tenant_id
        if tenant_id != operator.tenant_id:
            require_first_tenant(session, operator)
        days = body.expires_in_days
        row, secret = access.create_token(
            session,
            tenant_id=tenant_id,
            name=body.name,
            role=body.role,
            expires_at=None if days is None else database.now(session) + timedelta(days=days),
        )
        return TokenSecret(**present_token(row).model_dump(), secret=secret)

    return creating.once(TokenSecret, body, make, private=True, removable=tables.OperatorToken)


@router.get("/tokens")
def list_tokens(service: Served, operator: Admin, window: Paging) -> Page[Token]:
    """List the operator tokens of the caller's tenant, without their secrets."""
    with service.database.read() as session:
        page = access.list_tokens(session, tenant_id=operator.tenant_id, window=window)
    return page_of(page, present_token)


@router.delete(
    "/tokens/{token_id}", status_code=204, responses=documented(ProblemType.NOT_FOUND, ProblemType.CONFLICT)
)
def delete_token(token_id: TokenId, service: Served, operator: Admin) -> None:
    """Revoke an operator token. The next request with it is refused. A token cannot revoke itself."""
    # An administrator who revokes the only token would lock everybody out.
    if token_id == operator.token_id:
        raise ApiError(ProblemType.CONFLICT, "A token cannot revoke itself. Use another one.")
    with changing(service, operator) as session:
        access.revoke_token(session, tenant_id=operator.tenant_id, token_id=token_id)


@router.get("/audit")
def list_audit_entries(
    service: Served, operator: Admin, after: After = 0, limit: Limit = DEFAULT_LIMIT
) -> list[AuditEntry]:
    """List the changes that operators of the caller's tenant made, oldest first.

    The entries form a hash chain, so that `permille audit verify` finds entries that were changed.
    """
    with service.database.read() as session:
        return audit.entries_after(session, tenant_id=operator.tenant_id, seq=after, limit=limit)


def present_tenant(row: tables.Tenant) -> Tenant:
    """Return the record of a tenant."""
    return Tenant(id=row.id, name=row.name, created_at=row.created_at)


def present_token(row: tables.OperatorToken) -> Token:
    """Return the record of a token."""
    return Token(
        id=row.id,
        tenant_id=row.tenant_id,
        name=row.name,
        role=Role(row.role),
        created_at=row.created_at,
        last_used_at=row.last_used_at,
        expires_at=row.expires_at,
    )


def ensure_token(service: Service) -> Path:
    """Make sure that the token file exists, and return its path.

    If the file is missing, make a new token for an administrator of the first tenant, and write it to the
    file with mode 0600. This gives nobody new rights: whoever can delete the file can also write to the
    folder of the keys (the private folder, or else the data folder). The database stores only the token's
    hash.
    """
    path = service.settings.token_path
    if path.exists():
        return path
    with service.database.write() as session:
        tenant = access.first_tenant(session) or access.create_tenant(session, name=FIRST_TENANT)
        _, secret = access.create_token(session, tenant_id=tenant.id, name=FIRST_TOKEN, role=Role.ADMIN)
    write_atomic(path, f"{secret}\n".encode(), mode=0o600)
    return path
