"""Sign-in to the console with an operator's token. An encrypted cookie then holds the token.

Scripts cannot read the cookie (HttpOnly), and other sites cannot make the browser send it (SameSite=Strict).
It is valid for twelve hours, below `/ui` only. For each request, the token and the session are looked up in
the database. A revoked token or an ended session is therefore refused at the next request.

A request that changes something must come from a page of this service. Browsers tell the origin of a request,
and `PageRoute` refuses requests that have another origin or none.
"""

import base64
import binascii
import json
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final
from urllib.parse import parse_qs

from cryptography.exceptions import InvalidTag
from fastapi import Request, Response

from permille.schemas.problems import ProblemType
from permille.store import access
from permille.store.ids import new_code
from permille_service.access.principals import Operator, find_principal
from permille_service.context import Service
from permille_service.parameters import read_body
from permille_service.problems import ApiError

COOKIE: Final = "permille_session"
LIFE_S: Final = 12 * 3600
PATH: Final = "/ui"
_CONTEXT: Final = "page session"
_LONGEST: Final = 1000
_MOST_FIELDS: Final = 50
_OWN_PATH: Final = re.compile(r"/ui(/[A-Za-z0-9][A-Za-z0-9_:.-]*)+(\?[A-Za-z0-9_:.=&%+-]*)?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Session:
    """The contents of the cookie before encryption.

    Attributes:
        id: the id of the session, by which it can be ended.
        token: the operator's token.
        until: when the session expires, in Unix seconds.
    """

    id: str
    token: str
    until: int


class SignInNeededError(Exception):
    """No operator is signed in, or the session has ended."""


def operator_of(request: Request, service: Service) -> Operator:
    """Return the operator of the cookie's token. Raises SignInNeededError."""
    return _open(request, service)[0]


def keep(response: Response, service: Service, token: str, *, secure: bool) -> None:
    """Set the cookie for a token. The caller must have checked the token."""
    content = json.dumps({"id": new_code(), "token": token, "until": int(time.time()) + LIFE_S}).encode()
    sealed = base64.urlsafe_b64encode(service.seal.close(content, _CONTEXT)).decode()
    response.set_cookie(
        COOKIE, sealed, max_age=LIFE_S, path=PATH, httponly=True, samesite="strict", secure=secure
    )


def forget(request: Request, response: Response, service: Service) -> None:
    """End the session and delete the cookie. A copy of the cookie is useless afterwards."""
    with suppress(SignInNeededError):
        operator, kept = _open(request, service)
        expires_at = datetime.fromtimestamp(kept.until, UTC)
        with service.database.write() as session:
            access.end_session(
                session, tenant_id=operator.tenant_id, session_id=kept.id, expires_at=expires_at
            )
    response.delete_cookie(COOKIE, path=PATH, httponly=True, samesite="strict")


def check_origin(request: Request) -> None:
    """Check that a page of this service sent the request. Raises ApiError (`forbidden`)."""
    site = request.headers.get("sec-fetch-site")
    _, _, origin = request.headers.get("origin", "").partition("://")
    same = origin == request.headers.get("host") if site is None else site == "same-origin"
    if not same:
        raise ApiError(ProblemType.FORBIDDEN, "The request came from another site. Use the page itself.")


async def form_of(request: Request) -> dict[str, str]:
    """Return the fields of a form. If a name occurs twice, the last value counts.

    Raises:
        ApiError: `bad-request`: the form has too many fields.
    """
    body = (await read_body(request)).decode("ascii", errors="replace")
    try:
        found = parse_qs(body, max_num_fields=_MOST_FIELDS)
    except ValueError as exc:
        raise ApiError(ProblemType.BAD_REQUEST, f"The form has more than {_MOST_FIELDS} fields.") from exc
    return {name: values[-1] for name, values in found.items()}


def own_path(text: str) -> str:
    """Return the text if it is a path below `/ui`. Otherwise return `/ui`, which shows the first page.

    Example:
        >>> own_path("/ui/releases/chat?version=2")
        '/ui/releases/chat?version=2'
        >>> own_path("https://example.org")
        '/ui'
    """
    return text if _OWN_PATH.fullmatch(text) else PATH


def _open(request: Request, service: Service) -> tuple[Operator, _Session]:
    kept = _read(service, request.cookies.get(COOKIE, ""))
    principal = None if kept is None else find_principal(service, kept.token)
    if kept is None or not isinstance(principal, Operator):
        raise SignInNeededError
    if access.is_session_ended(service.database, kept.id):
        raise SignInNeededError
    return principal, kept


def _read(service: Service, cookie: str) -> _Session | None:
    if not cookie or len(cookie) > _LONGEST:
        return None
    try:
        content = json.loads(service.seal.open(base64.urlsafe_b64decode(cookie), _CONTEXT))
        kept = _Session(**content)
    except (InvalidTag, binascii.Error, ValueError, TypeError):  # TypeError: an older version made the cookie
        return None
    return kept if kept.until > time.time() else None
