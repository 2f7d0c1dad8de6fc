"""Routers and routes that cost little: one thread a request or none, and no look at routes of other paths.

FastAPI runs each dependency and each endpoint that may block in a thread of its own, one after the other, and
going to a thread costs as much as a whole bare request. Here all that a request needs before its answer runs
in one: dependencies are coroutines that do not wait, and endpoints are plain functions. An endpoint that is a
coroutine (a body that is read in pieces) runs in the event loop as it does in FastAPI.

An endpoint marked `in_loop` needs no thread: it reads a row or two by their keys. It is a plain function too,
run in a greenlet, as SQLAlchemy runs what uses its asyncio drivers: where the database lets it wait, others
go on. `Database.look` and `first` know that; what writes goes `in_thread`.
"""

import asyncio
import functools
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar, TypeVarTuple

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar
from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from sqlalchemy.exc import OperationalError
from sqlalchemy.util.concurrency import await_only, greenlet_spawn, in_greenlet
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import Scope

from permille.schemas.problems import ProblemType
from permille_service.problems import UNANSWERED, ApiError

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")
Given = TypeVarTuple("Given")
Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])
ANSWER_S = 30.0
"""As long a read in the event loop waits for the database: a thread waits as long for a lock of SQLite."""
TRY_S, FEW = 1.0, 4
"""So long an answer waits for what it does not need, in one of so few threads."""
_few: RunVar[CapacityLimiter] = RunVar("few")
WITHOUT_BODY = frozenset({"GET", "HEAD"})


def in_loop(endpoint: Endpoint) -> Endpoint:
    """Mark an endpoint that does no more than to `look` at a row or two: it runs in the event loop."""
    endpoint.in_loop = True  # type: ignore[attr-defined]
    return endpoint


def in_thread(call: Callable[[*Given], Answer], *arguments: *Given) -> Answer:
    """Call what writes or takes long: here, or in a thread where here is the event loop."""
    if not in_greenlet():
        return call(*arguments)
    threads = to_thread.current_default_thread_limiter()
    return await_only(_in_counted_thread(functools.partial(call, *arguments), threads))


def try_in_thread(call: Callable[[*Given], object], *arguments: *Given) -> None:
    """Call what an answer does not need: where here is the event loop, it is waited for a second at most."""
    if in_greenlet():
        await_only(_try_in_thread(functools.partial(call, *arguments)))
    else:
        call(*arguments)


async def blocking(
    call: Callable[Arguments, Answer], *arguments: Arguments.args, **options: Arguments.kwargs
) -> Answer:
    """Call what may block from a dependency: here, in a route of plain functions, else in a thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call(*arguments, **options)
    if in_greenlet():
        return call(*arguments, **options)
    return await run_in_threadpool(call, *arguments, **options)


class Route(APIRoute):
    """A route whose endpoint is a plain function: it and its dependencies run in one thread, or in none.

    A parameter of its query that comes twice is refused: FastAPI would take the last and look at no other.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        self._plain = not asyncio.iscoroutinefunction(endpoint)
        self._in_loop = getattr(endpoint, "in_loop", False)
        super().__init__(path, _as_coroutine(endpoint) if self._plain else endpoint, **options)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As the base class."""
        handler, names = self._handler(), _query_names(self.dependant)
        if not names:
            return handler

        async def check_and_handle(request: Request) -> Response:
            if b"&" in request.scope["query_string"]:
                _check_given_once(request, names)
            return await handler(request)

        return check_and_handle

    def _handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        if not self._plain:
            return handler
        if self._in_loop:
            return functools.partial(_handle_in_loop, handler)

        async def handle(request: Request) -> Response:
            if request.method not in WITHOUT_BODY:
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


async def _handle_in_loop(
    handler: Callable[[Request], Coroutine[Any, Any, Response]], request: Request
) -> Response:
    try:
        async with asyncio.timeout(ANSWER_S):
            return await greenlet_spawn(_finish, handler(request))
    except TimeoutError as exc:
        raise ApiError(ProblemType.UNAVAILABLE, UNANSWERED) from exc
    except OperationalError:
        # Busy, or a connection that broke: there is time to wait, and to make another, in a thread.
        return await run_in_threadpool(_finish, handler(request))


async def _try_in_thread(call: Callable[[], object]) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(TRY_S):
            await _in_counted_thread(call, _few_threads())


def _few_threads() -> CapacityLimiter:
    """Threads of this event loop for what no answer needs: while it hangs, requests have all others."""
    if _few.get(None) is None:
        _few.set(CapacityLimiter(FEW))
    return _few.get()


async def _in_counted_thread(call: Callable[[], Answer], threads: CapacityLimiter) -> Answer:
    """Call in one of these threads, which stays one of them until the call ends.

    Who asked may have left long before: a database that hangs would get one more thread from each.
    """
    borrower = object()
    await threads.acquire_on_behalf_of(borrower)
    running = asyncio.ensure_future(to_thread.run_sync(call, limiter=CapacityLimiter(1)))
    running.add_done_callback(lambda _: threads.release_on_behalf_of(borrower))
    return await asyncio.shield(running)


def _query_names(dependant: Dependant) -> frozenset[str]:
    """The names of all parameters of a route's query, those of its dependencies too."""
    own = frozenset(field.alias for field in dependant.query_params)
    return own.union(*map(_query_names, dependant.dependencies))


def _check_given_once(request: Request, names: frozenset[str]) -> None:
    counts = Counter(name for name, _ in request.query_params.multi_items() if name in names)
    errors = [
        {"loc": ("query", name), "msg": f"expected one value, got {count}"}
        for name, count in counts.items()
        if count > 1
    ]
    if errors:
        raise RequestValidationError(errors)


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
