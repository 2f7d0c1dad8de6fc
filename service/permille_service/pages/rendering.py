"""Pages out of templates: values escaped, errors told on a page, and what every page has around it.

A request of htmx gets the part that changes, without the page around it; its errors go to the page's notice.
"""

import logging
import math
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Annotated, Any, Final
from urllib.parse import quote, urlencode

from anyio import from_thread
from fastapi import Depends, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from fastapi.routing import APIRoute
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from permille.schemas.access import Role
from permille.schemas.problems import Problem
from permille_service import problems
from permille_service.access.principals import RANK, Authentication, Operator, require_role
from permille_service.context import Served, Service
from permille_service.pages import assets, sign_in

logger = logging.getLogger(__name__)
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
# Without a referrer at all, browsers hide the origin of a form.
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_PARTS: Final = frozenset({"job", "jobs", "rollout"})  # their templates have a part that is asked for again
_SPANS: Final = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min"))
_UNITS: Final = ("B", "kB", "MB", "GB", "TB", "PB")


def make_environment(styles: assets.Asset, scripts: assets.Asset) -> Environment:
    """The templates, with what they all may call."""
    made = Environment(
        loader=FileSystemLoader(assets.FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals |= {"styles": styles.name, "scripts": scripts.name, "link": link}
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
    """A page that an operator asks for."""

    request: Request
    service: Service
    operator: Operator

    @property
    def tenant_id(self) -> str:
        """The tenant whose rows it may show."""
        return self.operator.tenant_id

    @property
    def is_part(self) -> bool:
        """Return whether only the part that changes is wanted."""
        return self.request.headers.get("hx-request") == "true"

    def may(self, role: Role) -> bool:
        """Return whether the operator has at least this role."""
        return RANK[self.operator.role] >= RANK[role]

    def acting(self, action: str, path: str) -> Operator:
        """The operator as the audit log has it: a click is the same change as a call."""
        return replace(self.operator, action=action, path=path)

    def problem_of(self, exc: Exception) -> Problem:
        """The problem by which the API would answer an error; for endpoints, which run in threads."""
        return _read_problem(from_thread.run(problems.answer, self.request, exc))

    def render(self, template: str, *, status: int = 200, **values: object) -> Response:
        """The page; the part alone, whose file has an underscore, where it is asked for and there is one."""
        part = f"_{template}" if self.is_part and template in _PARTS else template
        return render(self.request, part, {"page": self, **values}, status=status)

    def go_to(self, path: str) -> Response:
        """Send the browser on to another page, whose path is below that of all pages."""
        return RedirectResponse(f"{sign_in.PATH}/{path}", status_code=303, headers=HEADERS)


def render(
    request: Request, template: str, values: Mapping[str, object], *, status: int = 200
) -> HTMLResponse:
    """A page out of a template."""
    environment: Environment = request.app.state.templates
    content = environment.get_template(f"{template}.html.jinja").render({"request": request, **values})
    return HTMLResponse(content, status_code=status, headers=HEADERS)


@dataclass(frozen=True)
class SignedIn(Authentication):
    """A dependency: the page of an operator of at least this role, found by the cookie."""

    role: Role

    def __call__(self, request: Request, service: Served) -> Page:
        """Find the operator. Raises SignInNeededError, ApiError (`forbidden`)."""
        operator = require_role(sign_in.operator_of(request, service), self.role)
        return Page(request=request, service=service, operator=operator)


WatcherPage = Annotated[Page, Depends(SignedIn(Role.WATCHER))]
ViewerPage = Annotated[Page, Depends(SignedIn(Role.VIEWER))]
MakerPage = Annotated[Page, Depends(SignedIn(Role.OPERATOR))]
AdminPage = Annotated[Page, Depends(SignedIn(Role.ADMIN))]


class PageRoute(APIRoute):
    """A route whose errors are pages too, and which sends whom it does not know to sign in.

    What changes something is refused before anything else where it does not come from the page itself: no
    route can leave that out.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As the base class."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                if request.method not in ("GET", "HEAD"):
                    sign_in.check_origin(request)
                return await handler(request)
            except sign_in.SignInNeededError:
                return _to_sign_in(request)
            except Exception as exc:  # noqa: BLE001 - whatever happens, the reader keeps a page
                return _error(request, await problems.answer(request, exc))

        return handle


def _to_sign_in(request: Request) -> Response:
    if request.headers.get("hx-request") == "true":
        return Response(status_code=200, headers={**HEADERS, "HX-Redirect": f"{sign_in.PATH}/sign-in"})
    wanted = f"{request.url.path}?{request.url.query}".rstrip("?") if request.method == "GET" else ""
    where = f"{sign_in.PATH}/sign-in" + (f"?next={quote(wanted)}" if wanted != sign_in.PATH else "")
    return RedirectResponse(where, status_code=303, headers=HEADERS)


def _error(request: Request, answer: Response) -> Response:
    problem = _read_problem(answer)
    part = request.headers.get("hx-request") == "true"
    values = {"problem": problem, "at": datetime.now(UTC)}
    page = render(request, "_error" if part else "error", values, status=problem.status)
    if part:
        page.headers["HX-Retarget"], page.headers["HX-Reswap"] = "#notice", "innerHTML"
    if "Retry-After" in answer.headers:
        page.headers["Retry-After"] = answer.headers["Retry-After"]
    return page


def _read_problem(answer: Response) -> Problem:
    return Problem.model_validate_json(bytes(answer.body))


def link(request: Request, **changes: object) -> str:
    """The address of the same page with some parameters of its query changed; None takes one out."""
    kept = {**request.query_params, **changes}
    return f"?{urlencode({name: value for name, value in kept.items() if value not in (None, '')})}"


def ago(then: datetime | None) -> str:
    """A point in time, seen from now."""
    if then is None:
        return "never"
    seconds = (datetime.now(UTC) - then).total_seconds()
    return f"{span(seconds)} ago" if seconds >= 0 else f"in {span(-seconds)}"


def moment(then: datetime) -> str:
    """A point in time in full."""
    return f"{then:%Y-%m-%d %H:%M:%S} UTC"


def span(seconds: float) -> str:
    """A length of time with its largest unit."""
    for length, unit in _SPANS:
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def size(value: float | None) -> str:
    """Bytes with a unit."""
    if value is None:
        return "–"
    power = min(int(math.log10(value) // 3), len(_UNITS) - 1) if value >= 1 else 0
    return f"{value / 1000**power:.3g} {_UNITS[power]}"


def percent(value: float | None, digits: int = 1) -> str:
    """A share."""
    return "–" if value is None else f"{100 * value:.{digits}f} %"


def points(value: float | None) -> str:
    """A difference of two shares."""
    return "–" if value is None else f"{100 * value:+.1f}".replace("-", "−")


def number(value: float | None) -> str:
    """A count, or a number that was measured."""
    if value is None:
        return "–"
    return (f"{value:,}".replace(",", " ") if isinstance(value, int) else f"{value:.3g}").replace("-", "−")


def short(value: str | None) -> str:
    """An id or a digest as a table shows it."""
    if value is None:
        return "–"
    prefix, separator, rest = value.partition(":" if ":" in value else "_")
    return f"{prefix}{separator}{rest[:12]}"
