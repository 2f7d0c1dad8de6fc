"""Rendering of pages from templates. All values are escaped, and errors are shown as pages.

A request that htmx sends gets only the part of the page that changes. If the request fails, the error appears
in the notice at the top of the page.
"""

import logging
import math
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from typing import Annotated, Any, Final
from urllib.parse import quote, urlencode

from anyio import from_thread
from fastapi import Depends, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from fastapi.routing import APIRoute
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from permille.schemas.access import Role
from permille.schemas.problems import Problem
from permille.time_left import span
from permille_console import assets, sign_in
from permille_console.extension import console_extensions
from permille_service import problems
from permille_service.access.principals import RANK, Authentication, Operator, require_role
from permille_service.context import Served, Service

logger = logging.getLogger(__name__)
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
# With the referrer policy `no-referrer`, browsers would hide the origin of forms from `check_origin`.
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_UNITS: Final = ("B", "kB", "MB", "GB", "TB", "PB")


@cache
def _environment() -> Environment:
    """Return the Jinja environment for all templates, with the functions and filters that they use."""
    added = console_extensions()
    styles, scripts = assets.load()
    made = Environment(
        loader=FileSystemLoader([assets.FOLDER / "templates", *(one.templates for one in added)]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals |= {"styles": styles.name, "scripts": scripts.name, "link": link}
    made.globals["added_views"] = [view for extension in added for view in extension.views]
    made.globals["added_actions"] = {name for extension in added for name in extension.actions}
    made.globals["added_pages"] = set().union(*(extension.shown for extension in added))
    made.filters |= {
        "ago": ago,
        "span": span,
        "size": size,
        "percent": percent,
        "points": points,
        "number": number,
        "short": short,
        "moment": moment,
    }
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page that a signed-in operator requests."""

    request: Request
    service: Service
    operator: Operator

    @property
    def tenant_id(self) -> str:
        """The tenant whose objects the page may show."""
        return self.operator.tenant_id

    def may(self, role: Role) -> bool:
        """Return whether the operator has at least this role."""
        return RANK[self.operator.role] >= RANK[role]

    def acting(self, action: str, path: str) -> Operator:
        """Return the operator with the action and path of the API's route, for the audit log."""
        return replace(self.operator, action=action, path=path)

    def problem_of(self, exc: Exception) -> Problem:
        """Return the problem with which the API answers an error. Call this in an endpoint's thread."""
        return _read_problem(from_thread.run(problems.answer, self.request, exc))

    def render(self, template: str, *, status: int = 200, **values: object) -> Response:
        """Render a template with the page itself as a value."""
        return render(self.request, template, {"page": self, **values}, status=status)

    def go_to(self, path: str) -> Response:
        """Redirect the browser to another page. The path is relative to `/ui`."""
        return RedirectResponse(f"{sign_in.PATH}/{path}", status_code=303, headers=HEADERS)


def is_part(request: Request) -> bool:
    """Return whether htmx requests only the part of a page that changes."""
    return request.headers.get("hx-request") == "true"


def render(
    request: Request, template: str, values: Mapping[str, object], *, status: int = 200
) -> HTMLResponse:
    """Render a template as a response. If htmx asks, render only the part `_template` if there is one."""
    parts = [f"_{template}.html.jinja"] if is_part(request) else []
    chosen = _environment().select_template([*parts, f"{template}.html.jinja"])
    content = chosen.render({"request": request, **values})
    return HTMLResponse(content, status_code=status, headers=HEADERS)


@dataclass(frozen=True)
class SignedIn(Authentication):
    """A dependency that returns a page for the operator of the cookie, who must have at least this role."""

    role: Role

    def __call__(self, request: Request, service: Served) -> Page:
        """Find the operator.

        Raises:
            SignInNeededError: the request has no valid cookie.
            ApiError: `forbidden`: the role does not suffice.
        """
        operator = require_role(sign_in.operator_of(request, service), self.role)
        return Page(request=request, service=service, operator=operator)


WatcherPage = Annotated[Page, Depends(SignedIn(Role.WATCHER))]
ViewerPage = Annotated[Page, Depends(SignedIn(Role.VIEWER))]
MakerPage = Annotated[Page, Depends(SignedIn(Role.OPERATOR))]
AdminPage = Annotated[Page, Depends(SignedIn(Role.ADMIN))]


class PageRoute(APIRoute):
    """A route that shows errors as pages, and redirects callers who are not signed in to the sign-in page.

    Requests that change something must come from a page of this service. Each route checks this first.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of the base class, wrapped with these checks."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                if request.method not in ("GET", "HEAD"):
                    sign_in.check_origin(request)
                return await handler(request)
            except sign_in.SignInNeededError:
                return _to_sign_in(request)
            except Exception as exc:  # noqa: BLE001 - any error becomes a page
                return _error(request, await problems.answer(request, exc))

        return handle


def _to_sign_in(request: Request) -> Response:
    if is_part(request):
        return Response(status_code=200, headers={**HEADERS, "HX-Redirect": f"{sign_in.PATH}/sign-in"})
    wanted = f"{request.url.path}?{request.url.query}".rstrip("?") if request.method == "GET" else ""
    where = f"{sign_in.PATH}/sign-in" + (f"?next={quote(wanted)}" if wanted != sign_in.PATH else "")
    return RedirectResponse(where, status_code=303, headers=HEADERS)


def _error(request: Request, answer: Response) -> Response:
    problem = _read_problem(answer)
    values = {"problem": problem, "at": datetime.now(UTC)}
    page = render(request, "error", values, status=problem.status)
    if is_part(request):
        page.headers["HX-Retarget"], page.headers["HX-Reswap"] = "#notice", "innerHTML"
    if "Retry-After" in answer.headers:
        page.headers["Retry-After"] = answer.headers["Retry-After"]
    return page


def _read_problem(answer: Response) -> Problem:
    return Problem.model_validate_json(bytes(answer.body))


def link(request: Request, **changes: object) -> str:
    """Return the URL of the same page with changed query parameters. The value None removes a parameter."""
    kept = {**request.query_params, **changes}
    return f"?{urlencode({name: value for name, value in kept.items() if value not in (None, '')})}"


def ago(then: datetime | None) -> str:
    """Format a point in time relative to now."""
    if then is None:
        return "never"
    seconds = (datetime.now(UTC) - then).total_seconds()
    return f"{span(seconds)} ago" if seconds >= 0 else f"in {span(-seconds)}"


def moment(then: datetime) -> str:
    """Format a point in time as date and time in UTC."""
    return f"{then:%Y-%m-%d %H:%M:%S} UTC"


def size(value: float | None) -> str:
    """Format a number of bytes.

    Example:
        >>> size(1_234_567)
        '1.23 MB'
    """
    if value is None:
        return "–"
    power = min(int(math.log10(value) // 3), len(_UNITS) - 1) if value >= 1 else 0
    return f"{value / 1000**power:.3g} {_UNITS[power]}"


def percent(value: float | None, digits: int = 1) -> str:
    """Format a fraction as a percentage.

    Example:
        >>> percent(0.0421)
        '4.2 %'
    """
    return "–" if value is None else f"{100 * value:.{digits}f} %"


def points(value: float | None) -> str:
    """Format a difference of two fractions in percentage points."""
    return "–" if value is None else f"{100 * value:+.1f}".replace("-", "−")


def number(value: float | None) -> str:
    """Format a count or a measured number."""
    if value is None:
        return "–"
    return (f"{value:,}".replace(",", " ") if isinstance(value, int) else f"{value:.3g}").replace("-", "−")


def short(value: str | None) -> str:
    """Shorten an id or a digest for a table.

    Example:
        >>> short("mask_01jd3kq8z7m4n5p6r7s8t9v0wx")
        'mask_01jd3kq8z7m4'
    """
    if value is None:
        return "–"
    prefix, separator, rest = value.partition(":" if ":" in value else "_")
    return f"{prefix}{separator}{rest[:12]}"
