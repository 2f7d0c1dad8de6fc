"""A transport for the broker that survives malformed messages.

If kombu cannot parse a message, its consumer ends, and Celery ends the worker with exit code 0. This
transport logs and drops such a message. It also drops messages of other tasks, which could carry times,
chains and callbacks that the service never sends. No work is lost, since the job rows are the truth.
"""

import base64
import json
import logging
from queue import Empty
from typing import Any

from kombu.transport import TRANSPORT_ALIASES, redis

from permille.store.jobs.dispatch import TASK_NAME

MAX_BODY_CHARACTERS = 4096  # ours have some hundred
_UNSENT = ("eta", "expires", "retries", "group")  # of a header; ours has none of these

_log = logging.getLogger(__name__)


class Channel(redis.Channel):
    """A channel that drops messages that it cannot parse."""

    def _brpop_read(self, **options: Any) -> Any:
        try:
            return super()._brpop_read(**options)  # type: ignore[no-untyped-call]
        except (ValueError, RecursionError, MemoryError) as exc:  # no JSON, no UTF-8, nested too deeply
            _log.warning("dropped a message that is no JSON: %s", type(exc).__name__)
            # For kombu, `Empty` means that no message came, so it asks again.
            raise Empty from exc


class Transport(redis.Transport):
    """A transport that only delivers messages of our task."""

    Channel = Channel

    def _deliver(self, message: Any, queue: str) -> None:
        if not is_ours(message):
            _log.warning("dropped a message that is none of ours")
            return
        super()._deliver(message, queue)  # type: ignore[no-untyped-call]


def is_ours(message: Any) -> bool:
    """Return whether `CeleryDispatcher` could have sent a parsed message."""
    try:
        headers, properties, body = message["headers"], message["properties"], message["body"]
        return (
            headers["task"] == TASK_NAME
            and isinstance(headers["id"], str)
            and not any(headers.get(name) for name in _UNSENT)
            and isinstance(properties["delivery_tag"], str)
            and isinstance(properties["delivery_info"], dict)
            and properties["body_encoding"] == "base64"
            and (message["content-type"], message["content-encoding"]) == ("application/json", "utf-8")
            and isinstance(body, str)
            # Before the body is decoded: anyone who reaches Redis can send a body of any size.
            and len(body) <= MAX_BODY_CHARACTERS
            and _names_a_job(body)
        )
    except (AttributeError, KeyError, TypeError):  # of another form
        return False


def _names_a_job(body: str) -> bool:
    """Return whether a body has one text argument and no callbacks."""
    try:
        arguments, options, afterwards = json.loads(base64.b64decode(body, validate=True))
        (job_id,) = arguments
    except (ValueError, TypeError, RecursionError):
        return False
    return (
        isinstance(job_id, str)
        and options == {}
        and isinstance(afterwards, dict)
        and not any(afterwards.values())
    )


def install() -> None:
    """Make Redis connections of this process use this transport."""
    transport = f"{__name__}:Transport"
    # kombu looks the transport up by the scheme of the URL.
    TRANSPORT_ALIASES.update({"redis": transport, "rediss": transport})
