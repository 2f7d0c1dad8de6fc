"""A job's events as server-sent events.

A client resumes a stream with the header `Last-Event-ID`. Comment lines keep the connection alive. The stream
ends when the job has ended.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack

from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from permille.schemas.jobs import ENDED, JobEvent
from permille.store import rows, tables
from permille.store.jobs import queue
from permille_service.context import Service
from permille_service.jobs.records import present_event

POLL_S = 0.5
HEARTBEAT_S = 15.0
MAX_STREAMS, MAX_STREAMS_PER_TENANT, MAX_STREAMS_PER_TOKEN = 200, 50, 10
"""Largest numbers of open event streams: of all callers together, of a tenant, and of an operator token."""


class EventStream(StreamingResponse):
    """A stream of events that holds slots while it is sent. If one is not free, the answer is a problem."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[bytes], *, places: Sequence[AbstractContextManager[None]]
    ) -> None:
        # nginx buffers answers unless this header forbids it.
        super().__init__(events, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._places = places

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. Raises ApiError if no slot is free."""
        with ExitStack() as held:
            for place in self._places:
                held.enter_context(place)
            await super().__call__(scope, receive, send)


async def stream_events(
    service: Service, *, tenant_id: str, job_id: str, after: int, still_allowed: Callable[[], bool]
) -> AsyncIterator[bytes]:
    """Yield the lines of the stream, starting after the event `after`.

    The stream ends after the last event of an ended job, and at a heartbeat if the caller's token is no
    longer valid. It also ends after `stream_s` seconds and when the process stops. Clients then resume it.
    """
    deadline = time.monotonic() + service.settings.stream_s
    heartbeat = time.monotonic() + HEARTBEAT_S
    yield b"retry: 1000\n\n"
    while True:
        events, ended = await run_in_threadpool(_read, service, tenant_id, job_id, after)
        for event in events:
            after = event.seq
            yield encode(event)
        if (ended and not events) or time.monotonic() > deadline or service.draining.is_set():
            return
        if time.monotonic() > heartbeat:
            heartbeat = time.monotonic() + HEARTBEAT_S
            # Streams live for minutes, so a revoked token must end them.
            if not await run_in_threadpool(still_allowed):
                return
            yield b": alive\n\n"
        if not events:
            await asyncio.sleep(POLL_S)


def encode(event: JobEvent) -> bytes:
    """Encode an event. Its data is one line of JSON."""
    data = json.dumps(event.model_dump(mode="json"), separators=(",", ":"))
    return f"id: {event.seq}\nevent: {event.kind}\ndata: {data}\n\n".encode()


def _read(service: Service, tenant_id: str, job_id: str, after: int) -> tuple[Sequence[JobEvent], bool]:
    with service.database.read() as session:
        job = rows.get(session, tables.Job, tenant_id=tenant_id, row_id=job_id)
        events = queue.events_after(session, tenant_id=tenant_id, job_id=job_id, seq=after)
        return rows.records_of(events, present_event), job.state in ENDED
