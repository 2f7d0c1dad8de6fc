"""Limits of the API's connections: their number, and the time that a request may take to arrive.

uvicorn has no deadline for a request's head or body, and its `limit_concurrency` also refuses health
checks. Other servers do not help: hypercorn only limits the time of a single read, and granian limits neither
bodies nor connections. This module therefore adds a listening socket that counts connections, and a subclass
of uvicorn's protocol that tracks the state of each connection.

Rules:
- A connection counts from `accept` until its descriptor is closed. This includes a TLS handshake.
- One limit applies to all connections together and stays below the limit of open files. A second limit
  applies to each address, except to the addresses of trusted proxies.
- At a limit, a stalled connection is evicted to admit a new one. A connection is stalled while the service
  waits for the head or the body of a request, or for the client to read the answer. Connections that wait for
  a head are evicted before the other stalled connections. Of those that wait for a head, the one that has
  waited longest goes first.
- If an address is at its limit, one of its own connections is evicted. At the total limit, the victim
  comes from the address with the most stalled connections.
- If no connection is stalled, the request on the new one is answered with 429 at the limit of its address,
  and with 503 at the total limit. Health checks are still answered.
- A head must arrive within `header_s` seconds of the connection's start or of the last answer.
- A body must arrive within `body_s` seconds, plus the time that its bytes take at `UPLOAD_BYTES_PER_S`. In
  all, it may take `REQUEST_S` seconds. Only the time in which the service reads is counted.
- A client that does not read its answer for `STALL_S` seconds is disconnected.
"""

import asyncio
import ipaddress
import resource
import socket
import time
import weakref
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, ClassVar, Final

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from permille.addresses import address_key, plain_address
from permille.schemas.problems import ProblemType
from permille_service.problems import problem_response
from permille_service.settings import Settings

UPLOAD_BYTES_PER_S: Final = 4096
REQUEST_S: Final = 3600.0
STALL_S: Final = 60.0
SWEEP_S: Final = 0.5
CLOSE_S: Final = 0.1
"""Seconds between the orderly close of a connection and its abort."""
SPARE: Final = 64
"""Number of connections above the limit that are still accepted, to be answered with 429 or 503."""
CLOSING: Final = 32
"""While this many connections are closing, no new ones are accepted."""
OWN_FILES: Final = 128
"""Descriptors reserved for the database, the log and other files."""
MAX_FILES: Final = 65_536
HEALTH_PATHS: Final = frozenset({"/v1/health", "/livez", "/readyz"})

_TOO_SLOW = "The request did not arrive in time."
_CROWDED = {
    ProblemType.TOO_MANY_REQUESTS: "This address has too many connections.",
    ProblemType.UNAVAILABLE: "The service has as many connections as it can hold.",
}


