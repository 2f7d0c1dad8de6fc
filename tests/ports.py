"""Ports of loopback, for servers that cannot choose a port themselves."""

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """Return a port on which nothing listens.

    The port is below the range from which the system assigns ports, so that no other process gets it by
    chance.
    """
    draw = random.SystemRandom()
    while True:
        port = draw.randrange(20_000, 32_000)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
