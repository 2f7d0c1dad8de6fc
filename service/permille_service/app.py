"""The app: settings in, FastAPI out. Nothing happens at import."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from anyio import CapacityLimiter
from fastapi import FastAPI

import permille
from permille.schemas.kinds import WORK
from permille.store.blobs.folder import open_blobs
from permille.store.database import Database
from permille.store.jobs.dispatch import CeleryDispatcher
from permille.store.migrations.schema import migrate
from permille_service import console, guard, keys, observing, openapi, problems
from permille_service.access import routes as access_routes
from permille_service.context import Service
from permille_service.devices import enrolment
from permille_service.devices import routes as device_routes
from permille_service.federations import device_routes as member_routes
from permille_service.federations import routes as federation_routes
from permille_service.fleet import routes as fleet_routes
from permille_service.inputs import corpora, models
from permille_service.jobs import routes as job_routes
from permille_service.limits import RateLimit, Slots
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
    service = _opened(settings)
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


def _opened(settings: Settings) -> Service:
    """Make the folders, bring the database up to date, read or make the sealing key."""
    settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    for folder in (settings.blob_root, settings.model_root, settings.corpus_root):
        folder.mkdir(parents=True, exist_ok=True)
    broker = settings.broker_url
    url = settings.database_url.get_secret_value()
    migrate(url)
    return Service(
        settings=settings,
        database=Database(url),
        blobs=open_blobs(settings, attempts=2),
        seal=keys.Seal(settings.keys_dir),
        sign_ins=RateLimit(settings.sign_ins_per_minute, clock=time.monotonic),
        streams=Slots(settings.max_streams, of_one=settings.max_streams_per_token),
        health_threads=CapacityLimiter(2),
        trust_keys=keys.TrustKeys(settings.keys_dir),
        round_keys=keys.RoundKeys(settings.keys_dir),
        dispatcher=CeleryDispatcher(broker.get_secret_value()) if broker else None,
    )


def _closing(service: Service) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    return lifespan
