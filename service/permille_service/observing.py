"""Observability of the API: an id for each request, and metrics for Prometheus.

`GET /metrics` needs the token of `PERMILLE_METRICS_TOKEN`. If that setting is empty, the path answers 404.
The metrics of jobs, blobs, devices and extensions come from the database. The metrics of requests cover this
process only.
"""

import hmac
import time
from collections.abc import Iterator
from typing import Final

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy.exc import DBAPIError
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from permille import telemetry
from permille.schemas.problems import ProblemType
from permille.store.database import Database
from permille.store.jobs.figures import Figures, read_figures
from permille_service.access.principals import Authentication
from permille_service.context import Served, Service
from permille_service.extension import service_extensions
from permille_service.problems import UNANSWERED, ApiError

REQUEST_ID: Final = "X-Request-ID"
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Methods with a label of their own. All others share one label, since labels stay in memory for ever."""
_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
router = APIRouter(include_in_schema=False)


class Observed:
    """Pure ASGI middleware that gives each request an id and measures the time until its answer begins."""

    def __init__(self, app: ASGIApp, requests: Histogram) -> None:
        self._app = app
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with an id."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.monotonic()
        above = telemetry.Trace.parse(Headers(scope=scope).get("traceparent"))
        with telemetry.request(above) as here:

            async def send_with_id(message: Message) -> None:
                if message["type"] == "http.response.start":
                    MutableHeaders(scope=message)[REQUEST_ID] = here.trace_id
                    # Use the pattern of the route. With the path, each device id would become a label.
                    route = getattr(scope.get("route"), "path", "other")
                    method = scope["method"] if scope["method"] in _METHODS else "other"
                    timer = self._requests.labels(method, route, str(message["status"]))
                    timer.observe(time.monotonic() - begun)
                await send(message)

            await self._app(scope, receive, send_with_id)


class _Rows(Collector):
    """Metrics that a scrape reads from the database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def describe(self) -> list[Metric]:
        """Return no descriptions.

        Without this method, the registry would call `collect` at start-up, which reads the database.
        """
        return []

    def collect(self) -> Iterator[Metric]:
        with self._database.read() as session:
            found = read_figures(session)
            added = [metric for extension in service_extensions() for metric in extension.metrics(session)]
        yield from (*_families(found), *added)


def _families(found: Figures) -> Iterator[Metric]:
    jobs = GaugeMetricFamily("permille_jobs", "Jobs that have not succeeded.", labels=("kind", "state"))
    for labels, count in found.jobs.items():
        jobs.add_metric(labels, count)
    waiting = GaugeMetricFamily(
        "permille_queue_age_seconds",
        "Waiting time of the oldest job that is due, for each kind.",
        labels=("kind",),
    )
    for kind, seconds in found.waiting_s.items():
        waiting.add_metric((kind,), seconds)
    longest = max(found.waiting_s.values(), default=0.0)
    devices = GaugeMetricFamily(
        "permille_devices",
        "Enrolled devices by the release and alias that they follow.",
        labels=("release", "alias"),
    )
    for labels, count in found.devices.items():
        devices.add_metric(labels, count)
    yield from (jobs, waiting, devices)
    yield GaugeMetricFamily(
        "permille_queue_age_longest_seconds",
        "Waiting time of the oldest job that is due, over all kinds. 0: no job waits.",
        longest,
    )
    yield GaugeMetricFamily("permille_blob_bytes", "Bytes of all blobs of artifacts.", found.blob_bytes)
    if found.unreferenced_bytes is not None and found.collected_at is not None:
        yield GaugeMetricFamily(
            "permille_blob_unreferenced_bytes",
            "Bytes of blobs that no row names, and that the last collection kept because they are recent.",
            found.unreferenced_bytes,
        )
        yield GaugeMetricFamily(
            "permille_blob_collection_timestamp_seconds",
            "When the last collection ended.",
            found.collected_at.timestamp(),
        )


class MetricsToken(Authentication):
    """A dependency that admits Prometheus with the token of the settings."""

    def __call__(self, request: Request, service: Served) -> None:
        """Check the token of the request.

        Raises:
            ApiError: `not-found`: the settings have no token. `unauthenticated`: the request lacks the token.
        """
        expected = service.settings.metrics_token
        if not expected:  # None, or an empty secret
            raise ApiError(ProblemType.NOT_FOUND, "there is no such path")
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        # Compare in constant time, so that the timing leaks nothing about this token. Other tokens are looked
        # up by their hash, so their timing leaks nothing.
        if scheme.lower() != "bearer" or not hmac.compare_digest(
            token.encode(), expected.get_secret_value().encode()
        ):
            raise ApiError(
                ProblemType.UNAUTHENTICATED, "Send the token of PERMILLE_METRICS_TOKEN as a bearer token."
            )


@router.get("/metrics", dependencies=[Depends(MetricsToken())])
def metrics(request: Request) -> Response:
    """Return the metrics in the text format of Prometheus."""
    registry: CollectorRegistry = request.app.state.metrics
    try:
        content = generate_latest(registry)
    except DBAPIError as exc:
        raise ApiError(ProblemType.UNAVAILABLE, UNANSWERED) from exc
    return Response(content, media_type=CONTENT_TYPE_LATEST, headers={"Cache-Control": "no-store"})


def install(app: FastAPI) -> None:
    """Observe every request of the app. Install this last, so that it also counts refused requests."""
    service: Service = app.state.service
    registry = CollectorRegistry()
    registry.register(_Rows(service.database))
    requests = Histogram(
        "permille_request_seconds",
        "Time until an answer began.",
        ("method", "route", "status"),
        registry=registry,
        buckets=_BUCKETS,
    )
    app.state.metrics = registry
    app.add_middleware(Observed, requests=requests)
