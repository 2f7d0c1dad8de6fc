"""Who calls: an operator with a role, or a device. Every route but health, enrolment and device tokens has
one.

A principal is found by its bearer token in the database at every request, so that a revoked one is refused
at its next. What a principal may not see does not exist for it (404); what its role may not do is refused
(403).
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Any, Generic, TypeVar

from fastapi import Depends, Request
from fastapi.security import HTTPBearer
from fastapi.security.base import SecurityBase
from pydantic import BaseModel
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from permille.schemas.access import Role
from permille.schemas.problems import ProblemType
from permille.store import access, audit, devices
from permille.store.access import Asked, find_caller
from permille.store.audit import Change
from permille.store.ids import Prefix
from permille_service.context import Service, service_of
from permille_service.problems import ApiError
from permille_service.routing import WITHOUT_BODY, blocking, try_in_thread

logger = logging.getLogger(__name__)
RANK = {Role.WATCHER: 0, Role.VIEWER: 1, Role.OPERATOR: 2, Role.ADMIN: 3}
_SEEN_EVERY = timedelta(minutes=1)

bearer = HTTPBearer(
    auto_error=False,
    scheme_name="bearer",
    description="An operator token (`pmo_...`), or on a device's own routes its access token (`pmd_...`).",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """A person or program that calls the operator's routes.

    Attributes:
        action, path: the operation that it calls, for the audit log.
    """

    tenant_id: str
    token_id: str
    role: Role
    action: str = ""
    path: str = ""

    def change(self, *, made: str = "", body: BaseModel | None = None) -> Change:
        """What the audit log holds of this request; `made` names what it made."""
        request = None if body is None else body.model_dump(mode="json")
        subject = f"{self.path}/{made}" if made else self.path
        return Change(token_id=self.token_id, action=self.action, subject=subject, request=request)


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePrincipal:
    """An enrolled device, with the release that it follows."""

    tenant_id: str
    device_id: str
    release: str
    alias: str
    version: int | None  # of the release, that it was told last
    seen_at: datetime | None


Principal = Operator | DevicePrincipal
Allowed = TypeVar("Allowed")
Row = TypeVar("Row")


def find_principal(service: Service, secret: str) -> Principal | None:
    """The principal of a bearer token, or None: unknown, expired or revoked."""
    found = find_caller(service.database, secret)
    return None if found is None else _principal_of(service, found, noting=True)


class Authenticated(SecurityBase, Generic[Allowed]):
    """A dependency: the principal of a request, where `check` lets it pass.

    One dependency and not one for each step: each costs FastAPI as much as a statement.
    """

    def __init__(self, check: Callable[[Principal], Allowed]) -> None:
        self.model, self.scheme_name = bearer.model, bearer.scheme_name  # what the document says of it
        self._check = check

    async def __call__(self, request: Request) -> Allowed:
        """Find it by its token. Raises ApiError (`unauthenticated`, `forbidden`)."""
        service, secret = await service_of(request), await _secret(request)
        principal = await blocking(find_principal, service, secret)
        if principal is None:
            raise _invalid_token()
        if isinstance(principal, Operator) and request.method not in WITHOUT_BODY:  # reads are not audited
            principal = replace(principal, action=request.scope["route"].name, path=request.scope["path"])
        return self._check(principal)


@dataclass(frozen=True, slots=True)
class Asking(Generic[Allowed]):
    """A caller that is found when it asks: a route that takes one and does not `ask` would answer anybody."""

    service: Service
    secret: str
    check: Callable[[Principal], Allowed]
    noting: bool

    def ask(self, asked: Asked[Row], **values: str) -> tuple[Allowed, list[Row]]:
        """Who it is, and what there is of what it asks for, in its tenant.

        Raises ApiError (`unauthenticated`, `forbidden`).
        """
        found = asked.find(self.service.database, self.secret, **values)
        if found is None:
            raise _invalid_token()
        caller, rows = found
        return self.check(_principal_of(self.service, caller, noting=self.noting)), rows


class Asks(SecurityBase, Generic[Allowed]):
    """A dependency: who `Asking` finds, where `check` lets it pass.

    Args:
        noting: note when a device was seen; else the route does.
    """

    def __init__(self, check: Callable[[Principal], Allowed], *, noting: bool = True) -> None:
        self.model, self.scheme_name = bearer.model, bearer.scheme_name
        self._check, self._noting = check, noting

    async def __call__(self, request: Request) -> Asking[Allowed]:
        """Look at nothing but whether there is a token. Raises ApiError (`unauthenticated`)."""
        return Asking(await service_of(request), await _secret(request), self._check, self._noting)


async def _secret(request: Request) -> str:
    credentials = await bearer(request)
    if credentials is None:
        raise ApiError(
            ProblemType.UNAUTHENTICATED,
            "expected an Authorization header with a bearer token, got none",
            headers={"WWW-Authenticate": 'Bearer realm="permille"'},
        )
    return credentials.credentials


def _invalid_token() -> ApiError:
    return ApiError(
        ProblemType.UNAUTHENTICATED,
        "expected a token that is valid, got one that is unknown, expired or revoked",
        headers={"WWW-Authenticate": 'Bearer realm="permille", error="invalid_token"'},
    )


@contextmanager
def changing(service: Service, operator: Operator, body: BaseModel | None = None) -> Iterator[Session]:
    """A write transaction of an operator's change, with its entry in the audit log."""
    with service.database.write() as session:
        yield session
        audit.append(session, tenant_id=operator.tenant_id, change=operator.change(body=body))