def raise_file_limit() -> int:
    """Raise the limit of open files to the hard limit, but to at most `MAX_FILES`. Return the new limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


@dataclass(slots=True, eq=False, kw_only=True)
class Connection:
    """State of a connection: the key of its address, the start of its wait for a head, and its refusal."""

    key: str
    # The event loop owns the socket. A strong reference would keep its descriptor open.
    socket: "weakref.ref[socket.socket]"
    since: float = 0.0
    refusal: ProblemType | None = None
    protocol: "LimitedProtocol | None" = None


class Connections:
    """All open connections, by address and by waiting time."""

    def __init__(self, settings: Settings, *, files: int) -> None:
        # Two descriptors for each connection: its socket, and the file of a blob that is sent over it.
        room = max(16, (files - OWN_FILES) // 2)
        self.header_s, self.body_s = settings.header_s, settings.body_s
        self._most = min(settings.max_connections, room)
        self._most_of_one = settings.max_connections_per_address
        self._proxies = settings.proxy_networks
        self._open: dict[int, Connection] = {}
        # These dicts serve as ordered sets. The first connection in each has waited longest.
        self._waiting: dict[Connection, None] = {}
        # Connections whose client must send a body or read its answer.
        self._owing: dict[Connection, None] = {}
        self._count_of: Counter[str] = Counter()
        self._closing: set[Connection] = set()
        self._sweeping = False

    @property
    def busy_closing(self) -> bool:
        """Return whether so many connections are closing that no new ones are accepted."""
        return len(self._closing) >= CLOSING

    def admit(self, plain: socket.socket, host: str) -> socket.socket | None:
        """Count an accepted socket, and evict another connection if needed.

        Return the counted socket. If no connection can be evicted, and there are already `SPARE` connections
        above the total limit, close the socket and return None.
        """
        key = address_key(host)
        refusal = longest = None
        # Check the limit of the address first, so that an address with too many connections evicts only its
        # own.
        if self._count_of[key] >= self._most_of_one and not self._is_proxy(host):
            refusal, longest = ProblemType.TOO_MANY_REQUESTS, self._longest(key)
        elif len(self._open) >= self._most:
            refusal, longest = ProblemType.UNAVAILABLE, self._longest()
        if refusal is not None:
            if longest is not None:
                self.end(longest, refusal)
                refusal = None
            elif len(self._open) >= self._most + SPARE:
                plain.close()
                return None
        # Move the descriptor to a socket that reports when it is closed.
        counted = _Counted(plain.family, plain.type, plain.proto, fileno=plain.detach())
        connection = Connection(key=key, socket=weakref.ref(counted), refusal=refusal)
        counted.finalizer = weakref.finalize(counted, self._forget, counted.fileno(), connection)
        self._open[counted.fileno()] = connection
        self._count_of[key] += 1
        self.wait(connection)
        return counted

    def attach(self, descriptor: int, protocol: "LimitedProtocol") -> Connection | None:
        """Return the connection of a descriptor, and bind it to its HTTP protocol."""
        connection = self._open.get(descriptor)
        if connection is not None:
            connection.protocol = protocol
        return connection

    def wait(self, connection: Connection) -> None:
        """Note that the service waits for a head on this connection.

        If the service waits already, the wait keeps its start.
        """
        if connection in self._waiting:
            return
        self._owing.pop(connection, None)
        connection.since = time.monotonic()
        self._waiting[connection] = None
        if not self._sweeping:
            self._sweeping = True
            asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def owe(self, connection: Connection) -> None:
        """Note that the client must send a body or read its answer."""
        self._waiting.pop(connection, None)
        self._owing[connection] = None

    def answer(self, connection: Connection) -> None:
        """Note that the request is complete, so that the connection is not stalled."""
        self._waiting.pop(connection, None)
        self._owing.pop(connection, None)

    def end(self, connection: Connection, problem: ProblemType) -> None:
        """Close a stalled connection. Send the problem if a request has begun and no answer has."""
        self.answer(connection)
        self._closing.add(connection)
        if connection.protocol is not None:
            detail = _CROWDED.get(problem, _TOO_SLOW)
            connection.protocol.refuse(problem, detail)
        elif (handshaking := connection.socket()) is not None:
            with suppress(OSError):
                handshaking.shutdown(socket.SHUT_RDWR)  # the event loop owns the socket and closes it

    def _sweep(self) -> None:
        # Connections are ordered by the start of their wait. All after the first recent one are recent, too.
        late = time.monotonic() - self.header_s
        for connection in list(self._waiting):
            if connection.since > late:
                break
            self.end(connection, ProblemType.REQUEST_TIMEOUT)
        self._sweeping = bool(self._waiting)
        if self._sweeping:
            asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def _forget(self, descriptor: int, connection: Connection) -> None:
        self.answer(connection)
        self._closing.discard(connection)
        self._open.pop(descriptor, None)
        # Remove counts that reach zero. Otherwise each address that ever connected would stay in memory.
        self._count_of[connection.key] -= 1
        if self._count_of[connection.key] <= 0:
            del self._count_of[connection.key]

    def _longest(self, key: str | None = None) -> Connection | None:
        """Return the stalled connection to evict, or None if no connection is stalled.

        Args:
            key: the address whose connections are considered. None: the address with the most stalled ones.
        """
        if key is None:
            keys = Counter(connection.key for crowd in (self._waiting, self._owing) for connection in crowd)
            key = max(keys, key=keys.__getitem__, default=None)
        crowds = (connection for crowd in (self._waiting, self._owing) for connection in crowd)
        return next((connection for connection in crowds if connection.key == key), None)

    def _is_proxy(self, host: str) -> bool:
        if not self._proxies:
            return False
        address = ipaddress.ip_address(plain_address(host))
        return any(address in network for network in self._proxies)


class Listener(socket.socket):
    """A listening socket whose accepted sockets are counted."""

    connections: Connections

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept as the base class does. Raise BlockingIOError while too many connections are closing."""
        for _ in range(CLOSING):
            if self.connections.busy_closing:
                break
            plain, address = super().accept()
            admitted = self.connections.admit(plain, address[0])
            if admitted is not None:
                return admitted, address
        raise BlockingIOError


class _Counted(socket.socket):
    """An accepted socket that reports the close of its descriptor."""

    finalizer: "weakref.finalize[..., Any]"

    def close(self) -> None:
        self.finalizer()
        super().close()


