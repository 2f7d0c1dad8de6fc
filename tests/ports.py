"""Ports of loopback for servers that must be told theirs."""

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """A port that nothing listens on. It is below those that systems hand out by themselves, so that nobody
    gets it by chance before the server that it is for.
    """
    draw = random.SystemRandom()
    while True:
        port = draw.randrange(20_000, 32_000)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
