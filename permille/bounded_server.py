"""Which connections a keeper holds: few, and those of strangers only until somebody else asks.

A connection is a stranger's until its token is proved. A stranger has ten seconds for its head, also where
each byte comes in time, and the oldest one makes room where all places are taken: of its address first, so
that one address holds no other up.
"""

import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from permille.addresses import address_key

_STRANGER_S: Final = 10.0
_LONGEST_S: Final = 300.0
_MOST: Final = 32
_MOST_OF_ONE: Final = 8


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
        """End it unless its token was proved."""
        if not self.proved:
            self.close()


class Connections:
    """The places of a keeper, oldest first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: list[Place] = []

    def admit(self, connection: socket.socket, host: str) -> Place | None:
        """Give a connection a place, for which a stranger goes where none is free; None: nobody can go."""
        place = Place(key=address_key(host), socket=connection)
        with self._lock:
            of_one = [one for one in self._places if one.key == place.key]
            for held, most in ((of_one, _MOST_OF_ONE), (self._places, _MOST)):
                if len(held) >= most:
                    stranger = next((one for one in held if not one.proved), None)
                    if stranger is None:
                        return None
                    stranger.close()
                    self._places.remove(stranger)
            self._places.append(place)
        for seconds, end in ((_STRANGER_S, place.close_stranger), (_LONGEST_S, place.close)):
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
            if place in self._places:
                self._places.remove(place)
