"""The first tenant and its administrator's token, made when the service first starts."""

from pathlib import Path

from permille.files import write_atomic
from permille.store import access
from permille.store.tables import Role
from permille_service.context import Service

FIRST_TENANT = "main"
FIRST_TOKEN = "first"  # noqa: S105 - the token's name, not its secret


def ensure_token(service: Service) -> Path:
    """Make sure that the token file exists; return its path.

    Where it is missing, a new administrator's token of the first tenant is made: who can write to the data
    folder is its administrator anyway. The file has mode 0600; the database keeps the token's hash only.
    """
    path = service.settings.token_path
    if path.exists():
        return path
    with service.database.write() as session:
        tenant = access.first_tenant(session) or access.create_tenant(session, name=FIRST_TENANT)
        _, secret = access.create_token(session, tenant_id=tenant.id, name=FIRST_TOKEN, role=Role.ADMIN)
    write_atomic(path, f"{secret}\n".encode(), mode=0o600)
    return path
