"""Create the FastAPI app from settings, and complete its OpenAPI document.

The document also describes the problems (the service's error answers) and the tags that group the routes.
Nothing happens at import.
"""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cache
from typing import Any, Final

from fastapi import APIRouter, Depends, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute, iter_route_contexts
from starlette.routing import BaseRoute

from permille.files import make_private
from permille.schemas.fields import examples_of
from permille.schemas.kinds import WORK
from permille.schemas.problems import Problem
from permille.store.blobs.folder import open_blobs
from permille.store.database import REQUESTS, Database
from permille.store.jobs.dispatch import CeleryDispatcher
from permille.store.migrations.schema import migrate
from permille.version import __version__
from permille_service import guard, health, keys, observing, problems
from permille_service.access import routes as access_routes
from permille_service.access.principals import check_routes
from permille_service.context import Service
from permille_service.devices import enrolment
from permille_service.devices import routes as device_routes
from permille_service.extension import service_extensions
from permille_service.fleet import routes as fleet_routes
from permille_service.inputs import corpora, models
from permille_service.jobs import routes as job_routes
from permille_service.jobs.stream import MAX_STREAMS, MAX_STREAMS_PER_TENANT, MAX_STREAMS_PER_TOKEN
from permille_service.limits import RateLimit, Slots
from permille_service.parameters import check_given_once, named
from permille_service.preflights import planning
from permille_service.releases import routes as release_routes
from permille_service.runs import routes as run_routes
from permille_service.settings import Settings
from permille_service.storage import routes as storage_routes
from permille_service.trust import routes as trust_routes
from permille_service.work import packages
from permille_service.work.routes import router_of

TITLE: Final = "permille"
DESCRIPTION: Final = """
Turn a pre-trained language model into a package. A device trains one in a thousand of the model's weights.

* Press **Authorize** and paste an operator token (the first one is in `operator.token` of the data folder).
* A request that starts long work creates a job. The answer is `202`, with the path of the job in `Location`.
  Follow the job under **jobs**.
* Every error is a problem (RFC 9457); branch on its `type`.
* Send an `Idempotency-Key` with a `POST` that creates something. If you repeat the request with the same key
  and body within a day, it creates nothing and returns the first answer. If the object was removed meanwhile,
  the answer is `idempotency-conflict`.
* Lists come in pages. To get the next page, pass `next_cursor` as `cursor`.
* A query parameter, and a key of a JSON object, may appear only once.
"""
TAGS: Final = [
    {"name": "models", "description": "Base models: a folder, a GGUF file, or a hub repository at a commit."},
    {"name": "corpora", "description": "Texts on which jobs measure sensitivity and perplexity."},
    *({"name": work.collection, "description": work.about} for work in WORK.values()),
    {"name": "releases", "description": "Signed versions of a name, and aliases such as `stable`."},
    {"name": "trust", "description": "TUF metadata, and the keys that sign what devices may install."},
    {
        "name": "jobs",
        "description": "Jobs, which do long work: read their state and events, cancel and retry them.",
    },
    {"name": "preflights", "description": "Estimates of what a job needs, compared with the machine."},
    {"name": "devices", "description": "Invitations, enrolment, device tokens, revocation."},
    {"name": "runs", "description": "Reports of devices, and the logs that they share."},
    {"name": "fleet", "description": "Counts of all devices."},
]
_LAST_TAGS: Final = [
    {"name": "storage", "description": "Retention, and the deletion of blobs that nothing refers to."},
    {"name": "access", "description": "Tenants, operator tokens, and the log of operators' changes."},
    {"name": "health", "description": "Health check of the service."},
]

ROUTERS = (
    health.health,
    release_routes.router,
    trust_routes.router,
    packages.router,
    job_routes.router,
    models.router,
    corpora.router,
    *(router_of(work) for work in WORK.values()),
    planning.router,
    device_routes.router,
    enrolment.router,
    enrolment.own,
    run_routes.router,
    fleet_routes.router,
)
_LAST_ROUTERS: Final = (access_routes.router, storage_routes.router)


