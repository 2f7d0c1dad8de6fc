"""The console as a part of the service: its own pages, and those of other extensions."""

from typing import Final

from fastapi import APIRouter
from fastapi.responses import RedirectResponse

from permille.schemas.problems import ProblemType
from permille_console import actions, fleet, history, routes, work
from permille_console.extension import console_extensions
from permille_console.rendering import PageRoute
from permille_console.sign_in import PATH
from permille_service.access.principals import PUBLIC
from permille_service.extension import ServiceExtension
from permille_service.problems import ApiError

home = APIRouter(include_in_schema=False)
nothing = APIRouter(prefix=PATH, include_in_schema=False, route_class=PageRoute)


@home.get("/", dependencies=[PUBLIC])
def show_home() -> RedirectResponse:
    """Redirect a browser to the console."""
    return RedirectResponse(PATH)


@nothing.get("/{path:path}", dependencies=[PUBLIC])
def show_nothing(path: str) -> None:
    """Answer that there is no such page."""
    raise ApiError(ProblemType.NOT_FOUND, f"there is no page {path[:80]!r}")


_OWN: Final = (home, routes.router, actions.router, history.router, work.router, fleet.router)
EXTENSION: Final = ServiceExtension(routers=(*_OWN, *(one.router for one in console_extensions()), nothing))
