"""The broker's transport as a worker uses it: whatever stands in the queue, the worker lives.

kombu lets a message that it cannot read end the consumer, and Celery then ends the worker with exit code 0.
Here such a message is logged and dropped. So is one that is not our task's, which could otherwise carry
times, chains and callbacks that we never send. What is dropped is no loss: the job rows are the truth.
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
    """A channel that survives what it cannot parse."""

    def _brpop_read(self, **options: Any) -> Any:
        try:
            return super()._brpop_read(**options)  # type: ignore[no-untyped-call]
        except (ValueError, RecursionError, MemoryError) as exc:  # no JSON, no UTF-8, nested too deeply
            _log.warning("dropped a message that is no JSON: %s", type(exc).__name__)
            raise Empty from exc


class Transport(redis.Transport):
    """A transport that hands on messages of our task alone."""

    Channel = Channel

    def _deliver(self, message: Any, queue: str) -> None:
        found = problem_of(message)
        if found is not None:
            _log.warning("dropped a message that is none of ours: %s", found)
            return
        super()._deliver(message, queue)  # type: ignore[no-untyped-call]


def problem_of(message: Any) -> str | None:
    """Return the fault of a parsed message, or None if `CeleryDispatcher` could have sent it."""
    if not isinstance(message, dict):
        return f"expected an object, got {type(message).__name__}"
    headers, properties, body = (message.get(name) for name in ("headers", "properties", "body"))
    if not isinstance(headers, dict) or headers.get("task") != TASK_NAME:
        named = headers.get("task") if isinstance(headers, dict) else None
        return f"expected the task {TASK_NAME}, got {named!r:.80}"
    if any(headers.get(name) for name in _UNSENT) or not isinstance(headers.get("id"), str):
        return "expected the headers of a plain task"
    if not isinstance(properties, dict) or not isinstance(properties.get("delivery_tag"), str):
        return "expected properties with a delivery tag"
    if properties.get("body_encoding") != "base64" or not isinstance(properties.get("delivery_info"), dict):
        return "expected properties of a message that was sent here"
    if message.get("content-type") != "application/json" or message.get("content-encoding") != "utf-8":
        return "expected a body of JSON"
    if not isinstance(body, str) or len(body) > MAX_BODY_CHARACTERS or not _names_a_job(body):
        return f"expected the id of a job in a body of at most {MAX_BODY_CHARACTERS} characters"
    return None


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
    TRANSPORT_ALIASES.update({"redis": transport, "rediss": transport})
