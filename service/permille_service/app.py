"""The app: settings in, FastAPI out. Nothing happens at import."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi import FastAPI

import permille
from permille.schemas.kinds import WORK
from permille_service import console, guard, observing, openapi, problems
from permille_service.access import routes as access_routes
from permille_service.context import Service
from permille_service.devices import enrolment
from permille_service.devices import routes as device_routes
from permille_service.federations import device_routes as member_routes
from permille_service.federations import routes as federation_routes
from permille_service.fleet import routes as fleet_routes
from permille_service.inputs import corpora, models
from permille_service.jobs import routes as job_routes
from permille_service.pages import routes as pages
from permille_service.preflights import routes as preflight_routes
from permille_service.releases import routes as release_routes
from permille_service.runs import routes as run_routes
from permille_service.settings import Settings
from permille_service.storage import routes as storage_routes
from permille_service.trust import routes as trust_routes
from permille_service.work import packages
from permille_service.work.routes import router_of

ROUTERS = (
    console.health,
    models.router,
    corpora.router,
    *(router_of(work) for work in WORK.values()),
    packages.router,
    release_routes.router,
    trust_routes.router,
    job_routes.router,
    preflight_routes.router,
    device_routes.router,
    enrolment.router,
    enrolment.own,
    run_routes.router,
    fleet_routes.router,
    federation_routes.router,
    member_routes.router,
    access_routes.router,
    storage_routes.router,
)


def create_app(settings: Settings) -> FastAPI:
    """Open what the settings name (folders, database, keys, first token) and make the app on it."""
    service = Service.open(settings)
    access_routes.ensure_token(service)
    app = FastAPI(
        title=openapi.TITLE,
        version=permille.__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=problems.operation_id,
        lifespan=_closing(service),
        telemetry={"operation_spans": False, "metrics": False, "logs": False},
    )
    app.state.service = service
    for router in ROUTERS:
        app.include_router(router)
    console.install(app)
    pages.install(app)
    openapi.install(app)
    problems.install(app, (*ROUTERS, *pages.ROUTERS, console.router, observing.router))
    app.add_middleware(guard.Guard, settings=settings)
    observing.install(app)
    return app


def _closing(service: Service) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    return lifespan
