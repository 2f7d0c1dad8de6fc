"""A local server with the REST APIs of OpenAI and Ollama, for programs of the same user.

    access = read_or_make_access(home)
    server = LocalServer(("127.0.0.1", 8081), model, access)
    server.serve_forever()

Rules of the server:

- It binds loopback only: 127.0.0.1, and the same port of ::1 if the machine has IPv6.
- Every request except OPTIONS needs a token from a file that only the user can read.
- The `Host` header must be loopback, which stops DNS rebinding by pages in a browser.
- Pages in a browser may send requests only if their origin is loopback and was named when the server started.
- Bodies, waiting times, requests and connections are limited.
- A connection stays open after an answer. An error closes it, and the answer says so.
"""

import errno
import json
import re
import secrets
import select
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from permille.bounded_server import BoundedServer, Places
from permille.errors import InputError, OperatorError, PackageError, PermilleError
from permille.files import write_atomic
from permille_agent.local import ollama_schema, openai_schema
from permille_agent.local.model import LocalModel
from permille_agent.local.replies import Interface, NoEmbeddingsError, Reply
from permille_agent.state.home import Home

MAX_BODY_BYTES = 1 << 20
MAX_DISCARDED_BYTES = 1 << 26
"""The largest part of a refused body that is read, so that its sender can read the refusal."""
MAX_REQUESTS = 8  # POST requests at the same time, because all of them share the processor
MAX_CONNECTIONS = 64
SOCKET_TIMEOUT_S = 30.0  # a silent client must not hold a thread for longer
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
_ORIGIN = re.compile(r"https?://(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?")
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
            # Browsers send an origin in exactly this form, without a path.
            if not _ORIGIN.fullmatch(origin):
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

    def with_ipv6(self) -> "LocalServer | None":
        """Serve the same port of ::1, too, in a thread. Some programs look for `localhost` there only.

        Returns:
            The second server, or None if the machine has no IPv6.

        Raises:
            OperatorError: another program has this port of ::1, and would get the requests and the token.
        """
        try:
            second = LocalServer(("::1", self.port), self.model, self.access)
        except OperatorError as exc:
            if isinstance(exc.__cause__, OSError) and exc.__cause__.errno == errno.EADDRINUSE:
                raise
            return None
        second.requests = self.requests
        threading.Thread(target=second.serve_forever, daemon=True).start()
        return second


