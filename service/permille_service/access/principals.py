"""Authentication and roles: each route declares which principals may call it, or that it is public.

    @router.get("/devices")
    def list_devices(service: Served, operator: Viewer) -> Page[Device]: ...

A principal is an operator with a role, or a device. The bearer token of each request is looked up in the
database, so the revocation of a token takes effect at the next request. If a principal may not see an object,
the answer is 404. If its role does not allow an action, the answer is 403.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Generic, TypeVar

from fastapi import Depends, FastAPI, Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute, iter_route_contexts
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from permille.schemas.access import Role
from permille.schemas.problems import ProblemType
from permille.store import access, audit, devices
from permille.store.access import find_caller
from permille.store.audit import Change
from permille.store.ids import Prefix
from permille_service.context import Served, Service
from permille_service.problems import ApiError

logger = logging.getLogger(__name__)
RANK = {Role.WATCHER: 0, Role.VIEWER: 1, Role.OPERATOR: 2, Role.ADMIN: 3}
_SEEN_EVERY = timedelta(minutes=1)
"""The time at which a token or device was last seen is updated at most once in this period.

If every request updated it, every read would wait for the database's writer.
"""

bearer = HTTPBearer(
    auto_error=False,
    scheme_name="bearer",
    description="An operator's token (`pmo_...`). Routes for devices need a device's token (`pmd_...`).",
)
Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """A person or program that calls the operator's routes.

    Attributes:
        action, path: the name and path of the called operation, for the audit log.
    """

    tenant_id: str
    token_id: str
    role: Role
    action: str = ""
    path: str = ""

    def change(self, *, made: str = "", body: BaseModel | None = None) -> Change:
        """Return the audit entry of this request. `made` is the id or name of the object that was created."""
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
    version: int | None  # the version that the service last named to the device


Principal = Operator | DevicePrincipal
Allowed = TypeVar("Allowed")


def find_principal(service: Service, secret: str) -> Principal | None:
    """Return the principal of a bearer token, and record when it was seen.

    Return None if the token is unknown, expired or revoked.
    """
    found = find_caller(service.database, secret)
    if found is None:
        return None
    is_device = found.caller_id.startswith(f"{Prefix.DEVICE}_")
    # The difference is absolute, because the stored time lies in the future if the clock was set back.
    if found.caller_seen_at is None or abs(datetime.now(UTC) - found.caller_seen_at) > _SEEN_EVERY:
        touch = (
            partial(devices.touch, device_id=found.caller_id)
            if is_device
            else partial(access.touch_token, token_id=found.caller_id)
        )
        _note_seen(service, touch)
    if not is_device:
        return Operator(
            tenant_id=found.caller_tenant_id, token_id=found.caller_id, role=Role(found.caller_role)
        )
    return DevicePrincipal(
        tenant_id=found.caller_tenant_id,
        device_id=found.caller_id,
        release=found.caller_release,
        alias=found.caller_alias,
        version=found.caller_version,
    )


class Authentication:
    """Base class of the dependencies that authenticate a caller.

    Every route must declare either such a dependency or `PUBLIC`. `check_routes` enforces this.
    """


class Authenticated(Authentication, Generic[Allowed]):
    """A dependency that returns the principal of the request's bearer token.

    Args:
        check: a function that gets the principal. It returns the principal, or raises an ApiError if the
            principal may not call the route.
    """

    def __init__(self, check: Callable[[Principal], Allowed]) -> None:
        self._check = check

    def __call__(self, request: Request, service: Served, credentials: Credentials) -> Allowed:
        """Find the principal of the token.

        Raises:
            ApiError: `unauthenticated`: there is no valid token. `forbidden`: the role does not suffice.
        """
        if credentials is None:
            raise ApiError(
                ProblemType.UNAUTHENTICATED,
                "The request has no bearer token in its Authorization header.",
                headers={"WWW-Authenticate": 'Bearer realm="permille"'},
            )
        principal = find_principal(service, credentials.credentials)
        if principal is None:
            raise ApiError(
                ProblemType.UNAUTHENTICATED,
                "The token is unknown, expired or revoked.",
                headers={"WWW-Authenticate": 'Bearer realm="permille", error="invalid_token"'},
            )
        if isinstance(principal, Operator) and request.method not in ("GET", "HEAD"):  # reads are not audited
            principal = replace(principal, action=request.scope["route"].name, path=request.scope["path"])
        return self._check(principal)


async def public() -> None:
    """Do nothing. The dependency `PUBLIC` on this function marks a route that anybody may call."""


PUBLIC = Depends(public)
_PUBLIC_PATHS = frozenset({"/openapi.json", "/static"})
"""Paths of Starlette's own routes, which cannot have dependencies."""


