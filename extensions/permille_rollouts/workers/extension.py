"""The part of rollouts for the workers."""

from functools import partial
from typing import Final

from permille.store.database import Database
from permille_rollouts.store import rollouts
from permille_rollouts.workers.webhooks import post, send_due
from permille_workers.runtime.extension import WorkerExtension
from permille_workers.runtime.settings import WorkerSettings


def send_webhooks(db: Database, settings: WorkerSettings) -> None:
    """Send the webhook events that are due."""
    send_due(db, partial(post, allow_private=settings.webhook_private))


# A slow receiver of webhooks must not delay the sweep.
EXTENSION: Final = WorkerExtension(
    sweeps={"advance rollouts": rollouts.sweep}, threads={"send webhooks": send_webhooks}
)