def read_or_make_access(home: Home, origins: Sequence[str] = ()) -> Access:
    """Read the server's token, or create it in a file that only the user can read.

    Raises:
        InputError: an origin is not loopback.
        OperatorError: the file does not hold a token.
    """
    path = home.serve_token
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

    do_HEAD = do_GET  # `_send_text` leaves out the body

    def do_POST(self) -> None:
        """Answer a POST request with generated text."""
        self._answer(self._post)

    def do_DELETE(self) -> None:
        """Refuse a request that would change the installed models."""
        self._answer(lambda _: self._send(None))

    do_PATCH = do_PUT = do_DELETE

    def do_OPTIONS(self) -> None:
        """Answer a browser's CORS preflight request, which carries no token."""
        self._answer(self._preflight)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is http.server's
        """Log nothing, since a request line may hold private data."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer in JSON if `http.server` itself refuses a request, such as one with an unknown method."""
        status = HTTPStatus(code)
        self._send_error(status, message or explain or status.phrase)

    def send_response(self, code: int, message: str | None = None) -> None:
        """Say when the connection ends, because a client may send its next request at any time."""
        super().send_response(code, message)
        if self.close_connection:
            self.send_header("Connection", "close")
        else:
            self.send_header("Keep-Alive", f"timeout={SOCKET_TIMEOUT_S:.0f}")

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
        return ollama_schema if re.match("/+api/", path) else openai_schema

    def _answer(self, work: Callable[[bytes], None]) -> None:
        try:
            # Read the body first: closing a connection with unread bytes can destroy the answer on its way.
            body = self._body()
            self._check_host()
            if self.command != "OPTIONS":
                self._check_token()
            with self._place():
                self.server.model.keep_up()
                work(body)
        except _RequestError as exc:
            self._send_error(exc.status, str(exc))
        except NoEmbeddingsError as exc:
            self._send_error(HTTPStatus.NOT_IMPLEMENTED, str(exc))
        except InputError as exc:
            self._send_error(HTTPStatus.BAD_REQUEST, str(exc))
        except PermilleError as exc:
            # Many templates refuse some orders of turns. Then the request is at fault.
            refused = isinstance(exc, PackageError) and exc.code == "chat-template"
            status = HTTPStatus.BAD_REQUEST if refused else HTTPStatus.INTERNAL_SERVER_ERROR
            self._send_error(status, str(exc))
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            self.close_connection = True

    @contextmanager
    def _place(self) -> Iterator[None]:
        """Take a place for a POST request. Other requests, such as health checks, are quick."""
        if self.command != "POST":
            yield
            return
        if not self.server.requests.acquire(blocking=False):
            raise _RequestError(
                HTTPStatus.SERVICE_UNAVAILABLE, f"The server is busy with {MAX_REQUESTS} requests. Try again."
            )
        try:
            yield
        finally:
            self.server.requests.release()

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

    def _preflight(self, _body: bytes) -> None:
        if not self._origin_allowed():
            raise _RequestError(
                HTTPStatus.FORBIDDEN,
                f"Pages of the origin {self.headers.get('Origin', '')!r:.100} may not send requests. Start "
                "`permille-agent serve` with `--allow-origin` and their origin.",
            )
        self.send_response(HTTPStatus.NO_CONTENT)
        self.send_header("Access-Control-Allow-Methods", "GET, HEAD, POST")
        # In CORS, the wildcard does not cover Authorization.
        self.send_header("Access-Control-Allow-Headers", "Authorization, *")
        self.send_header("Access-Control-Max-Age", str(PREFLIGHT_S))
        self.end_headers()

    def _asked(self) -> str:
        try:
            # A base address that ends with a slash gives two of them.
            path = urlsplit(re.sub("^/+", "/", self.path)).path
        except ValueError as exc:
            raise _RequestError(HTTPStatus.BAD_REQUEST, f"{self.path!r:.100} is not a valid path.") from exc
        return unquote(path).rstrip("/")

    def _get(self, _body: bytes) -> None:
        if path := self._asked():
            self._send(self._interface.get(self.server.model, path))
        else:
            # Programs look for this text, to find out whether Ollama runs.
            self._send_text(HTTPStatus.OK, "text/plain; charset=utf-8", b"Ollama is running")

    def _post(self, body: bytes) -> None:
        if (coding := self.headers.get("Content-Encoding", "identity").lower()) != "identity":
            raise _RequestError(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                f"The body has the coding {coding!r:.40}. Send it without Content-Encoding.",
            )
        self._send(self._interface.post(self.server.model, self._asked(), body))

    def _body(self) -> bytes:
        """Read the body, which has a length or comes in chunks (RFC 9112, section 7.1)."""
        coding = self.headers.get("Transfer-Encoding")
        length = self.headers.get("Content-Length") or "0"
        if coding is not None and coding.strip().lower() != "chunked":
            raise _RequestError(
                HTTPStatus.NOT_IMPLEMENTED, f"The transfer encoding {coding!r:.40} is unknown. Use chunked."
            )
        # The number of digits is limited, because `int` raises ValueError for more than 4,300.
        if not re.fullmatch("[0-9]{1,18}", length):
            raise _RequestError(HTTPStatus.BAD_REQUEST, f"The Content-Length {length!r:.40} is no number.")
        body, size = bytearray(), 0
        for piece in self._chunks() if coding is not None else self._pieces(int(length)):
            size += len(piece)
            if size <= MAX_BODY_BYTES:
                body += piece
            if size > MAX_DISCARDED_BYTES:
                break
        if size > MAX_BODY_BYTES:
            raise _RequestError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The body is larger than {MAX_BODY_BYTES} bytes."
            )
        return bytes(body)

    def _pieces(self, length: int) -> Iterator[bytes]:
        while length:
            piece = self.rfile.read(min(length, 1 << 16))
            if not piece:
                raise ConnectionResetError  # the client has left
            length -= len(piece)
            yield piece

    def _chunks(self) -> Iterator[bytes]:
        while True:
            size, *_ = self.rfile.readline(1 << 12).split(b";")
            if not re.fullmatch(b"[0-9a-fA-F]{1,8}", size.strip()):
                raise _RequestError(HTTPStatus.BAD_REQUEST, f"{size!r:.40} is not the size of a chunk.")
            if not int(size, 16):
                break
            yield from self._pieces(int(size, 16))
            self.rfile.readline(3)
        # Trailers may follow, up to an empty line.
        while self.rfile.readline(1 << 12).strip():
            continue

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
        # HTTP/1.0 has no chunks, so there the end of the connection ends the stream.
        self._chunked = self.request_version != "HTTP/1.0"
        self.send_header(*(("Transfer-Encoding", "chunked") if self._chunked else ("Connection", "close")))
        self.end_headers()
        try:
            for document in reply.form.documents(reply.pieces, reply.generated):
                self._send_part(reply.form.encode(document))
            self._send_part(reply.form.end())
        except PermilleError as exc:
            # The status was already sent, so the error is one more document of the stream.
            error = self._interface.error(HTTPStatus.INTERNAL_SERVER_ERROR, str(exc))
            self._send_part(reply.form.encode(error))
        if self._chunked:
            self.wfile.write(b"0\r\n\r\n")

    def _send_part(self, data: bytes) -> None:
        # An empty chunk would end the stream.
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked and data else data)
        self.wfile.flush()

    def _send_json(self, status: HTTPStatus, value: Mapping[str, Any]) -> None:
        self._send_text(status, "application/json", json.dumps(value).encode())

    def _send_text(self, status: HTTPStatus, media_type: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _send_error(self, status: HTTPStatus, message: str) -> None:
        # The request may be half read, so the connection cannot be reused.
        self.close_connection = True
        self._send_json(status, self._interface.error(status, message))
