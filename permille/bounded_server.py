"""An HTTP server of the standard library that strangers cannot occupy.

A connection is a stranger's until its request has proved who asks. Strangers have ten seconds, also where
each byte comes in time, and the oldest one makes room where all places are taken: of its address first, so
that one address holds no other up. Keeper, `permille-agent serve` and the workers' numbers are served by it.
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

_HANDSHAKE_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Limits of the connections that a server holds: their number, and for how long.

    Attributes:
        of_one: of one IPv4 address or IPv6 /64.
        longest_s: a connection whose caller was proved; None: as long as it is used.
    """

    most: int = 32
    of_one: int = 8
    stranger_s: float = 10.0
    longest_s: float | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Place:
    """One connection.

    Attributes:
        socket: what it is read from; with TLS another than was accepted.
    """

    key: str
    socket: socket.socket
    proved: bool = False
    timers: list[threading.Timer] = field(default_factory=list)

    def close(self) -> None:
        """End the connection: whoever waits for it reads its end."""
        with suppress(OSError):  # it has ended by itself
            # Not the method of a TLS socket, which forgets its state under the thread that reads.
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

    def close_stranger(self) -> None:
        """End it unless its caller was proved."""
        if not self.proved:
            self.close()


class Connections:
    """The places that are taken, oldest first."""

    def __init__(self, places: Places) -> None:
        self._limits = places
        self._lock = threading.Lock()
        self._taken: list[Place] = []

    def admit(self, connection: socket.socket, host: str) -> Place | None:
        """Give a connection a place, for which a stranger goes where none is free; None: nobody can go."""
        place = Place(key=address_key(host), socket=connection)
        with self._lock:
            of_one = [one for one in self._taken if one.key == place.key]
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
    """A threading server of few connections.

    Args:
        tls: certificate and key, or None on loopback.
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
        """Note that a connection's caller has shown who it is, and is no stranger any more."""
        self.places[client_address].proved = True

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own, or close it where no place is free."""
        place = self._connections.admit(request, client_address[0])
        if place is None:
            self.shutdown_request(request)
            return
        self.places[client_address] = place
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Shake hands in the connection's thread, so that no caller holds the others up."""
        place = self.places[client_address]
        try:
            if self.tls is not None:
                request.settimeout(_HANDSHAKE_S)
                request = self.tls.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
                place.socket = request
                request.do_handshake()
            super().process_request_thread(request, client_address)
        except OSError:
            self.shutdown_request(request)
        finally:
            self._connections.leave(place)
            if self.places.get(client_address) is place:
                del self.places[client_address]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what failed here; connections that strangers leave would fill the log."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)