def require_first_tenant(session: Session, operator: Operator) -> None:
    """Refuse operators of other tenants. Raises ApiError (`forbidden`)."""
    first = access.first_tenant(session)
    if first is None or first.id != operator.tenant_id:
        raise ApiError(ProblemType.FORBIDDEN, "expected an administrator of the first tenant, got another's")


def operator_with(role: Role) -> Authenticated[Operator]:
    """A dependency: an operator of at least this role."""
    return Authenticated(partial(require_role, role=role))


def require_role(principal: Principal, role: Role) -> Operator:
    """The operator, where it has at least this role. Raises ApiError (`forbidden`)."""
    if not isinstance(principal, Operator):
        raise ApiError(ProblemType.FORBIDDEN, "expected an operator's token, got a device's")
    if RANK[principal.role] < RANK[role]:
        raise ApiError(ProblemType.FORBIDDEN, f"expected the role {role}, got {principal.role}")
    return principal


def _require_reader(principal: Principal) -> Principal:
    if isinstance(principal, Operator):
        return require_role(principal, Role.VIEWER)
    return principal


def _require_device(principal: Principal) -> DevicePrincipal:
    if not isinstance(principal, DevicePrincipal):
        raise ApiError(ProblemType.FORBIDDEN, "expected a device's token, got an operator's")
    return principal


Watcher = Annotated[Operator, Depends(operator_with(Role.WATCHER))]
Viewer = Annotated[Operator, Depends(operator_with(Role.VIEWER))]
Maker = Annotated[Operator, Depends(operator_with(Role.OPERATOR))]
Admin = Annotated[Operator, Depends(operator_with(Role.ADMIN))]
CallingDevice = Annotated[DevicePrincipal, Depends(Authenticated(_require_device))]
Anyone = Annotated[Principal, Depends(Authenticated(_require_reader))]
"""A device, or an operator who may read single rows."""
AskingViewer = Annotated[Asking[Operator], Depends(Asks(partial(require_role, role=Role.VIEWER)))]
Polling = Annotated[Asking[Principal], Depends(Asks(_require_reader, noting=False))]
"""As `Anyone`, of the route that notes itself that a device was seen."""


def _principal_of(service: Service, found: Any, *, noting: bool) -> Principal:
    """Of the row that `find_caller` found."""
    if not found.caller_id.startswith(f"{Prefix.DEVICE}_"):
        if _is_stale(found.caller_seen_at):
            try_in_thread(note, service, partial(access.touch_token, token_id=found.caller_id))
        return Operator(
            tenant_id=found.caller_tenant_id, token_id=found.caller_id, role=Role(found.caller_role)
        )
    if noting and _is_stale(found.caller_seen_at):
        try_in_thread(note, service, partial(devices.touch, device_id=found.caller_id))
    return DevicePrincipal(
        tenant_id=found.caller_tenant_id,
        device_id=found.caller_id,
        release=found.caller_release,
        alias=found.caller_alias,
        version=found.caller_version,
        seen_at=found.caller_seen_at,
    )


def note_poll(service: Service, device: DevicePrincipal, version: int) -> None:
    """Note that a device was seen and which version it was told: one write, where either is news."""
    if device.version != version or _is_stale(device.seen_at):
        touch = partial(devices.touch, device_id=device.device_id, version=version)
        try_in_thread(note, service, touch)


def note(service: Service, touch: Callable[[Session], None]) -> None:
    """Note that a principal was seen, where it can be: on a full disk or behind a lock reading goes on."""
    try:
        with service.database.write() as session:
            touch(session)
    except OperationalError as exc:
        logger.warning("cannot note who was seen: %s", exc)


def _is_stale(seen_at: datetime | None) -> bool:
    """Whether it is time to note that a principal was seen: reading requests should not all write."""
    return seen_at is None or abs(datetime.now(UTC) - seen_at) > _SEEN_EVERY
