"""HTTP client of the service: requests, retries and errors. `api.py` has the calls.

Rules:

- Only https is allowed, except for a service on this machine.
- Only the bearer token and `User-Agent: permille-agent/<version>` identify the device. Cookies are not kept.
- Proxies, `.netrc` and certificate variables of the environment are ignored.
- One redirect with status 307 is followed, without the token, and only for a download whose hash the caller
  checks.
- Bodies are read up to a limit and never decompressed.
- The total time of each request is limited (`transport.py`).
- After a failed connection, a timeout, or a status of `LATER_STATUSES`, a request is sent again with
  exponential backoff and full jitter, or after `Retry-After`. Other errors are raised at once. All calls are
  idempotent, so they may be sent again.
"""

import json
import random
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.cookiejar import DefaultCookiePolicy
from pathlib import Path
from typing import Any

import httpcore
import httpx

from permille.addresses import is_loopback
from permille.errors import InputError, OperatorError, RetryableError
from permille.plain_text import printable, reason
from permille.retry_after import stated_wait_s
from permille.version import __version__
from permille_agent.link.transport import LimitedTransport

JSON_LIMIT_BYTES = 1 << 20
TIMEOUT = httpx.Timeout(60.0, connect=10.0)
ATTEMPTS = 5
BACKOFF_FIRST_S = 0.5
WAIT_LIMIT_S = 60.0  # a command that would wait longer reports the error instead
_TRANSPORT_ERRORS = (
    httpx.TransportError,
    UnicodeError,  # raised by httpx for a malformed host name in a redirect
    httpcore.TimeoutException,
    httpcore.NetworkError,
    httpcore.ProtocolError,
)
LATER_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})

# A callable body is called before each attempt. It may raise, to stop the request.
Body = bytes | Mapping[str, Any] | Callable[[], bytes] | None


class ServiceUnavailableError(RetryableError):
    """The service cannot be reached, or asks to try again later."""


class RequestRefusedError(InputError):
    """The service understood the request and refuses it.

    Attributes:
        status: HTTP status.
        problem: last part of the problem's type URI, or "".
    """

    def __init__(self, message: str, *, status: int, problem: str) -> None:
        super().__init__(message)
        self.status = status
        self.problem = problem


class AccessRefusedError(OperatorError):
    """The service does not accept this device: revoked, unenrolled, or never enrolled.

    Attributes:
        challenge: the header `WWW-Authenticate`, which says what the server asks for, or "".
    """

    def __init__(self, message: str, *, challenge: str = "") -> None:
        super().__init__(message)
        self.challenge = challenge


def check_server(server: str) -> str:
    """Return the base URL of a server without a trailing slash.

    Example:
        >>> check_server("https://models.example.org/")
        'https://models.example.org'

    Raises:
        InputError: the URL is not http or https, has credentials or a query, or is http to another machine.
    """
    try:
        url = httpx.URL(server.strip())
        host = url.host
    except (httpx.InvalidURL, UnicodeError):
        host = ""
    if not host or url.scheme not in ("http", "https"):
        shown = server.rpartition("@")[2]
        raise InputError(f"{shown!r} is not an address. Write one like https://models.example.org.")
    if url.userinfo or url.query or url.fragment:
        raise InputError("The address of the service must have no user, password, query or fragment.")
    if url.scheme == "http" and not is_loopback(host):
        raise InputError(f"Use https for {host}. Only a service on this machine may use http.")
    return server.strip().rstrip("/")