def check_routes(app: FastAPI) -> None:
    """Refuse an app with a route that declares neither a principal nor `PUBLIC`.

    For example, a route whose only dependency is `Served` makes the process fail at start-up.

    Raises:
        RuntimeError: a route declares neither, or both.
    """
    for route in iter_route_contexts(app.routes):
        if not isinstance(route.original_route, APIRoute):
            if route.path not in _PUBLIC_PATHS:
                raise RuntimeError(
                    f"The route {route.path} cannot have dependencies, so it cannot declare who may call it."
                )
            continue
        calls = list(_calls_of(route.dependant))
        # A route with both is an error as well: `PUBLIC` admits everybody, but the other dependency refuses
        # callers without a token.
        authenticated = any(isinstance(call, Authentication) for call in calls)
        if authenticated == (public in calls):
            raise RuntimeError(
                f"The route {route.name} ({route.path}) must declare a principal, or PUBLIC, but not both."
            )


def _calls_of(dependant: Dependant) -> Iterator[object]:
    """Iterate over the direct and indirect dependencies of a route."""
    for dependency in dependant.dependencies:
        yield dependency.call
        yield from _calls_of(dependency)


@contextmanager
def changing(service: Service, operator: Operator, body: BaseModel | None = None) -> Iterator[Session]:
    """Open a write transaction for an operator's change, and add its entry to the audit log.

    with changing(service, operator, body) as session:
        models.rename(session, ...)
    """
    with service.database.write() as session:
        yield session
        audit.append(session, tenant_id=operator.tenant_id, change=operator.change(body=body))


def require_first_tenant(session: Session, operator: Operator) -> None:
    """Refuse operators of other tenants. Raises ApiError (`forbidden`)."""
    first = access.first_tenant(session)
    if first is None or first.id != operator.tenant_id:
        raise ApiError(ProblemType.FORBIDDEN, "Only administrators of the first tenant may do this.")


def operator_with(role: Role) -> Authenticated[Operator]:
    """Return a dependency that admits operators with at least this role."""
    return Authenticated(partial(require_role, role=role))


def require_role(principal: Principal, role: Role) -> Operator:
    """Return the principal if it is an operator with at least this role.

    Raises:
        ApiError: `forbidden`.
    """
    if not isinstance(principal, Operator):
        raise ApiError(ProblemType.FORBIDDEN, "This needs an operator's token, not a device's.")
    if RANK[principal.role] < RANK[role]:
        raise ApiError(
            ProblemType.FORBIDDEN, f"This needs the role {role}, but the token's role is {principal.role}."
        )
    return principal


def _require_reader(principal: Principal) -> Principal:
    if isinstance(principal, Operator):
        return require_role(principal, Role.VIEWER)
    return principal


def _require_device(principal: Principal) -> DevicePrincipal:
    if not isinstance(principal, DevicePrincipal):
        raise ApiError(ProblemType.FORBIDDEN, "This needs a device's token, not an operator's.")
    return principal


Watcher = Annotated[Operator, Depends(operator_with(Role.WATCHER))]
Viewer = Annotated[Operator, Depends(operator_with(Role.VIEWER))]
Maker = Annotated[Operator, Depends(operator_with(Role.OPERATOR))]
Admin = Annotated[Operator, Depends(operator_with(Role.ADMIN))]
CallingDevice = Annotated[DevicePrincipal, Depends(Authenticated(_require_device))]
Anyone = Annotated[Principal, Depends(Authenticated(_require_reader))]
"""A device, or an operator with at least the role `viewer`."""


def note_version(service: Service, device: DevicePrincipal, version: int) -> None:
    """Store which version the service named to a device, unless it named the same version before."""
    if device.version != version:
        _note_seen(service, partial(devices.touch, device_id=device.device_id, version=version))


def _note_seen(service: Service, touch: Callable[[Session], None]) -> None:
    """Run `touch` in a write transaction. If this fails, only log a warning, so that reads still work."""
    try:
        with service.database.write() as session:
            touch(session)
    except DBAPIError as exc:
        logger.warning("cannot record when a caller was seen: %s", exc)
