"""The admin's console: Swagger UI on the service's own OpenAPI document, from vendored files, without a
network. And whether the service is well, which anybody may ask."""

from pathlib import Path
from typing import Final

from anyio import to_thread
from fastapi import APIRouter, FastAPI
from fastapi.responses import HTMLResponse, RedirectResponse
from fastapi.staticfiles import StaticFiles

import permille
from permille.schemas.fields import Health
from permille.store import access
from permille_service.context import Served, Service
from permille_service.guard import CONSOLE_POLICY
from permille_service.problems import OPEN, documented

STATIC: Final = Path(__file__).parent / "static"
PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>permille</title>
<link rel="icon" href="/static/favicon-32x32.png">
<link rel="stylesheet" href="/static/swagger-ui.css">
<link rel="stylesheet" href="/static/console.css">
</head>
<body>
<div id="console"></div>
<script src="/static/swagger-ui-bundle.js"></script>
<script src="/static/console.js"></script>
</body>
</html>
"""

router = APIRouter(include_in_schema=False)
health = APIRouter(prefix="/v1/health", tags=["health"], responses=documented(*OPEN))


@router.get("/docs")
def console() -> HTMLResponse:
    """The console's page."""
    return HTMLResponse(PAGE, headers={"Content-Security-Policy": CONSOLE_POLICY})


@health.get("")
async def get_health(service: Served) -> Health:
    """Whether the service and its database answer. In a thread of its own: the others may all be busy."""
    return await to_thread.run_sync(_check, service, limiter=service.health_threads)


def _check(service: Service) -> Health:
    with service.database.read() as session:
        access.first_tenant(session)
    return Health(status="ok", version=permille.__version__)


@router.get("/")
def root() -> RedirectResponse:
    """People who open the server in a browser want the console."""
    return RedirectResponse("/docs")


def install(app: FastAPI) -> None:
    """Add the console and its files."""
    app.include_router(router)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
