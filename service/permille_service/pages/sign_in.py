"""Who looks at the page: signed in by an operator's token, which a cookie then holds, sealed.

The cookie is out of scripts' reach (HttpOnly), sent by no other site (SameSite=Strict), good for twelve hours
and below `/ui` alone. Its token is looked up at every request, so that a revoked one is refused at its next.
What changes something must come from the page itself: browsers say where a request comes from, and one that
does not is refused.
"""

import base64
import binascii
import json
import re
import time
from typing import Final
from urllib.parse import parse_qs

from cryptography.exceptions import InvalidTag
from fastapi import Request, Response

from permille.schemas.problems import ProblemType
from permille_service.access.principals import Operator, find_principal
from permille_service.context import Service
from permille_service.problems import ApiError

COOKIE: Final = "permille_session"
LIFE_S: Final = 12 * 3600
PATH: Final = "/ui"
_CONTEXT: Final = "page session"
_LONGEST: Final = 1000
_OWN_PATH: Final = re.compile(r"/ui(/[A-Za-z0-9][A-Za-z0-9_:.-]*)+", re.ASCII)


class SignInNeededError(Exception):
    """Nobody is signed in, or no longer."""


def operator_of(request: Request, service: Service) -> Operator:
    """The operator that the cookie's token stands for. Raises SignInNeededError."""
    token = _read(service, request.cookies.get(COOKIE, ""))
    principal = None if token is None else find_principal(service, token)
    if not isinstance(principal, Operator):
        raise SignInNeededError
    return principal


def keep(response: Response, service: Service, token: str, *, secure: bool) -> None:
    """Set the cookie of a token that was checked."""
    content = json.dumps({"token": token, "until": int(time.time()) + LIFE_S}).encode()
    sealed = base64.urlsafe_b64encode(service.seal.close(content, _CONTEXT)).decode()
    response.set_cookie(
        COOKIE, sealed, max_age=LIFE_S, path=PATH, httponly=True, samesite="strict", secure=secure
    )


def forget(response: Response) -> None:
    """Take the cookie away."""
    response.delete_cookie(COOKIE, path=PATH, httponly=True, samesite="strict")


async def check_origin(request: Request) -> None:
    """Refuse what another site, or no page at all, has sent. Raises ApiError (`forbidden`)."""
    site = request.headers.get("sec-fetch-site")
    _, _, origin = request.headers.get("origin", "").partition("://")
    same = origin == request.headers.get("host") if site is None else site == "same-origin"
    if not same:
        raise ApiError(ProblemType.FORBIDDEN, "expected a request of this page, got one from elsewhere")


async def form_of(request: Request) -> dict[str, str]:
    """The fields of a form; of each name the last one. Raises ApiError (`bad-request`): it has too many."""
    body = (await request.body()).decode("ascii", errors="replace")
    try:
        found = parse_qs(body, max_num_fields=20)
    except ValueError as exc:
        raise ApiError(ProblemType.BAD_REQUEST, "expected a form of at most 20 fields") from exc
    return {name: values[-1] for name, values in found.items()}


def own_path(text: str) -> str:
    """A path of this page to go on to; the first page where the text is none."""
    return text if _OWN_PATH.fullmatch(text) else f"{PATH}/jobs"


def _read(service: Service, cookie: str) -> str | None:
    if not cookie or len(cookie) > _LONGEST:
        return None
    try:
        content = json.loads(service.seal.open(base64.urlsafe_b64decode(cookie), _CONTEXT))
    except (InvalidTag, binascii.Error, ValueError):
        return None
    return str(content["token"]) if content["until"] > time.time() else None
