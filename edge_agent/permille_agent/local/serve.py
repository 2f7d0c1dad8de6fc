"""A local server with the REST interface of OpenAI: models, completions, chat completions, streams as SSE.

It is for programs of the same user on the same machine, and for nobody else: it binds loopback only, wants a
token that only the user can read, answers only requests whose `Host` is loopback (a page in a browser that
re-binds a name does not get through), sets no CORS headers, and bounds bodies, waiting and the number of
requests and connections at a time.
"""

import json
import secrets
import socket
import threading
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from permille.bounded_server import BoundedServer, Places
from permille.errors import InputError, OperatorError, PermilleError
from permille.files import write_atomic
from permille_agent.local.model import Generated, LocalModel, Variant
from permille_agent.local.openai_schema import ChatForm, ChatRequest, CompletionForm, CompletionRequest, Form
from permille_agent.state.home import Home

MAX_BODY_BYTES = 1 << 20
MAX_REQUESTS = 8
MAX_CONNECTIONS = 64
SOCKET_TIMEOUT_S = 30.0
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")


class LocalServer(BoundedServer):
    """The server; `serve_forever` runs it, `shutdown` ends it."""

    limits = Places(most=MAX_CONNECTIONS, of_one=MAX_CONNECTIONS)

    def __init__(self, address: tuple[str, int], model: LocalModel, token: str) -> None:
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
        self.token = token
        self.requests = threading.BoundedSemaphore(MAX_REQUESTS)

    @property
    def port(self) -> int:
        """The port that was bound."""
        return int(self.server_address[1])


def read_or_make_token(home: Home) -> tuple[Path, str]:
    """The server's token and the file that holds it, readable by the user only."""
    path = home.root / "serve.token"
    if not path.exists():
        write_atomic(path, secrets.token_urlsafe(32).encode() + b"\n", mode=0o600)
    token = path.read_bytes().strip()
    if not token.isascii() or not token.decode().isprintable() or not token:
        raise OperatorError(f"{path} holds no token. Delete the file.")
    return path, token.decode()


class _RequestError(Exception):
    """Ends a request with a status and a message."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "permille-agent"
    sys_version = ""
    timeout = SOCKET_TIMEOUT_S
    server: LocalServer

    def do_GET(self) -> None:
        """Models."""
        self._answer(self._get)

    def do_POST(self) -> None:
        """Completions."""
        self._answer(self._post)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is http.server's
        """Nothing: prompts are nobody's business."""

    def _answer(self, work: Any) -> None:
        try:
            self._check_access()
            if not self.server.requests.acquire(blocking=False):
                raise _RequestError(
                    HTTPStatus.SERVICE_UNAVAILABLE,
                    f"There are more than {MAX_REQUESTS} requests at a time. Try again.",
                )
            try:
                work()
            finally:
                self.server.requests.release()
        except _RequestError as exc:
            self._send_error(exc.status, str(exc))
        except InputError as exc:
            self._send_error(HTTPStatus.BAD_REQUEST, str(exc))
        except PermilleError as exc:
            self._send_error(HTTPStatus.INTERNAL_SERVER_ERROR, str(exc))
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            self.close_connection = True

    def _check_access(self) -> None:
        host = (self.headers.get("Host") or "").lower()
        name, _, port = host.rpartition(":")
        allowed = {*LOOPBACK_NAMES} if self.server.port == 80 else set()
        if host not in allowed and (name not in LOOPBACK_NAMES or port != str(self.server.port)):
            raise _RequestError(
                HTTPStatus.MISDIRECTED_REQUEST,
                f"The Host must be 127.0.0.1:{self.server.port}, got {host!r}.",
            )
        scheme, _, token = (self.headers.get("Authorization") or "").partition(" ")
        # Compared as bytes: compare_digest refuses text beyond ASCII.
        right = secrets.compare_digest(token.strip().encode(), self.server.token.encode())
        if scheme.lower() != "bearer" or not right:
            raise _RequestError(
                HTTPStatus.UNAUTHORIZED, "Send the token of `permille-agent serve` as bearer."
            )
        self.server.prove(self.client_address)

    def _get(self) -> None:
        if self.path != "/v1/models":
            raise _RequestError(HTTPStatus.NOT_FOUND, "There is no such path. GET knows /v1/models.")
        models = [
            {"id": variant.value, "object": "model", "created": 0, "owned_by": "permille"}
            for variant in self.server.model.variants
        ]
        self._send_json(HTTPStatus.OK, {"object": "list", "data": models})

    def _post(self) -> None:
        body = self._body()
        model = self.server.model
        try:
            if self.path == "/v1/completions":
                completion = CompletionRequest.model_validate_json(body)
                variant = self._variant(completion.model)
                generated, text = model.complete(completion.prompt, variant, completion.sampling())
                self._send_text(CompletionForm(variant), generated, text, stream=completion.stream)
            elif self.path == "/v1/chat/completions":
                chat = ChatRequest.model_validate_json(body)
                variant = self._variant(chat.model)
                messages = [(message.role, message.content) for message in chat.messages]
                generated, text = model.reply(messages, variant, chat.sampling())
                self._send_text(ChatForm(variant), generated, text, stream=chat.stream)
            else:
                raise _RequestError(
                    HTTPStatus.NOT_FOUND,
                    "There is no such path. POST knows /v1/completions and /v1/chat/completions.",
                )
        except ValidationError as exc:
            first = exc.errors(include_url=False, include_input=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            raise _RequestError(HTTPStatus.BAD_REQUEST, f"{place}: {first['msg']}") from exc

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length") or ""
        if not length.isascii() or not length.isdigit() or "Transfer-Encoding" in self.headers:
            raise _RequestError(HTTPStatus.LENGTH_REQUIRED, "The request needs a Content-Length.")
        if len(length) > 10 or int(length) > MAX_BODY_BYTES:
            raise _RequestError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The body is larger than {MAX_BODY_BYTES} bytes."
            )
        return self.rfile.read(int(length))

    def _variant(self, name: str | None) -> Variant:
        variants = self.server.model.variants
        if name is None:
            return variants[0]
        if name not in variants:
            known = ", ".join(variants)
            raise _RequestError(
                HTTPStatus.NOT_FOUND, f"There is no model {name!r:.100}. Choose one of {known}."
            )
        return Variant(name)

    def _send_text(self, form: Form, generated: Generated, text: Iterator[str], *, stream: bool) -> None:
        if not stream:
            self._send_json(HTTPStatus.OK, form.whole("".join(text), generated))
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        for piece in text:
            self._send_event(form.piece(piece, None))
        self._send_event(form.piece("", generated.finish_reason))
        self.wfile.write(b"data: [DONE]\n\n")

    def _send_event(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.flush()

    def _send_json(self, status: HTTPStatus, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(data)

    def _send_error(self, status: HTTPStatus, message: str) -> None:
        # The body may be unread: the connection cannot be used again.
        self.close_connection = True
        kind = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
        error = {"message": message, "type": kind, "param": None, "code": status.phrase.lower()}
        self._send_json(status, {"error": error})
