"""Webhooks: addresses that are told when a rollout stops itself or ends."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from permille.schemas.fields import Closed, Count, Id, Timestamp

Url = Annotated[
    str,
    StringConstraints(pattern=r"^https?://[A-Za-z0-9._\[\]:-]+(/[!-~]*)?$", max_length=1000),
    Field(examples=["https://hooks.example.org/permille"]),
]


class EventType(StrEnum):
    """Event of a rollout that webhooks are told of."""

    HALTED = "rollout.halted"
    STOPPED = "rollout.stopped"
    DONE = "rollout.done"
    REVERTED = "rollout.reverted"


class WebhookCreate(Closed):
    """An address to tell of rollouts."""

    url: Url = Field(description="receives a POST for each event")


class Webhook(WebhookCreate):
    """A webhook as operators see it."""

    id: Id
    created_at: Timestamp


class WebhookSecret(Webhook):
    """A new webhook. `secret`, by which its receiver checks signatures, is shown once, here."""

    secret: str


class Delivery(Closed):
    """An event on its way to a webhook."""

    id: Id = Field(description="the header `webhook-id`, the same for each attempt")
    event: EventType
    created_at: Timestamp
    attempts: Count
    next_at: Timestamp | None = Field(description="of the next attempt; null: delivered, or given up")
    failure: str | None = Field(description="why the last attempt failed; null: none did")
