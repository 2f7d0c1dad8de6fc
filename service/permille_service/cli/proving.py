"""HTTP transport that sends nothing to a server before the server has proved who it is.

It asks on each new connection, because another program may take the port between two connections of a long
command. See `permille_service.access.proof`.
"""

import hmac
import secrets
from collections.abc import Iterable

import h11
import httpcore
import httpx

from permille.exits import CommandError, Exit
from permille_service.access.proof import PATH, prove

_MAX_ANSWER_BYTES = 1 << 16


class ProvenTransport(httpx.HTTPTransport):
    """A transport whose connections have proved that they lead to the service of the token.

    httpx.Client(base_url="http://127.0.0.1:8321", transport=ProvenTransport(token))
    """

    def __init__(self, token: str) -> None:
        super().__init__()
        # httpx has no argument for the backend.
        self._pool = httpcore.ConnectionPool(network_backend=_Backend(token))


class _Backend(httpcore.SyncBackend):
    def __init__(self, token: str) -> None:
        super().__init__()
        self._token = token

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        """Connect, and check the proof. Raises CommandError."""
        stream = super().connect_tcp(host, port, timeout, local_address, socket_options)
        challenge = secrets.token_hex(32)
        try:
            answer = _ask(stream, f"{PATH}?challenge={challenge}", timeout)
            expected = prove(self._token, challenge, stream.get_extra_info("server_addr")[:2])
            if not hmac.compare_digest(answer, expected.encode()):
                raise CommandError(
                    f"The server on port {port} of {host} is not the service of this data folder, or the "
                    "folder's token was replaced, so no token was sent. Start the service with `permille "
                    "up`, or give the token yourself with --token.",
                    Exit.ACCESS,
                )
        except BaseException:
            stream.close()
            raise
        return stream


def _ask(stream: httpcore.NetworkStream, target: str, timeout: float | None) -> bytes:
    """Send a GET, and return the body of the answer. It is empty if there is no readable answer."""
    connection, body = h11.Connection(h11.CLIENT), b""
    request = h11.Request(method="GET", target=target, headers=[("Host", "127.0.0.1")])
    stream.write(connection.send(request) or b"", timeout)
    read = 0
    try:
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                data = stream.read(4096, timeout)
                read += len(data)
                connection.receive_data(data)
            elif isinstance(event, h11.Data):
                body += event.data
            if read > _MAX_ANSWER_BYTES or isinstance(event, h11.ConnectionClosed):
                return b""
    except h11.RemoteProtocolError:  # no HTTP, or the server has hung up
        return b""
    return body
