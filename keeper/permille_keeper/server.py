"""The keeper over HTTP: `POST /v1/sums` with a question answers its bytes; nothing else is served but health.

Who asks shows a token, before a byte of the body is read and before anything is kept of it. The standard
library's server is enough for one caller; `permille.bounded_server` says who keeps its connection.
"""

import hmac
import logging
import ssl
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Final

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from permille.bounded_server import BoundedServer, Places
from permille.digests import digest_of
from permille.errors import PackageError
from permille.federation.masked import MAX_REQUEST_BYTES
from permille_keeper.memory import Memory, SecondSetError
from permille_keeper.sums import answer

PATH: Final = "/v1/sums"
_DEADLINE_S = 60.0  # between two bytes

_log = logging.getLogger(__name__)


class KeeperServer(BoundedServer):
    """Answers questions with a key and a memory, on one address.

    Args:
        token: what callers show as `Authorization: Bearer ...`.
        tls: certificate and key, or None on loopback.
    """

    limits = Places(longest_s=300.0)

    def __init__(
        self,
        address: tuple[str, int],
        *,
        key: X25519PrivateKey,
        token: str,
        memory: Memory,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(address, _Handler, tls)
        self.key, self.token, self.memory = key, token, memory


class _Handler(BaseHTTPRequestHandler):
    server: KeeperServer
    timeout = _DEADLINE_S
    server_version, sys_version = "permille-keeper", ""

    def do_GET(self) -> None:
        """Say that the keeper is there."""
        self._send(HTTPStatus.OK if self.path == "/health" else HTTPStatus.NOT_FOUND, b"")

    def do_POST(self) -> None:
        """Answer a question."""
        if self.path != PATH:
            return self._send(HTTPStatus.NOT_FOUND, b"")
        shown = self.headers.get("authorization", "")
        if not hmac.compare_digest(shown.encode(), f"Bearer {self.server.token}".encode()):
            return self._send(HTTPStatus.UNAUTHORIZED, b"The token is not this keeper's")
        self.server.prove(self.client_address)
        length = self.headers.get("content-length", "")
        if not length.isascii() or not length.isdecimal() or len(length) > 9:
            return self._refuse(HTTPStatus.LENGTH_REQUIRED, "The request needs a Content-Length")
        if int(length) > MAX_REQUEST_BYTES:
            return self._refuse(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The request is larger than {MAX_REQUEST_BYTES} bytes"
            )
        data = self.rfile.read(int(length))
        try:
            found = answer(data, self.server.key, self.server.memory)
        except SecondSetError as exc:
            self.server.memory.note_second_set(digest_of(data), str(exc))
            return self._refuse(HTTPStatus.CONFLICT, str(exc))
        except PackageError as exc:
            return self._refuse(HTTPStatus.UNPROCESSABLE_ENTITY, str(exc))
        return self._send(HTTPStatus.OK, found)

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        _log.warning("refused with %d: %s", status, reason)
        if status is not HTTPStatus.CONFLICT:
            self.server.memory.note_refusal(reason)
        self.close_connection = True
        self._send(status, reason.encode())

    def _send(self, status: HTTPStatus, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.send_header("content-type", "application/octet-stream")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the parent's name
        """Keep the log to what was refused."""
