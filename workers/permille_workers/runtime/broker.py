"""A transport for the broker that survives malformed messages.

If kombu cannot parse a message, its consumer ends, and Celery ends the worker with exit code 0. This
transport logs and drops such a message. It also drops messages that the service never sends: messages for
another task, or with a start time, a chain or a callback. No work is lost, because the database holds all
jobs.
"""

import base64
import json
import logging
from queue import Empty
from typing import Any

from kombu.transport import TRANSPORT_ALIASES, redis

from permille.store.jobs.dispatch import TASK_NAME

MAX_BODY_CHARACTERS = 4096  # the service's messages have some hundred characters
_UNSENT = ("eta", "expires", "retries", "group")  # header fields that are null or 0 in the service's messages

_log = logging.getLogger(__name__)


class Channel(redis.Channel):
    """A channel that drops messages that it cannot parse."""

    def _brpop_read(self, **options: Any) -> Any:
        try:
            return super()._brpop_read(**options)  # type: ignore[no-untyped-call]
        # The message is not JSON or not UTF-8, or it is nested too deeply.
        except (ValueError, RecursionError, MemoryError) as exc:
            _log.warning("dropped a message that is not JSON: %s", type(exc).__name__)
            # `Empty` tells kombu that no message has come, so it asks again.
            raise Empty from exc


class Transport(redis.Transport):
    """A transport that delivers only messages for the task that runs jobs."""

    Channel = Channel

    def _deliver(self, message: Any, queue: str) -> None:
        if not is_ours(message):
            _log.warning("dropped a message that the service did not send")
            return
        super()._deliver(message, queue)  # type: ignore[no-untyped-call]


def is_ours(message: Any) -> bool:
    """Return whether a parsed message has the form of those that `CeleryDispatcher` sends."""
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
            # Check this before the body is decoded, because anyone who reaches Redis can send a large body.
            and len(body) <= MAX_BODY_CHARACTERS
            and _names_a_job(body)
        )
    except (AttributeError, KeyError, TypeError):  # the message has another form
        return False


def _names_a_job(body: str) -> bool:
    """Return whether the body of a message has exactly one argument, which is a string, and no callbacks."""
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
    """Make kombu use this transport for all Redis connections of this process."""
    transport = f"{__name__}:Transport"
    # kombu finds the transport by the scheme of the broker's URL.
    TRANSPORT_ALIASES.update({"redis": transport, "rediss": transport})
