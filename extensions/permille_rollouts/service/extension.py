"""The part of rollouts for the service."""

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from permille.store.tables import Rollout
from permille_rollouts.offer import RolloutState
from permille_rollouts.service import routes, webhooks
from permille_rollouts.service.signing import sign_all
from permille_service.extension import ServiceExtension


def metrics(session: Session) -> Iterator[Metric]:
    """Yield the number of rollouts by state, and of those that halted themselves, over all tenants."""
    counts = session.execute(
        select(Rollout.state, func.count(), func.count(Rollout.reason)).group_by(Rollout.state)
    ).all()
    by_state = GaugeMetricFamily("permille_rollouts", "Rollouts by state.", labels=("state",))
    for state, count, _ in counts:
        by_state.add_metric((state,), count)
    yield by_state
    halted = sum(halted for state, _, halted in counts if state == RolloutState.PAUSED)
    yield GaugeMetricFamily(
        "permille_rollouts_halted", "Halted rollouts, which wait for an operator.", halted
    )


EXTENSION: Final = ServiceExtension(
    routers=(routes.router, routes.device_router, webhooks.router),
    tags=(
        {"name": "rollouts", "description": "Groups of devices, and versions that reach them wave by wave."},
    ),
    sign=sign_all,
    metrics=metrics,
)