class LimitedProtocol(H11Protocol):
    """uvicorn's protocol with deadlines. `limits` is set by `protocol_of`."""

    limits: ClassVar[Connections]
    _connection: Connection | None = None
    _body_bytes = 0
    _body_s = 0.0
    _refused = False
    _timing: asyncio.TimerHandle | None = None
    _stalling: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # An IPv4 client of a dual-stack socket has an address like ::ffff:192.0.2.1.
        if self.client is not None:
            self.client = (plain_address(self.client[0]), self.client[1])
        self._connection = self.limits.attach(transport.get_extra_info("socket").fileno(), self)
        if self._connection is None:
            transport.abort()
        elif self._connection.refusal is not None:
            # The head is read before the refusal. To close with unread bytes would reset the connection, and
            # the client would not see the reason.
            self.app = _refusing(self.app, self._connection.refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # the base class does not do this if the connection was reset
        for timer in (self._timing, self._stalling):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        if self._refused or self.transport.is_closing():
            return
        self._body_bytes += len(data)
        super().data_received(data)
        self._note_state()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note_state()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stalling is None:
            self._stalling = self.loop.call_later(STALL_S, self.transport.abort)
        self._note_state()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalling is not None:
            self._stalling.cancel()
            self._stalling = None
        self._note_state()

    def send_400_response(self, msg: str) -> None:
        self.refuse(ProblemType.BAD_REQUEST, msg)

    def refuse(self, problem: ProblemType, detail: str) -> None:
        """Close the connection. Send the problem first if a request has begun and no answer has."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        # The client of an idle connection has sent no request. An answer without a request would confuse it.
        begun = self.conn.their_state is not h11.IDLE or bool(self.conn.trailing_data[0])
        if begun and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            path = self.scope["path"] if self.conn.their_state is h11.SEND_BODY else "/"
            answer = problem_response(path, problem, detail, headers={"Connection": "close"})
            headers = [*self.server_state.default_headers, *answer.raw_headers]
            reason = HTTPStatus(answer.status_code).phrase.encode()
            for event in (
                h11.Response(status_code=answer.status_code, headers=headers, reason=reason),
                h11.Data(data=bytes(answer.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:
            # The application may wait for the body. Tell it that no more comes, as if the client had left.
            cycle.disconnected = True
            cycle.message_event.set()
        if self.conn.their_state is h11.SEND_BODY and self.transport.can_write_eof():
            # The body is still arriving. An immediate close would reset the connection and lose the answer.
            self.transport.write_eof()
        else:
            self.transport.close()
        self.loop.call_later(CLOSE_S, self.transport.abort)

    def _note_state(self) -> None:
        """Note what the service waits for: a head, a body, a client that reads its answer, or nothing."""
        if self._connection is None or self.transport.is_closing():
            return
        state = self.conn.their_state
        if state is h11.IDLE:
            self._body_bytes, self._body_s = 0, 0.0
        if state is h11.SEND_BODY or self._stalling is not None:
            self.limits.owe(self._connection)
        elif state is h11.IDLE:
            self.limits.wait(self._connection)
        else:
            self.limits.answer(self._connection)
        if state is h11.SEND_BODY and self._timing is None:
            self._timing = self.loop.call_later(SWEEP_S, self._time_body)

    def _time_body(self) -> None:
        self._timing = None
        if self.conn.their_state is not h11.SEND_BODY or self._refused or self.transport.is_closing():
            return
        # While the service does not read (back-pressure), the client cannot send, so this time is not
        # counted.
        if not self.flow.read_paused:
            self._body_s += SWEEP_S
        allowed_s = self.limits.body_s + self._body_bytes / UPLOAD_BYTES_PER_S
        # Each byte that arrives extends the deadline, up to `REQUEST_S` in all.
        if self._body_s > min(allowed_s, REQUEST_S):
            self.refuse(ProblemType.REQUEST_TIMEOUT, _TOO_SLOW)
            return
        self._timing = self.loop.call_later(SWEEP_S, self._time_body)


def protocol_of(connections: Connections) -> type[LimitedProtocol]:
    """Return a protocol class with these connections as its `limits`. uvicorn makes the instances itself."""

    class Bound(LimitedProtocol):
        pass

    Bound.limits = connections
    return Bound


def _refusing(app: ASGIApp, problem: ProblemType) -> ASGIApp:
    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        # Health checks pass, so that an orchestrator does not restart a service that is only busy.
        if scope["path"] in HEALTH_PATHS:
            await app(scope, receive, send)
            return
        answer = problem_response(scope["path"], problem, _CROWDED[problem], headers={"Connection": "close"})
        await answer(scope, receive, send)

    return refuse
