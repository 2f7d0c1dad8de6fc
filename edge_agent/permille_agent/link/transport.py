"""HTTP transport with a limit on the total time of each request.

The timeouts of httpx are those of a socket, and start again with each byte. So a server that sends one byte
now and then could hold a request forever. This transport wraps the sockets of httpcore's pool instead:

- A request has `GRACE_S` seconds for connection, headers and body.
- It gets one more second for each `LEAST_RATE` bytes that are sent, or are received as part of the response's
  body.
- Other bytes earn no time, because interim responses (1xx) and chunk extensions may be endless.
- A slower request fails like a timeout.
"""

import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import httpcore
import httpx

GRACE_S = 60.0  # for a slow connection, and for a service that computes its answer
LEAST_RATE = 4096
"""Smallest average rate of a request after `GRACE_S`, in bytes per second."""

Clock = Callable[[], float]


class _Allowance:
    """The remaining time of a request."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_s = clock() + GRACE_S

    def renew(self) -> None:
        """Start the time limit of a new request."""
        self._until_s = self._clock() + GRACE_S

    def moved(self, size_bytes: int) -> None:
        """Extend the time limit for bytes that were sent or received."""
        self._until_s += size_bytes / LEAST_RATE

    def within(self, timeout_s: float | None) -> float:
        """Return a socket's timeout, limited to the remaining time.

        Raises:
            httpcore.ReadTimeout: no time remains.
        """
        left_s = self._until_s - self._clock()
        if left_s <= 0:
            raise httpcore.ReadTimeout(f"slower than {LEAST_RATE} bytes a second")
        return left_s if timeout_s is None else min(left_s, timeout_s)


class _Stream(httpcore.NetworkStream):
    """A connection that limits each wait to the remaining time."""

    def __init__(self, stream: httpcore.NetworkStream, allowance: _Allowance) -> None:
        self._stream = stream
        self._allowance = allowance

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """See `httpcore.NetworkStream`."""
        return self._stream.read(max_bytes, self._allowance.within(timeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """See `httpcore.NetworkStream`. The buffer is written in pieces, and each piece earns time."""
        # A single large write would be one long wait, and would earn time only at its end.
        for start in range(0, len(buffer), 1 << 16):
            piece = buffer[start : start + (1 << 16)]
            self._stream.write(piece, self._allowance.within(timeout))
            self._allowance.moved(len(piece))

    def close(self) -> None:
        """See `httpcore.NetworkStream`."""
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        """See `httpcore.NetworkStream`."""
        within_s = self._allowance.within(timeout)
        return _Stream(self._stream.start_tls(ssl_context, server_hostname, within_s), self._allowance)

    def get_extra_info(self, info: str) -> Any:
        """See `httpcore.NetworkStream`."""
        return self._stream.get_extra_info(info)


class _Backend(httpcore.NetworkBackend):
    """Opens connections with limited waits."""

    def __init__(self, allowance: _Allowance) -> None:
        self._backend = httpcore.SyncBackend()
        self._allowance = allowance

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        """See `httpcore.NetworkBackend`."""
        within_s = self._allowance.within(timeout)
        stream = self._backend.connect_tcp(host, port, within_s, local_address, socket_options)
        return _Stream(stream, self._allowance)


class _Body(httpx.SyncByteStream):
    """The body of a response. Its bytes earn time."""

    def __init__(self, response: httpcore.Response, allowance: _Allowance) -> None:
        self._response = response
        self._allowance = allowance

    def __iter__(self) -> Iterator[bytes]:
        for data in self._response.iter_stream():
            self._allowance.moved(len(data))
            yield data

    def close(self) -> None:
        self._response.close()


class LimitedTransport(httpx.BaseTransport):
    """A transport that sends one request at a time, each with a time limit.

    It raises the errors of httpcore, not those of httpx.
    """

    def __init__(self, context: ssl.SSLContext, *, clock: Clock = time.monotonic) -> None:
        self._allowance = _Allowance(clock)  # shared, because only one request is sent at a time
        self._pool = httpcore.ConnectionPool(ssl_context=context, network_backend=_Backend(self._allowance))

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """See `httpx.BaseTransport`."""
        self._allowance.renew()
        url = request.url
        assert isinstance(request.stream, httpx.SyncByteStream)  # the client is synchronous
        response = self._pool.handle_request(
            httpcore.Request(
                method=request.method,
                url=httpcore.URL(
                    scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
                ),
                headers=request.headers.raw,
                content=request.stream,
                extensions=request.extensions,
            )
        )
        return httpx.Response(
            status_code=response.status,
            headers=response.headers,
            stream=_Body(response, self._allowance),
            extensions=response.extensions,
        )

    def close(self) -> None:
        """Close the sockets."""
        self._pool.close()
