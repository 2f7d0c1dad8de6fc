"""Routers and routes that cost little: one thread a request, and no look at routes of other paths.

FastAPI runs each dependency and each endpoint that may block in a thread of its own, one after the other, and
going to a thread costs as much as a whole bare request. Here all that a request needs before its answer runs
in one: dependencies are coroutines that do not wait, and endpoints are plain functions. An endpoint that is a
coroutine (a body that is read in pieces) runs in the event loop as it does in FastAPI.
"""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import Scope

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")
_WITHOUT_BODY = frozenset({"GET", "HEAD"})


async def blocking(
    call: Callable[Arguments, Answer], *arguments: Arguments.args, **options: Arguments.kwargs
) -> Answer:
    """Call what may block from a dependency: here, where the whole route is in a thread, else in one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call(*arguments, **options)
    return await run_in_threadpool(call, *arguments, **options)


class Route(APIRoute):
    """A route whose endpoint is a plain function: it and its dependencies run in one thread."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        self._in_thread = not asyncio.iscoroutinefunction(endpoint)
        super().__init__(path, _as_coroutine(endpoint) if self._in_thread else endpoint, **options)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As the base class."""
        handler = super().get_route_handler()
        if not self._in_thread:
            return handler

        async def handle(request: Request) -> Response:
            if request.method not in _WITHOUT_BODY:
                try:
                    await request.body()  # kept by the request: nothing in the thread waits for it
                except ClientDisconnect as exc:
                    raise HTTPException(400, "expected a whole body, the client went away") from exc
            return await run_in_threadpool(_finish, handler(request))

        return handle


class Router(APIRouter):
    """A router of such routes, which is passed over where a path does not begin as they do."""

    def __init__(self, *, route_class: type[APIRoute] = Route, **options: Any) -> None:
        super().__init__(route_class=route_class, **options)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """As the base class."""
        if not scope["path"].startswith(self.prefix):
            return Match.NONE, {}
        return super().matches(scope)


def _as_coroutine(endpoint: Callable[..., Answer]) -> Callable[..., Coroutine[Any, Any, Answer]]:
    @functools.wraps(endpoint)
    async def call(*arguments: Any, **options: Any) -> Answer:
        return endpoint(*arguments, **options)

    return call


def _finish(coroutine: Coroutine[Any, Any, Answer]) -> Answer:
    """Run a coroutine that waits for nothing to its end."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        answer: Answer = done.value
        return answer
    coroutine.close()
    raise RuntimeError("expected dependencies that wait for nothing: `blocking` calls what may block")
