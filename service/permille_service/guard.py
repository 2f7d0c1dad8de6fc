"""Middleware that every request goes through before its route.

It checks the Host header, limits the size of the body, and adds security headers for browsers. Without the
check of the Host header, a page of another site could reach a service on loopback through DNS rebinding. The
service sends no CORS headers, so pages of other origins cannot read its answers.
"""

import re
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from permille.addresses import plain_address
from permille.schemas.problems import ProblemType
from permille_service.problems import ApiError, problem_response
from permille_service.settings import Settings

MAX_BODY_BYTES: Final = 1024 * 1024
LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "[::1]")
SECURITY_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; base-uri 'none'",
}
DOCS_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
_HEADERS: Final = tuple((name.lower().encode(), value.encode()) for name, value in SECURITY_HEADERS.items())
_PRIVATE_HEADERS: Final = (*_HEADERS, (b"cache-control", b"no-store"))
_HSTS: Final = (b"strict-transport-security", b"max-age=63072000")
"""Header that the process sends if it has a certificate. A proxy that handles TLS sends its own header."""
_LOG_PATH = re.compile(r"/v1/runs/[^/]+/log", re.ASCII)


class Guard:
    """Pure ASGI middleware that refuses unknown hosts and large bodies, and adds the security headers."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._settings = settings
        self._hosts = frozenset((*LOOPBACK_NAMES, *map(_bracketed, (settings.host, *settings.allowed_hosts))))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an HTTP request on, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Answers of the API may hold secrets, so caches must not keep them. Other routes, such as pages and
        # scripts, decide themselves what caches may keep.
        wanted = _PRIVATE_HEADERS if scope["path"].startswith("/v1/") else _HEADERS
        if scope["scheme"] == "https" and self._settings.tls_certificate is not None:
            wanted = (*wanted, _HSTS)
        guarded_send = _with_security_headers(send, wanted)
        headers = Headers(scope=scope)
        limit = self._body_limit(scope)
        refusal = self._refusal(scope, headers, limit)
        if refusal is not None:
            await refusal(scope, receive, guarded_send)
            return
        await self._app(scope, _limited(receive, limit), guarded_send)

    def _refusal(self, scope: Scope, headers: Headers, limit: int) -> ASGIApp | None:
        host, path = _host_name(headers.get("host", "")), scope["path"]
        # Prometheus and Kubernetes call a pod by its address. A page can bind its own name to an address, but
        # its requests then still have this name.
        own = scope["server"] and _bracketed(plain_address(scope["server"][0]))
        if host not in self._hosts and host != own:
            detail = "The service does not answer to this host name. Add it with `permille up --allow-host`."
            return problem_response(path, ProblemType.MISDIRECTED, detail)
        # If the header declares no length, `_limited` counts the bytes of the body while they arrive.
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > limit:
            return problem_response(
                path, ProblemType.TOO_LARGE, _too_large(limit), headers={"Connection": "close"}
            )
        return None

    def _body_limit(self, scope: Scope) -> int:
        # Only the logs and states that devices share are large. Blobs do not arrive over HTTP: workers write
        # them to the store.
        log = scope["method"] == "PUT" and _LOG_PATH.fullmatch(scope["path"])
        return self._settings.max_log_bytes if log else MAX_BODY_BYTES


def _limited(receive: Receive, limit: int) -> Receive:
    seen = 0

    async def limited() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > limit:
            # The rest of the body remains unread, so this connection cannot be used for another request.
            raise ApiError(ProblemType.TOO_LARGE, _too_large(limit), headers={"Connection": "close"})
        return message

    return limited


def _too_large(limit: int) -> str:
    return f"The body is larger than {limit} bytes."


def _host_name(host: str) -> str:
    """Return the name of a Host header without its port, in lower case.

    Example:
        >>> _host_name("Permille.example.org:8321")
        'permille.example.org'
        >>> _host_name("[::1]")
        '[::1]'
    """
    # Split at the last colon, because an IPv6 address contains colons itself.
    name, _, port = host.lower().rpartition(":")
    return name if name and port.isdecimal() else host.lower()


def _bracketed(host: str) -> str:
    """Return an address in the form of a Host header, with brackets around IPv6."""
    return f"[{host.strip('[]')}]".lower() if ":" in host else host.lower()


def _with_security_headers(send: Send, wanted: tuple[tuple[bytes, bytes], ...]) -> Send:
    async def guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            said = {name.lower() for name, _ in message["headers"]}
            # A response that sets `Cache-Control` itself (blobs, reports, trust metadata) keeps its value.
            message["headers"] = [*message["headers"], *(pair for pair in wanted if pair[0] not in said)]
        await send(message)

    return guarded