class Connection:
    """Requests to one server. Close it, or use it as a context manager.

    For example:

        with Connection("https://models.example.org") as connection:
            federations = connection.call("GET", "/v1/device/federations")
    """

    def __init__(
        self,
        server: str,
        *,
        ca_file: Path | None = None,
        sleep: Callable[[float], None] = time.sleep,
        rng: random.Random | None = None,
        attempts: int = ATTEMPTS,
    ) -> None:
        self.server = check_server(server)
        self._sleep = sleep
        self._rng = rng or random.Random()  # noqa: S311 - spreads retries, protects no secret
        self._attempts = attempts
        self._http = httpx.Client(
            base_url=self.server,
            timeout=TIMEOUT,
            # The environment's proxy or certificate variables must not decide who reads the traffic.
            trust_env=False,
            # `stream` follows the one redirect that is allowed, without the token.
            follow_redirects=False,
            transport=LimitedTransport(_tls_context(ca_file)),
            # Compressed answers could grow beyond any limit while they are decoded.
            headers={"user-agent": f"permille-agent/{__version__}", "accept-encoding": "identity"},
        )
        # A cookie for a whole domain would identify this device at each host of a redirect.
        self._http.cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=()))

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the sockets."""
        self._http.close()

    def call(
        self,
        method: str,
        path: str,
        *,
        body: Body = None,
        headers: Mapping[str, str] | None = None,
        limit_bytes: int = JSON_LIMIT_BYTES,
    ) -> bytes:
        """Send a request with retries, and return the body of the response.

        Raises:
            ServiceUnavailableError: all attempts failed, or the service asks for a longer pause.
            AccessRefusedError: status 401 or 403.
            RequestRefusedError: any other refusal.
            OperatorError: the certificate is not trusted, the body is longer than `limit_bytes`, or the
                status is one that a person must resolve (3xx, 421, 507).
        """
        return self.retry(lambda: self._call_once(method, path, body, headers or {}, limit_bytes))

    def retry(self, attempt: Callable[[], bytes]) -> bytes:
        """Call `attempt` until it succeeds, or until `wait_before_retry` returns None."""
        number = 0
        while True:
            try:
                return attempt()
            except ServiceUnavailableError as exc:
                wait_s = self.wait_before_retry(number, exc)
                if wait_s is None:
                    raise
            self._sleep(wait_s)
            number += 1

    def wait_before_retry(self, number: int, error: ServiceUnavailableError) -> float | None:
        """Return the seconds to wait after attempt `number` (from 0), or None to give up."""
        if number + 1 >= self._attempts:
            return None
        if error.retry_after_s is not None:
            # The daemon polls again at that time. A command should not sleep that long.
            if error.retry_after_s > WAIT_LIMIT_S:
                return None
            return error.retry_after_s + self._rng.uniform(0.0, 1.0)
        return self._rng.uniform(0.0, min(WAIT_LIMIT_S, BACKOFF_FIRST_S * 2.0**number))

    def pause(self, seconds: float) -> None:
        """Sleep with the `sleep` function of this connection, which tests replace."""
        self._sleep(seconds)

    @contextmanager
    def stream(self, path: str, headers: Mapping[str, str]) -> Iterator[httpx.Response]:
        """Open a download, following one redirect. The caller retries, and checks the hash of the bytes.

        The response always has the ETag that the service sent, even if another host sends the body.

        Raises:
            As for `call`, also while the body is read.
        """
        with _network_errors(self.server), self._http.stream("GET", path, headers=dict(headers)) as response:
            if response.status_code != 307:
                if response.status_code not in (200, 206):
                    _refuse(response, _read_limited(response, JSON_LIMIT_BYTES, best_effort=True))
                yield response
                return
        url, etag = self._elsewhere(response), response.headers.get("etag", "")
        # The other host has other ETags, so the service's answer decides whether the range is still valid.
        kept = "range" in headers and headers.get("if-range", etag) == etag
        # No other header goes to the other host, and above all no token.
        sent = {"range": headers["range"]} if kept else {}
        with _network_errors(url.host), self._http.stream("GET", url, headers=sent) as moved:
            if moved.status_code not in (200, 206):
                got = f"{url.host}, to which the service redirected, answered {moved.status_code}"
                raise ServiceUnavailableError(got)
            moved.headers["etag"] = etag
            yield moved

    def read(self, path: str, headers: Mapping[str, str], *, limit_bytes: int) -> bytes:
        """Read a `stream` to its end, with retries. Raises the errors of `call`."""

        def once() -> bytes:
            with self.stream(path, headers) as response:
                return _read_limited(response, limit_bytes, best_effort=False)

        return self.retry(once)

    def _elsewhere(self, response: httpx.Response) -> httpx.URL:
        """Return the target of a redirect.

        Raises:
            OperatorError: the target is not https, or it is on this machine and the service is not.
        """
        try:
            url = httpx.URL(response.headers.get("location", ""))
        except httpx.InvalidURL as exc:
            raise OperatorError(f"The service redirected to a malformed address: {exc}") from exc
        safe = url.scheme == "https"
        # A remote service could otherwise make this device call programs on its own machine.
        if is_loopback(url.host):
            safe = url.scheme in ("http", "https") and is_loopback(self._http.base_url.host)
        if not safe or not url.host or url.userinfo:
            raise OperatorError(
                f"The service redirected to {url.scheme[:20]}://{url.host[:100]}. Only https to another "
                "machine is allowed, without a user name."
            )
        return url

    def _call_once(
        self, method: str, path: str, body: Body, headers: Mapping[str, str], limit_bytes: int
    ) -> bytes:
        content, sent = _encode(body, headers)
        request = self._http.build_request(method, path, content=content, headers=sent)
        with _network_errors(self.server):
            response = self._http.send(request, stream=True)
            try:
                data = _read_limited(response, limit_bytes, best_effort=response.status_code >= 300)
            finally:
                response.close()
        if response.status_code >= 300:
            _refuse(response, data)
        return data


def _encode(body: Body, headers: Mapping[str, str]) -> tuple[bytes | None, dict[str, str]]:
    if callable(body):
        body = body()
    if body is None or isinstance(body, bytes):
        return body, dict(headers)
    # JSON has no NaN. Python would write one, and the service would refuse it later.
    content = json.dumps(body, allow_nan=False).encode()
    return content, {"content-type": "application/json", **headers}


def _tls_context(ca_file: Path | None) -> ssl.SSLContext:
    if ca_file is None:
        return httpx.create_ssl_context(trust_env=False)
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as exc:
        raise InputError(f"{ca_file} holds no certificates (PEM): {exc}") from exc


@contextmanager
def _network_errors(server: str) -> Iterator[None]:
    try:
        yield
    except _TRANSPORT_ERRORS as exc:
        if _is_certificate_error(exc):
            message = f"This device does not trust the certificate of {server}: {exc}"
            raise OperatorError(f"{message}. Name a private authority with `enroll --ca-file`.") from exc
        if "WRONG_VERSION_NUMBER" in str(exc):
            raise OperatorError(f"{server} answers without TLS. Write its address with http://.") from exc
        raise ServiceUnavailableError(f"{server} does not answer: {reason(exc)}") from exc


def _is_certificate_error(error: BaseException | None) -> bool:
    # httpx wraps the errors of httpcore, which wraps those of ssl.
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _read_limited(response: httpx.Response, limit_bytes: int, *, best_effort: bool) -> bytes:
    data = bytearray()
    for chunk in response.iter_raw():
        data += chunk
        if len(data) > limit_bytes:
            # The beginning of an error's body is enough for a message.
            if best_effort:
                break
            raise OperatorError(f"The service sent more than {limit_bytes} bytes.")
    return bytes(data[:limit_bytes])


def _refuse(response: httpx.Response, data: bytes) -> None:
    status = response.status_code
    problem, detail = _read_problem(data)
    message = f"{response.request.method} {response.request.url.path}: {status} {detail}".rstrip()
    if status in LATER_STATUSES:
        raise ServiceUnavailableError(message, retry_after_s=stated_wait_s(response.headers))
    if status in (401, 403):
        raise AccessRefusedError(message, challenge=response.headers.get("www-authenticate", ""))
    if status in (421, 507) or status < 400:  # a wrong host name, a full disk, or an unexpected redirect
        raise OperatorError(message)
    raise RequestRefusedError(message, status=status, problem=problem)


def _read_problem(data: bytes) -> tuple[str, str]:
    try:
        document = json.loads(data)
        detail = str(document["detail"])[:500]
        return str(document["type"]).rsplit("/", 1)[-1], printable(detail)
    except (ValueError, TypeError, KeyError, RecursionError):
        return "", ""
