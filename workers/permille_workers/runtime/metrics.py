"""What a worker counts, for Prometheus: attempts and their time by kind, leases that were lost.

Served only where `PERMILLE_METRICS_PORT` is set, without a token, so on loopback unless it is told otherwise.
No ids of jobs.
"""

from prometheus_client import Counter, Histogram, start_http_server

from permille.errors import OperatorError
from permille.store.jobs.claims import SweepReport
from permille_workers.runtime.settings import WorkerSettings

_BUCKETS = (0.5, 1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 24 * 3600)

ATTEMPT_S = Histogram(
    "permille_attempt_seconds",
    "How long attempts took, by kind of job and the job's state after it.",
    ("kind", "state"),
    buckets=_BUCKETS,
)
LEASES_LOST = Counter(
    "permille_leases_lost", "Attempts of this worker that another had taken over.", ("kind",)
)
_SWEPT = Counter(
    "permille_leases_expired",
    "Attempts of silent workers that this one ended, by what became of the job.",
    ("state",),
)
for _state in ("queued", "dead", "cancelled"):
    _SWEPT.labels(_state)  # there from the beginning, so that an increase is seen


def count_sweep(report: SweepReport) -> None:
    """Count what a sweep ended."""
    _SWEPT.labels("queued").inc(report.requeued)
    _SWEPT.labels("dead").inc(report.died)
    _SWEPT.labels("cancelled").inc(report.cancelled)


def serve_metrics(settings: WorkerSettings) -> None:
    """Serve `/metrics` from a thread, where a port is set.

    Raises:
        OperatorError: the address cannot be bound.
    """
    if settings.metrics_port is None:
        return
    try:
        start_http_server(settings.metrics_port, addr=settings.metrics_host)
    except OSError as exc:
        where = f"{settings.metrics_host}:{settings.metrics_port}"
        raise OperatorError(f"metrics cannot be served at {where}: {exc.strerror}") from exc
