"""Webhooks: addresses that receive events when a rollout halts or ends."""

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field, StringConstraints

from permille.schemas.fields import Closed, Count, Examples, Id, Timestamp

Url = Annotated[
    str,
    # A host, an optional port, and a path in printable ASCII. User names and spaces are refused.
    StringConstraints(pattern=r"^https?://[A-Za-z0-9._\[\]:-]+(/[!-~]*)?$", max_length=1000),
    Field(examples=["https://hooks.example.org/permille"]),
]


class EventType(StrEnum):
    """An event of a rollout, which webhooks receive."""

    HALTED = "rollout.halted"
    STOPPED = "rollout.stopped"
    DONE = "rollout.done"
    REVERTED = "rollout.reverted"


class WebhookCreate(Closed):
    """An address that receives events of rollouts."""

    examples: ClassVar[Examples] = {"an address": {"url": "https://hooks.example.org/permille"}}

    url: Url = Field(description="address that receives a POST for each event")


class Webhook(WebhookCreate):
    """A webhook as operators see it."""

    id: Id
    created_at: Timestamp


class WebhookSecret(Webhook):
    """A new webhook. The receiver checks signatures with `secret`, which is shown only here."""

    # Unlike other secrets, this one is stored in plain text, because it signs each delivery.
    secret: str


class Delivery(Closed):
    """An event for a webhook, with the state of its delivery."""

    # A receiver may get an event twice, and recognizes it by this id.
    id: Id = Field(description="value of the header `webhook-id`, the same for each attempt")
    event: EventType
    created_at: Timestamp
    attempts: Count
    next_at: Timestamp | None = Field(description="time of the next attempt; null if delivered or given up")
    failure: str | None = Field(description="reason of the last attempt's failure, or null")
