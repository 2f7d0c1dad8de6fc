"""A local server with the REST APIs of OpenAI and Ollama, for programs of the same user.

    access = read_or_make_access(home)
    server = LocalServer(("127.0.0.1", 8081), model, access)
    server.serve_forever()

Rules of the server:

- It binds loopback only.
- Every request except OPTIONS needs a token from a file that only the user can read.
- The `Host` header must be loopback, which stops DNS rebinding by pages in a browser.
- Pages in a browser may send requests only if their origin is loopback and was named when the server started.
- Bodies, waiting times, requests and connections are limited.
"""

import json
import secrets
import select
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from permille.bounded_server import BoundedServer, Places
from permille.errors import InputError, OperatorError, PermilleError
from permille.files import write_atomic
from permille_agent.local import ollama_schema, openai_schema
from permille_agent.local.model import LocalModel
from permille_agent.local.replies import Interface, NoEmbeddingsError, Reply
from permille_agent.state.home import Home

MAX_BODY_BYTES = 1 << 20
MAX_REQUESTS = 8  # at the same time, because all of them share the processor
MAX_CONNECTIONS = 64
SOCKET_TIMEOUT_S = 30.0  # a silent client must not hold a thread for longer
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
PREFLIGHT_S = 600  # how long a browser may reuse the answer to a preflight request


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The token that every request needs, and the origins whose pages may send requests.

    Raises:
        InputError: an origin is not loopback.
    """

    token: str
    token_file: Path
    origins: Sequence[str] = ()

    def __post_init__(self) -> None:
        for origin in self.origins:
            url = urlsplit(origin)
            # Browsers send an origin in exactly this form, without a path.
            own = f"{url.scheme}://{url.netloc}" == origin and url.scheme in ("http", "https")
            if not own or url.hostname not in ("127.0.0.1", "localhost", "::1"):
                raise InputError(
                    "Only web pages of this machine may send requests: name an origin like "
                    f"http://localhost:3000, not {origin!r:.100}."
                )


class LocalServer(BoundedServer):
    """The server. `serve_forever` runs it and `shutdown` stops it."""

    limits = Places(most=MAX_CONNECTIONS, of_one=MAX_CONNECTIONS)

    def __init__(self, address: tuple[str, int], model: LocalModel, access: Access) -> None:
        """Bind a loopback address.

        Raises:
            InputError: the address is not loopback.
            OperatorError: the port cannot be bound.
        """
        if address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise InputError(f"The server listens on loopback only, not on {address[0]}.")
        if address[0] == "::1":
            self.address_family = socket.AF_INET6
        try:
            super().__init__(address, _Handler)
        except OSError as exc:
            raise OperatorError(
                f"Cannot listen on {address[0]}:{address[1]}: {exc}. Choose another --port."
            ) from exc
        self.model = model
        self.access = access
        self.requests = threading.BoundedSemaphore(MAX_REQUESTS)

    @property
    def port(self) -> int:
        """The port that was bound."""
        return int(self.server_address[1])


def read_or_make_access(home: Home, origins: Sequence[str] = ()) -> Access:
    """Read the server's token, or create it in a file that only the user can read.

    Raises:
        InputError: an origin is not loopback.
        OperatorError: the file does not hold a token.
    """
    path = home.root / "serve.token"
    if not path.exists():
        write_atomic(path, secrets.token_urlsafe(32).encode() + b"\n", mode=0o600)
    token = path.read_bytes().strip()
    if not token.isascii() or not token.decode().isprintable() or not token:
        raise OperatorError(f"{path} holds no token. Delete the file.")
    return Access(token=token.decode(), token_file=path, origins=tuple(origins))


class _RequestError(Exception):
    """An error that ends the request with a status and a message."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keeps a connection open for further requests
    server_version = "permille-agent"
    sys_version = ""  # the header `Server` names no version of Python
    timeout = SOCKET_TIMEOUT_S
    server: LocalServer

    def do_GET(self) -> None:
        """Answer a GET request, such as the list of models."""
        self._answer(self._get)

    def do_POST(self) -> None:
        """Answer a POST request with generated text."""
        self._answer(self._post)

    def do_OPTIONS(self) -> None:
        """Answer a browser's CORS preflight request, which carries no token."""
        self._answer(self._preflight)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is http.server's
        """Log nothing, since a request line may hold private data."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer in JSON if `http.server` itself refuses a request, such as one with an unknown method."""
        status = HTTPStatus(code)
        self._send_error(status, message or explain or status.phrase)

    def end_headers(self) -> None:
        """Add the CORS header that lets pages of allowed origins read the answer."""
        if self._origin_allowed():
            self.send_header("Access-Control-Allow-Origin", self.headers["Origin"])
            self.send_header("Vary", "Origin")
        super().end_headers()

    @property
    def _interface(self) -> Interface:
        """The module that answers this request: OpenAI's or Ollama's API."""
        path = getattr(self, "path", "")  # "" if the request could not be parsed
        return ollama_schema if path.startswith("/api/") else openai_schema

    def _answer(self, work: Callable[[], None]) -> None:
        try:
            self._check_host()
            if self.command != "OPTIONS":
                self._check_token()
            if not self.server.requests.acquire(blocking=False):
                raise _RequestError(
                    HTTPStatus.SERVICE_UNAVAILABLE,
                    f"The server is busy with {MAX_REQUESTS} requests. Try again.",
                )
            try:
                work()
            finally:
                self.server.requests.release()
        except _RequestError as exc:
            self._send_error(exc.status, str(exc))
        except NoEmbeddingsError as exc:
            self._send_error(HTTPStatus.NOT_IMPLEMENTED, str(exc))
        except InputError as exc:
            self._send_error(HTTPStatus.BAD_REQUEST, str(exc))
        except PermilleError as exc:
            self._send_error(HTTPStatus.INTERNAL_SERVER_ERROR, str(exc))
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            self.close_connection = True

    def _check_host(self) -> None:
        # A page that reaches this server by DNS rebinding sends the name of its own host.
        host = (self.headers.get("Host") or "").lower()
        name, _, port = host.rpartition(":")
        # Clients leave out the default port.
        allowed = {*LOOPBACK_NAMES} if self.server.port == 80 else set()
        if host not in allowed and (name not in LOOPBACK_NAMES or port != str(self.server.port)):
            raise _RequestError(
                HTTPStatus.MISDIRECTED_REQUEST,
                f"The Host must be 127.0.0.1:{self.server.port}, got {host!r}.",
            )

    def _check_token(self) -> None:
        access = self.server.access
        scheme, _, token = (self.headers.get("Authorization") or "").partition(" ")
        # Compare bytes, since compare_digest refuses strings with characters beyond ASCII.
        right = secrets.compare_digest(token.strip().encode(), access.token.encode())
        if scheme.lower() != "bearer" or not right:
            raise _RequestError(
                HTTPStatus.UNAUTHORIZED,
                "The token is missing or wrong. Give your program the token in "
                f"{access.token_file} as its API key. Programs send it as `Authorization: Bearer <token>`.",
            )
        # A connection that has sent the right token is never closed to admit new ones.
        self.server.prove(self.client_address)

    def _origin_allowed(self) -> bool:
        headers = getattr(self, "headers", None)  # None if the request could not be parsed
        return headers is not None and headers.get("Origin") in self.server.access.origins

    def _preflight(self) -> None:
        if not self._origin_allowed():
            raise _RequestError(
                HTTPStatus.FORBIDDEN,
                f"Pages of {self.headers.get('Origin')!r:.100} may not send requests. Start "
                "`permille-agent serve` with `--allow-origin` and their origin.",
            )
        self.send_response(HTTPStatus.NO_CONTENT)
        self.send_header("Access-Control-Allow-Methods", "GET, POST")
        # In CORS, the wildcard does not cover Authorization.
        self.send_header("Access-Control-Allow-Headers", "Authorization, *")
        self.send_header("Access-Control-Max-Age", str(PREFLIGHT_S))
        self.end_headers()

    def _asked(self) -> str:
        try:
            return urlsplit(self.path).path
        except ValueError as exc:
            raise _RequestError(HTTPStatus.BAD_REQUEST, f"{self.path!r:.100} is not a valid path.") from exc

    def _get(self) -> None:
        self._send(self._interface.get(self.server.model, self._asked()))

    def _post(self) -> None:
        body = self._body()
        self._send(self._interface.post(self.server.model, self._asked(), body))

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length") or ""
        if not length.isascii() or not length.isdigit() or "Transfer-Encoding" in self.headers:
            raise _RequestError(HTTPStatus.LENGTH_REQUIRED, "The request needs a Content-Length.")
        # The number of digits is checked first, because `int` raises ValueError for more than 4,300.
        if len(length) > 10 or int(length) > MAX_BODY_BYTES:
            raise _RequestError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The body is larger than {MAX_BODY_BYTES} bytes."
            )
        return self.rfile.read(int(length))

    def _send(self, found: Reply | Mapping[str, Any] | None) -> None:
        match found:
            case None:
                raise _RequestError(
                    HTTPStatus.NOT_FOUND,
                    f"There is no {self.command} {self.path:.100}. The server has /v1/models, "
                    "/v1/completions, /v1/chat/completions, /api/chat, /api/generate, /api/tags, /api/show, "
                    "/api/ps and /api/version.",
                )
            case Reply(form, generated, pieces, stream=False):
                text = "".join(self._while_connected(pieces))
                self._send_json(HTTPStatus.OK, form.whole(text, generated))
            case Reply():
                self._send_stream(found)
            case _:
                self._send_json(HTTPStatus.OK, found)

    def _while_connected(self, pieces: Iterable[str]) -> Iterator[str]:
        """Stop generating when the client has hung up, because other requests wait for the model.

        As in nginx and uvicorn, a client that has closed its sending half counts as gone.
        """
        for piece in pieces:
            readable, _, _ = select.select([self.connection], [], [], 0)
            if readable and not self.connection.recv(1, socket.MSG_PEEK):
                raise ConnectionResetError
            yield piece

    def _send_stream(self, reply: Reply) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", reply.form.media_type)
        self.send_header("Cache-Control", "no-store")
        # The stream has no length, so it ends when the connection closes.
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        try:
            for document in reply.form.documents(reply.pieces, reply.generated):
                self._send_part(reply.form.encode(document))
            self._send_part(reply.form.end())
        except PermilleError as exc:
            # The status was already sent, so the error is one more document of the stream.
            error = self._interface.error(HTTPStatus.INTERNAL_SERVER_ERROR, str(exc))
            self._send_part(reply.form.encode(error))

    def _send_part(self, data: bytes) -> None:
        self.wfile.write(data)
        self.wfile.flush()

    def _send_json(self, status: HTTPStatus, value: Mapping[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _send_error(self, status: HTTPStatus, message: str) -> None:
        # The body may be unread, so the connection cannot be reused.
        self.close_connection = True
        self._send_json(status, self._interface.error(status, message))
