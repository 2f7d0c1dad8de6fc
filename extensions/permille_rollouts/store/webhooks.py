"""Webhooks, and the events to deliver to them.

The transaction that causes an event adds one row for each webhook. Any worker may deliver the event. It
claims the row for two minutes, sends the event, and stores the outcome. If the worker is killed, no
event is lost, but a receiver may get an event twice, with the same id.
"""

import json
import logging
import secrets
from base64 import b64encode
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from sqlalchemy import delete, or_, select
from sqlalchemy.orm import Session

from permille.store import rows
from permille.store.database import now
from permille.store.ids import Prefix, new_id
from permille.store.tables import Webhook, WebhookDelivery
from permille_rollouts.schemas.webhooks import EventType

_log = logging.getLogger(__name__)
SECRET_PREFIX: Final = "whsec_"  # noqa: S105 - what Standard Webhooks puts before a secret
MAX_WEBHOOKS: Final = 20
# Pauses after failed attempts, in seconds, as Standard Webhooks advises. If the attempt after the last pause
# fails, too, the delivery is given up.
RETRY_AFTER_S: Final = (5, 300, 1800, 7200, 18_000, 36_000)
CLAIMED_FOR: Final = timedelta(minutes=2)
KEPT_FOR: Final = timedelta(days=30)
# A worker claims at most this many events at once, because it must deliver all of them, one by one, within
# `CLAIMED_FOR`.
_MAX_CLAIMED: Final = 3
_FAILURE_CHARACTERS: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A claimed event, ready to send.

    Attributes:
        secret: the prefix `whsec_` and the key in base64.
        body: JSON. Exactly these bytes are signed.
    """

    id: str
    url: str
    secret: str
    body: bytes


def create(session: Session, *, tenant_id: str, url: str) -> Webhook:
    """Add a webhook with a new secret. Raises ConflictError if the tenant has too many."""
    rows.check_room(session, Webhook, tenant_id=tenant_id, most=MAX_WEBHOOKS)
    return rows.add(
        session,
        Webhook(
            id=new_id(Prefix.WEBHOOK),
            tenant_id=tenant_id,
            created_at=now(session),
            url=url,
            secret=SECRET_PREFIX + b64encode(secrets.token_bytes(32)).decode(),
        ),
    )


def remove(session: Session, *, tenant_id: str, webhook_id: str) -> None:
    """Remove a webhook and all its events, including those already delivered. Raises NotFoundError."""
    row = rows.lock(session, Webhook, tenant_id=tenant_id, row_id=webhook_id, to_remove=True)
    session.execute(delete(WebhookDelivery).where(WebhookDelivery.webhook_id == row.id))
    session.delete(row)


def tell(session: Session, *, tenant_id: str, event: EventType, data: dict[str, Any]) -> None:
    """Add an event for all webhooks of a tenant."""
    at = now(session)
    for webhook_id in session.scalars(select(Webhook.id).where(Webhook.tenant_id == tenant_id)):
        row = WebhookDelivery(
            id=new_id(Prefix.DELIVERY),
            tenant_id=tenant_id,
            created_at=at,
            webhook_id=webhook_id,
            event=event.value,
            body={"type": event.value, "timestamp": at.isoformat(), "data": data},
            attempts=0,
            next_at=at,
        )
        session.add(row)


def deliveries(
    session: Session, *, tenant_id: str, webhook_id: str, window: rows.Window
) -> rows.Page[WebhookDelivery]:
    """List the events of a webhook, newest first. Raises NotFoundError."""
    rows.get(session, Webhook, tenant_id=tenant_id, row_id=webhook_id)
    query = select(WebhookDelivery).where(WebhookDelivery.webhook_id == webhook_id)
    return rows.fetch_page(session, query, window, WebhookDelivery.id)


def claim(session: Session) -> list[Message]:
    """Claim some due events for two minutes, and delete old events."""
    at = now(session)
    session.execute(delete(WebhookDelivery).where(WebhookDelivery.created_at <= at - KEPT_FOR))
    query = (
        select(WebhookDelivery, Webhook)
        .join(Webhook, Webhook.id == WebhookDelivery.webhook_id)
        # No pause is as long as a day. A later time means that the database's clock has gone back.
        .where(or_(WebhookDelivery.next_at <= at, WebhookDelivery.next_at > at + timedelta(days=1)))
        .order_by(WebhookDelivery.next_at)
        .limit(_MAX_CLAIMED)
        .with_for_update(of=WebhookDelivery, skip_locked=True)
    )
    messages = []
    for row, webhook in session.execute(query).all():
        if damaged := rows.damaged(row):
            _log.error("the event %s is given up, because its row is damaged: %s", row.id, ", ".join(damaged))
            row.next_at, row.attempts, row.failure = None, 0, "the event is damaged"
            continue
        # If this worker is killed, the event becomes due again after the claim.
        row.next_at, row.attempts = at + CLAIMED_FOR, row.attempts + 1
        # The signature covers bytes, so the body is serialized once, here.
        body = json.dumps(row.body, separators=(",", ":")).encode()
        messages.append(Message(id=row.id, url=webhook.url, secret=webhook.secret, body=body))
    return messages


def note(session: Session, delivery_id: str, failure: str | None) -> None:
    """Store the outcome of an attempt, and schedule the next attempt if it failed."""
    row = session.get(WebhookDelivery, delivery_id, with_for_update=True)
    if row is None:  # the webhook was removed meanwhile
        return
    # The receiver may choose this text, so limit its length.
    row.failure = None if failure is None else failure[:_FAILURE_CHARACTERS]
    row.next_at = None
    if failure is not None and row.attempts <= len(RETRY_AFTER_S):
        row.next_at = now(session) + timedelta(seconds=RETRY_AFTER_S[row.attempts - 1])
