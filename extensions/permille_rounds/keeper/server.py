"""HTTP server of the keeper: `POST /v1/sums` answers a question, and `GET /health` is a health check.

A question must come with the token, which is checked before the body is read. The service is the only caller,
so the HTTP server of the standard library is enough. `permille.bounded_server` limits its connections.
"""

import hmac
import logging
import ssl
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Final

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from permille.bounded_server import BoundedServer, Places
from permille.digests import digest_of
from permille.errors import PackageError
from permille_rounds.keeper.memory import Memory, SecondSetError
from permille_rounds.masked import (
    MAX_REQUEST_BYTES,
    Opening,
    UnopenedSealsError,
    decode_opening,
    encode_answer,
    encode_refusal,
    vector_size,
)
from permille_rounds.privacy.seals import mask_of, open_seed, seal_context
from permille_rounds.private_rounds import draw_round_noise

PATH: Final = "/v1/sums"
_DEADLINE_S = 60.0  # longest time between two bytes

_log = logging.getLogger(__name__)


class KeeperServer(BoundedServer):
    """Server that answers questions about sums.

    Args:
        address: the host and the port.
        key: the private key that opens the seals of devices.
        token: the token that callers send as `Authorization: Bearer ...`.
        memory: the store of earlier answers.
        tls: a context with the certificate and its key. None: no TLS, for loopback only.
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
        """Answer a health check."""
        self._send(HTTPStatus.OK if self.path == "/health" else HTTPStatus.NOT_FOUND, b"")

    def do_POST(self) -> None:
        """Answer a question."""
        if self.path != PATH:
            return self._send(HTTPStatus.NOT_FOUND, b"")
        shown = self.headers.get("authorization", "")
        if not hmac.compare_digest(shown.encode(), f"Bearer {self.server.token}".encode()):
            return self._send(HTTPStatus.UNAUTHORIZED, b"The token is not this keeper's")
        # The server ends the connections of strangers early. This client has shown the token, so it is none.
        self.server.prove(self.client_address)
        length = self.headers.get("content-length", "")
        if not length.isascii() or not length.isdecimal() or len(length) > 9:
            return self._refuse(
                HTTPStatus.LENGTH_REQUIRED, "The request needs a Content-Length of at most nine digits"
            )
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
        except UnopenedSealsError as exc:
            body = encode_refusal(data, exc.device_keys)
            return self._refuse(HTTPStatus.FAILED_DEPENDENCY, str(exc), body)
        except PackageError as exc:
            return self._refuse(HTTPStatus.UNPROCESSABLE_ENTITY, str(exc))
        return self._send(HTTPStatus.OK, found)

    def _refuse(self, status: HTTPStatus, reason: str, body: bytes | None = None) -> None:
        _log.warning("refused with %d: %s", status, reason)
        if status is not HTTPStatus.CONFLICT:
            self.server.memory.note_refusal(reason)
        self._send(status, reason.encode() if body is None else body)

    def _send(self, status: HTTPStatus, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.send_header("content-type", "application/octet-stream")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the parent's name
        """Log no requests here. `_refuse` logs its refusals, and the memory stores the answers.

        Requests with a wrong token or an unknown path are logged nowhere.
        """


def answer(data: bytes, key: X25519PrivateKey, memory: Memory) -> bytes:
    """Return the answer to a question. The answer is stored before it is returned.

    Each device has bound its seal to the definition of the federation. So a question with another definition,
    which could promise less privacy, cannot open the seal.

    Raises:
        PackageError: the question is malformed or forged, has too few devices, or names another keeper.
        UnopenedSealsError: seals of devices do not open. None of the set then counts as opened.
        SecondSetError: the seal of a device was opened for another set of devices in this round.
    """
    opening = decode_opening(data)
    privacy = opening.definition.privacy
    if privacy is None or privacy.keeper is None:
        raise PackageError("round-content", "The federation has no keeper")
    if privacy.keeper.public_bytes != key.public_key().public_bytes_raw():
        raise PackageError(
            "round-binding", f"The federation names another keeper, with the key {privacy.keeper.key}"
        )
    return memory.answer_once(opening, lambda: _sum(opening, key))


def _sum(opening: Opening, key: X25519PrivateKey) -> bytes:
    total_V = np.zeros(vector_size(opening.definition), dtype=np.uint32)
    digest, unopened = opening.definition.digest, []
    for device_key, seal, _ in opening.entries:
        try:
            seed = open_seed(seal, key, seal_context(digest, opening.round_number, device_key))
        except PackageError:
            unopened.append(device_key)
        else:
            total_V += mask_of(seed, len(total_V))
    # Name all of them at once, so that the service asks only once more.
    if unopened:
        raise UnopenedSealsError(unopened)
    noise_V = draw_round_noise(opening.definition)
    return encode_answer(opening, total_V - noise_V.astype(np.uint32))
