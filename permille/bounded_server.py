"""An HTTP server of the standard library that strangers cannot block.

A client is a stranger until its request proves its identity. A stranger is disconnected after ten seconds,
even if it sends a byte now and then. The number of connections is limited. At the limit, the server
disconnects the oldest stranger to admit a new connection. A client with too many connections loses one of its
own first, so one address cannot block the others.

The keeper, `permille-agent serve` and the metrics of the workers use this server.
"""

import socket
import ssl
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from permille.addresses import address_key

# The timeout of a single read. `Places.stranger_s` limits the time of all reads together.
_HANDSHAKE_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Limits on the connections that a server holds.

    Attributes:
        most: the largest number of connections.
        of_one: the largest number from one IPv4 address or IPv6 /64.
        stranger_s: the time until a stranger is disconnected.
        longest_s: the time until any client is disconnected, even one that has proved its identity. None
            sets no limit.
    """

    most: int = 32
    of_one: int = 8
    stranger_s: float = 10.0
    longest_s: float | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Place:
    """One connection.

    Attributes:
        key: the client, from `address_key`.
        socket: the connection's socket. The TLS handshake replaces it.
        proved: whether the client has proved its identity.
        timers: the timers that close the connection when its time is over.
    """

    key: str
    socket: socket.socket
    proved: bool = False
    timers: list[threading.Timer] = field(default_factory=list)

    def close(self) -> None:
        """End the connection. A thread that waits for input then reads the end of input."""
        with suppress(OSError):  # it may have ended already
            # Do not call `SSLSocket.shutdown`: it drops the TLS state, which another thread may still use.
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

    def close_stranger(self) -> None:
        """End the connection unless its client has proved its identity."""
        if not self.proved:
            self.close()


class Connections:
    """The open connections of a server, oldest first."""

    def __init__(self, places: Places) -> None:
        self._limits = places
        self._lock = threading.Lock()
        self._taken: list[Place] = []

    def admit(self, connection: socket.socket, host: str) -> Place | None:
        """Give a connection a place. At a limit, first disconnect the oldest stranger.

        Return None if this limit is reached and none of its connections is a stranger.
        """
        place = Place(key=address_key(host), socket=connection)
        with self._lock:
            of_one = [one for one in self._taken if one.key == place.key]
            # The client's own connections go first, so that it cannot push out others.
            for held, most in ((of_one, self._limits.of_one), (self._taken, self._limits.most)):
                if len(held) >= most:
                    stranger = next((one for one in held if not one.proved), None)
                    if stranger is None:
                        return None
                    stranger.close()
                    self._taken.remove(stranger)
            self._taken.append(place)
        ends = ((self._limits.stranger_s, place.close_stranger), (self._limits.longest_s, place.close))
        for seconds, end in ends:
            if seconds is not None:
                timer = threading.Timer(seconds, end)
                # A waiting timer must not delay the end of the program.
                timer.daemon = True
                timer.start()
                place.timers.append(timer)
        return place

    def leave(self, place: Place) -> None:
        """Free a place."""
        for timer in place.timers:
            timer.cancel()
        with self._lock:
            if place in self._taken:
                self._taken.remove(place)


class BoundedServer(ThreadingHTTPServer):
    """A threading server with a small number of connections.

    A subclass changes the limits by setting `limits`. The handler calls `prove` when it knows the client.

    Args:
        address: host and port.
        handler: the class that answers requests.
        tls: certificate and key, or None for a server on loopback.
    """

    daemon_threads = True
    request_queue_size = 64
    limits = Places()

    def __init__(
        self,
        address: tuple[str, int],
        handler: type[BaseHTTPRequestHandler],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(address, handler)
        self.tls = tls
        self._connections = Connections(self.limits)
        self.places: dict[Any, Place] = {}

    def prove(self, client_address: Any) -> None:
        """Note that the client of a connection has proved its identity."""
        self.places[client_address].proved = True

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in its own thread, or close it if no place is free."""
        place = self._connections.admit(request, client_address[0])
        if place is None:
            self.shutdown_request(request)
            return
        self.places[client_address] = place
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Perform the TLS handshake in the connection's thread, so that a slow client delays no other."""
        place = self.places[client_address]
        try:
            if self.tls is not None:
                request.settimeout(_HANDSHAKE_S)
                # The handshake waits until the place knows the new socket, so that a timer can close it.
                request = self.tls.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
                place.socket = request
                request.do_handshake()
            super().process_request_thread(request, client_address)
        except OSError:
            self.shutdown_request(request)
        finally:
            self._connections.leave(place)
            # If the client has reused its port for a new connection, keep the new place.
            if self.places.get(client_address) is place:
                del self.places[client_address]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log errors of this program. Ignore errors of connections, so that strangers cannot fill the log."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)
