"""The health checks of the service, and the page `/docs`.

Anybody may call the health checks. Except `/livez`, they test whether the service can write, because a
database on a full disk can still be read. The page is Swagger UI, which shows the service's own OpenAPI
document. Its files are part of this package, so it needs no network.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

from anyio import to_thread
from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.responses import HTMLResponse, PlainTextResponse, RedirectResponse
from fastapi.staticfiles import StaticFiles
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as NoConnectionError

from permille.errors import PermilleError
from permille.package.blobs import BlobFolder
from permille.schemas.fields import Health
from permille.schemas.problems import ProblemType
from permille.store.database import Database, check_writable
from permille.telemetry import Outage
from permille.version import __version__
from permille_service.access.principals import PUBLIC
from permille_service.access.proof import CHALLENGE_PATTERN, PATH, prove
from permille_service.context import Served, Service
from permille_service.guard import DOCS_POLICY
from permille_service.problems import OPEN, ApiError, documented, fault_of

STATIC: Final = Path(__file__).parent / "static"
PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>permille</title>
<link rel="icon" href="/static/favicon-32x32.png">
<link rel="stylesheet" href="/static/swagger-ui.css">
<link rel="stylesheet" href="/static/docs.css">
</head>
<body>
<div id="docs"></div>
<script src="/static/swagger-ui-bundle.js"></script>
<script src="/static/docs.js"></script>
</body>
</html>
"""

EVERY_S: Final = 2.0
ANSWER_S: Final = 4.0
"""Seconds until a health check gives up. The probes in the folder `deploy` wait longer than this."""
PROBE_BYTES: Final = 64 * 1024
_A_THREAD: Final = "a thread for requests"

logger = logging.getLogger(__name__)
router = APIRouter(include_in_schema=False)
health = APIRouter(prefix="/v1/health", tags=["health"], responses=documented(*OPEN))


@router.get("/docs", dependencies=[PUBLIC])
def show_docs() -> HTMLResponse:
    """Return the page that shows the OpenAPI document."""
    return HTMLResponse(PAGE, headers={"Content-Security-Policy": DOCS_POLICY})


# Load balancers often send HEAD. uvicorn leaves out the body of the answer.
@health.head("", dependencies=[PUBLIC], include_in_schema=False)
@health.get("", dependencies=[PUBLIC])
async def get_health(request: Request) -> Health:
    """Return whether requests get an answer, and whether the service can write its database and its blobs.

    The check runs at most every two seconds. The answer comes within four seconds.
    """
    writes: WriteCheck = request.app.state.writes
    problem = await writes.problem()
    if problem is not None:
        raise ApiError(ProblemType.UNAVAILABLE, problem)
    return Health(status="ok", version=__version__)


@router.head("/livez", dependencies=[PUBLIC])
@router.get("/livez", dependencies=[PUBLIC])
async def livez() -> Health:
    """Report that the process is alive. If this path does not answer, restart the process. Disks and the
    database are not checked."""
    return Health(status="ok", version=__version__)


@router.head("/readyz", dependencies=[PUBLIC])
@router.get("/readyz", dependencies=[PUBLIC])
async def readyz(request: Request, service: Served) -> Health:
    """Return whether to send requests to this process. This makes the same check as `/v1/health`, and also
    fails while the process stops."""
    if service.draining.is_set():
        raise ApiError(ProblemType.UNAVAILABLE, "the process is stopping")
    return await get_health(request)


@dataclass(slots=True)
class WriteCheck:
    """A check that blobs and rows can be written. It runs at most every two seconds.

    Only one check runs at a time, and all callers wait for it. So a store that hangs blocks a single thread.
    This thread comes from the pool that serves requests. If all of them are busy, no request gets an answer
    either, and the service is not well.
    """

    database: Database
    blobs: BlobFolder
    clock: Callable[[], float] = time.monotonic
    _awaited: str = _A_THREAD
    _check: "asyncio.Future[str | None] | None" = None
    _checked_at: float = 0.0
    _outage: Outage = field(default_factory=lambda: Outage(logger, "not well", logging.ERROR))

    async def problem(self) -> str | None:
        """Describe what keeps the service from writing, or return None."""
        check = self._check
        if check is None or (check.done() and self.clock() - self._checked_at >= EVERY_S):
            check = self._check = asyncio.ensure_future(self._write_in_thread())
        if not check.done():
            await asyncio.wait([check], timeout=ANSWER_S)
        problem = check.result() if check.done() else f"{self._awaited} did not answer in time"
        self._outage.note(problem)
        return problem

    async def _write_in_thread(self) -> str | None:
        self._awaited = _A_THREAD
        try:
            return await to_thread.run_sync(self._write)
        finally:
            self._checked_at = self.clock()

    def _write(self) -> str | None:
        self._awaited = "the store of blobs"
        try:
            self.blobs.check_writable(PROBE_BYTES)
            self._awaited = "the database"
            check_writable(self.database)
        except (OSError, DBAPIError, NoConnectionError) as exc:
            return fault_of(exc) or type(exc).__name__
        except PermilleError as exc:  # from the bucket
            return str(exc)
        return None


@router.get(PATH, dependencies=[PUBLIC])
def get_proof(
    request: Request, service: Served, challenge: Annotated[str, Query(pattern=CHALLENGE_PATTERN)]
) -> PlainTextResponse:
    """Prove that this process has the token of its data folder."""
    try:
        token = service.settings.token_path.read_text(encoding="ascii").strip()
    except OSError as exc:
        raise ApiError(ProblemType.NOT_FOUND, "The service has no file with a token.") from exc
    host, port = request.scope["server"]
    return PlainTextResponse(prove(token, challenge, (host, port)))


# An extension with pages of its own may answer this path first.
@router.get("/", dependencies=[PUBLIC])
def root() -> RedirectResponse:
    """Redirect a browser to a page."""
    return RedirectResponse("/docs")


def install(app: FastAPI) -> None:
    """Add the files of the page, and the check that the health routes share."""
    service: Service = app.state.service
    app.state.writes = WriteCheck(service.database, service.blobs)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
