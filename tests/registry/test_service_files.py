"""The operator's client reads ranges of the service's files, which may lie in a bucket."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from permille.exits import CommandError
from permille_service.cli.client import Client

DATA = bytes(range(200))


class Served(ThreadingHTTPServer):
    """Answers each request with `status`, `headers` and `body`, and keeps its headers."""

    status, headers, body = 206, {}, DATA[10:20]  # type: ignore[var-annotated]

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[dict[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Served

    def do_GET(self) -> None:
        self.server.asked.append({name.lower(): value for name, value in self.headers.items()})
        self.send_response_only(self.server.status)
        for name, value in {"content-length": str(len(self.server.body)), **self.server.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(self.server.body)


@contextmanager
def serving() -> Iterator[Served]:
    with Served() as server:
        threading.Thread(target=lambda: server.serve_forever(poll_interval=0.02), daemon=True).start()
        yield server
        server.shutdown()


def test_a_range_is_read_from_the_service() -> None:
    with serving() as service, Client(service.url, "secret") as client:
        assert client.read("/file", begin=10, end=20) == DATA[10:20]
        assert service.asked[0]["range"] == "bytes=10-19"
        service.status, service.body = 200, DATA  # a proxy may ignore ranges
        assert client.read("/file", begin=10, end=20) == DATA[10:20]
        assert client.read("/file") == DATA


def test_a_bucket_gets_the_range_and_no_token() -> None:
    with serving() as service, serving() as bucket, Client(service.url, "secret") as client:
        service.status, service.headers = 307, {"location": f"{bucket.url}/signed"}
        assert client.read("/file", begin=10, end=20) == DATA[10:20]
        assert bucket.asked[0]["range"] == "bytes=10-19" and "authorization" not in bucket.asked[0]
        bucket.status = 403
        with pytest.raises(CommandError, match="/file cannot be read: status 403"):
            client.read("/file", begin=10, end=20)


def test_too_few_bytes_are_an_error() -> None:
    with serving() as service, Client(service.url, "secret") as client:
        with pytest.raises(CommandError, match="sent 10 of 11 bytes of /file"):
            client.read("/file", begin=10, end=21)
        service.status, service.headers = 307, {"location": "http://127.0.0.1:9/"}
        with pytest.raises(CommandError, match="bucket does not answer"):
            client.read("/file")
