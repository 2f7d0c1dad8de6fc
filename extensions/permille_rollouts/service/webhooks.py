"""Routes to manage webhooks: URLs that the workers call when a rollout halts or ends."""

from typing import Annotated

from fastapi import APIRouter
from sqlalchemy.orm import Session

from permille.schemas.fields import Page
from permille.schemas.problems import ProblemType
from permille.store import rows, tables
from permille_rollouts.schemas.webhooks import Delivery, Webhook, WebhookCreate, WebhookSecret
from permille_rollouts.store import webhooks
from permille_service.access.principals import Maker, Viewer, changing
from permille_service.context import Served
from permille_service.creation import MADE_RESPONSES, Creating
from permille_service.parameters import Paging, key_of, page_of
from permille_service.problems import PRIVATE, documented

router = APIRouter(
    prefix="/v1/webhooks", tags=["rollouts"], responses=documented(*PRIVATE, ProblemType.NOT_FOUND)
)
WebhookId = Annotated[str, key_of("hook")]


@router.post("", status_code=201, responses=MADE_RESPONSES)
def create_webhook(body: WebhookCreate, creating: Creating) -> WebhookSecret:
    """Register a URL that the workers call when a rollout halts or ends.

    Only this answer shows the secret.
    """
    tenant_id = creating.operator.tenant_id

    def make(session: Session) -> WebhookSecret:
        row = webhooks.create(session, tenant_id=tenant_id, url=body.url)
        return WebhookSecret(**_present(row).model_dump(), secret=row.secret)

    return creating.once(WebhookSecret, body, make, private=True, removable=tables.Webhook)


@router.get("")
def list_webhooks(service: Served, operator: Viewer, window: Paging) -> Page[Webhook]:
    """List webhooks, newest first, without their secrets."""
    with service.database.read() as session:
        page = rows.list_all(session, tables.Webhook, tenant_id=operator.tenant_id, window=window)
    return page_of(page, _present)


@router.delete("/{webhook_id}", status_code=204)
def delete_webhook(webhook_id: WebhookId, service: Served, operator: Maker) -> None:
    """Remove a webhook and its events, including those that wait to be sent."""
    with changing(service, operator) as session:
        webhooks.remove(session, tenant_id=operator.tenant_id, webhook_id=webhook_id)


@router.get("/{webhook_id}/deliveries")
def list_deliveries(
    webhook_id: WebhookId, service: Served, operator: Viewer, window: Paging
) -> Page[Delivery]:
    """List the events of a webhook from the last 30 days, newest first."""
    with service.database.read() as session:
        page = webhooks.deliveries(
            session, tenant_id=operator.tenant_id, webhook_id=webhook_id, window=window
        )
    return page_of(page, _present_delivery)


def _present(row: tables.Webhook) -> Webhook:
    return Webhook(id=row.id, url=row.url, created_at=row.created_at)


def _present_delivery(row: tables.WebhookDelivery) -> Delivery:
    return Delivery.model_validate(
        {name: getattr(row, name) for name in Delivery.model_fields},
    )
