"""Metrics of a worker for Prometheus: the duration of attempts by kind of job, and lost leases.

They are served only if `PERMILLE_METRICS_PORT` is set. They need no token, so the default address is
loopback. The metrics contain no ids of jobs.
"""

import threading
from http import HTTPStatus

from prometheus_client import Counter, Histogram, MetricsHandler

from permille.bounded_server import BoundedServer
from permille.errors import OperatorError
from permille.store.jobs.claims import SweepReport
from permille_workers.runtime.settings import WorkerSettings

_BUCKETS = (0.5, 1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 24 * 3600)

ATTEMPT_S = Histogram(
    "permille_attempt_seconds",
    "How long attempts took, by the kind of the job and its state after the attempt.",
    ("kind", "state"),
    buckets=_BUCKETS,
)
LEASES_LOST = Counter(
    "permille_leases_lost", "Attempts of this worker that another worker has taken over.", ("kind",)
)
_SWEPT = Counter(
    "permille_leases_expired",
    "Attempts that this worker ended because their own worker was silent, by the new state of the job.",
    ("state",),
)
for _state in ("queued", "dead", "cancelled"):
    _SWEPT.labels(_state)  # create the counter at 0, because Prometheus sees no increase in a new counter


def count_sweep(report: SweepReport) -> None:
    """Count the attempts that a sweep ended."""
    _SWEPT.labels("queued").inc(report.requeued)
    _SWEPT.labels("dead").inc(report.died)
    _SWEPT.labels("cancelled").inc(report.cancelled)


def serve_metrics(settings: WorkerSettings) -> None:
    """Serve `/metrics` from a thread. Do nothing if the settings have no port.

    Raises:
        OperatorError: the address cannot be bound.
    """
    if settings.metrics_port is None:
        return
    try:
        server = BoundedServer((settings.metrics_host, settings.metrics_port), _Handler)
    except OSError as exc:
        where = f"{settings.metrics_host}:{settings.metrics_port}"
        raise OperatorError(f"metrics cannot be served at {where}: {exc.strerror}") from exc
    # A daemon thread does not delay the end of the worker.
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()


class _Handler(MetricsHandler):
    """Handler of `GET /metrics`. Anybody may call it, so connections have a short timeout."""

    timeout = 10.0
    server_version, sys_version = "permille-worker", ""

    def do_GET(self) -> None:  # noqa: N802 - the parent's name
        """Send the metrics."""
        if self.path.partition("?")[0] == "/metrics":
            super().do_GET()
        else:
            self.send_response(HTTPStatus.NOT_FOUND)
            self.end_headers()