def create_app(settings: Settings) -> FastAPI:
    """Open the folders, the database and the keys that the settings name, and create the app."""
    service = _open_service(settings)
    # Make the first operator token of a new installation now, because operators need one for every route.
    access_routes.ensure_token(service)
    app = FastAPI(
        title=TITLE,
        version=__version__,
        # FastAPI's own page loads its scripts from a CDN. `health` serves the same page without one.
        docs_url=None,
        redoc_url=None,
        # If a path lacks the slash at its end, or has one too many, answer with 404. A redirect would repeat
        # the Host header, which the caller chooses.
        redirect_slashes=False,
        routes=_routes(),
        lifespan=_closing(service),
        # `observing` makes spans, metrics and logs. FastAPI's own would record each request a second time.
        telemetry={"operation_spans": False, "metrics": False, "logs": False},
    )
    app.state.service = service
    health.install(app)
    _document(app)
    problems.install(app)
    # Middleware that is installed later runs earlier, so `observing` also sees requests that the guard
    # refuses.
    app.add_middleware(guard.Guard, settings=settings)
    observing.install(app)
    # Check the routes when all of them are added. A route that does not declare who may call it stops the
    # start.
    check_routes(app)
    return app


@cache
def _routes() -> list[BaseRoute]:
    """Return the routes. They hold no state, so all apps of a process can share them."""
    api = APIRouter(
        # Refuse repeated parameters and keys. Starlette takes the last one, and a proxy may check the first.
        dependencies=[Depends(check_given_once)],
        generate_unique_id_function=problems.operation_id,
    )
    added = (router for extension in service_extensions() for router in extension.routers)
    last = (*_LAST_ROUTERS, health.router, observing.router)
    for router in (*ROUTERS, *added, *last):
        api.include_router(router)
    return api.routes


def _open_service(settings: Settings) -> Service:
    """Make the folders, migrate the database, and open everything that endpoints share."""
    # The data folder holds signing keys and the operator's token, so it gets mode 0700 before they are
    # written.
    make_private(settings.data_dir)
    if settings.private_dir is not None:
        make_private(settings.private_dir)
    if settings.blob_bucket is None:  # nginx may read the folder of the blobs, but not the devices' uploads
        make_private(settings.blob_root / "uploads")
    for folder in (settings.blob_root, settings.model_root, settings.corpus_root):
        folder.mkdir(parents=True, exist_ok=True)
    broker = settings.broker_url
    url = settings.database_url.get_secret_value()
    migrate(url, worker_role=settings.worker_role)
    return Service(
        settings=settings,
        database=Database(url, patience=REQUESTS),
        # A caller waits while the service retries a call of the blob store, so the service retries only once.
        # Workers retry for longer.
        blobs=open_blobs(settings, attempts=2),
        seal=keys.Seal(settings.keys_dir),
        sign_ins=RateLimit(settings.sign_ins_per_minute, clock=time.monotonic),
        streams=Slots(MAX_STREAMS, of_one=MAX_STREAMS_PER_TOKEN, calls="streams"),
        tenant_streams=Slots(MAX_STREAMS, of_one=MAX_STREAMS_PER_TENANT, calls="streams"),
        heads=Slots(models.MAX_HEADS, of_one=1, calls="registrations of files"),
        trust_keys=keys.TrustKeys(settings.keys_dir),
        # Without a broker, workers find jobs in the database alone.
        dispatcher=CeleryDispatcher(broker.get_secret_value()) if broker else None,
    )


def _closing(service: Service) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    return lifespan


def _document(app: FastAPI) -> None:
    """Make `app.openapi()` return the completed document."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _complete(app)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _complete(app: FastAPI) -> dict[str, Any]:
    added = (dict(tag) for extension in service_extensions() for tag in extension.tags)
    document = get_openapi(
        title=TITLE,
        version=app.version,
        description=DESCRIPTION,
        routes=app.routes,
        tags=[*TAGS, *added, *_LAST_TAGS],
    )
    _add_examples(document, app)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    problem = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(problem.pop("$defs", {}))
    schemas["Problem"] = problem
    for item in document["paths"].values():
        for operation in item.values():
            # FastAPI documents an optional parameter (`T | None`) as one that may be null.
            for parameter in operation.get("parameters", ()):
                _drop_null(parameter)
    # FastAPI always adds its own error schemas, but this service answers with problems instead.
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    return document


def _add_examples(document: dict[str, Any], app: FastAPI) -> None:
    """Add the examples of each request that a route parses."""
    for route in iter_route_contexts(app.routes):
        if isinstance(route.original_route, APIRoute) and route.include_in_schema and route.body_field:
            examples = named(examples_of(route.body_field.field_info.annotation))
            for method in route.methods or ():
                operation = document["paths"][route.path_format][method.lower()]
                operation["requestBody"]["content"]["application/json"]["examples"] = examples


def _drop_null(parameter: dict[str, Any]) -> None:
    """Remove `null` from a parameter's types, because a client omits a parameter and cannot send null."""
    schema = parameter["schema"]
    kinds = [kind for kind in schema.pop("anyOf", ()) if kind != {"type": "null"}]
    if kinds:
        schema.update(kinds[0] if len(kinds) == 1 else {"anyOf": kinds})
