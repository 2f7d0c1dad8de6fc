"""Proof that a server is the service of a data folder, before it gets the operator's token.

After a crash, the file `service.url` stays, and another user of the machine may listen on its port. So a
client that takes the token from the data folder sends a random challenge first, on each new connection. The
answer is an HMAC by that token, which only the service of the folder can compute. It covers the address of
the server's socket, so nobody can pass on the answer of the true service at another port.
"""

import hashlib
import hmac
from typing import Final

from permille.addresses import plain_address

PATH: Final = "/v1/proof"
CHALLENGE_PATTERN: Final = r"^[0-9a-f]{64}$"


def prove(token: str, challenge: str, server: tuple[str, int]) -> str:
    """Return the answer to a challenge.

    Args:
        token: the operator's token in the data folder.
        challenge: 32 random bytes in hexadecimal digits.
        server: the address and port of the server's socket.
    """
    host, port = server
    message = f"permille-proof-1\0{challenge}\0{plain_address(host)}\0{port}"
    return hmac.digest(token.encode(), message.encode(), hashlib.sha256).hex()
