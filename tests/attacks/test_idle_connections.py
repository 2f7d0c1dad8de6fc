"""Hundreds of connections that say nothing, or little, at the small servers: who asks is answered."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, cast

import pytest

from permille_agent.local.model import LocalModel
from permille_agent.local.serve import Access, LocalServer
from permille_workers.runtime.metrics import serve_metrics
from permille_workers.runtime.settings import WorkerSettings
from tests.ports import free_port

BEGUN = (
    b"",
    b"GET /v1/models HTTP/1.1\r\nx: ",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: 9\r\n\r\n",
)


@contextmanager
def idle(port: int, count: int) -> Iterator[None]:
    """So many connections that stay as they are."""
    opened = []
    try:
        for number in range(count):
            opened.append(socket.create_connection(("127.0.0.1", port), timeout=20))
            opened[-1].sendall(BEGUN[number % len(BEGUN)])
        yield
    finally:
        for one in opened:
            one.close()


def ask(port: int, path: str, **headers: str) -> tuple[int, bytes]:
    with closing(HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()


@pytest.mark.attack(5, "hundreds of idle connections to the device's local server")
def test_idle_connections_do_not_occupy_the_local_server() -> None:
    model = cast(LocalModel, Named())
    server = LocalServer(("127.0.0.1", 0), model, Access(token="token", token_file=Path("serve.token")))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    before = threading.active_count()
    with idle(server.port, 400):
        for _ in range(3):
            assert ask(server.port, "/v1/models", Authorization="Bearer token")[0] == 200
        assert threading.active_count() - before < 200, "each has a thread and a timer"
    server.shutdown()
    server.server_close()


@pytest.mark.attack(5, "idle connections to a worker's metrics port, and other paths of it")
def test_idle_connections_do_not_occupy_a_workers_numbers(tmp_path: Path) -> None:
    port = free_port()
    settings: dict[str, Any] = {"data_dir": tmp_path, "metrics_port": port}
    serve_metrics(WorkerSettings(**settings))
    with idle(port, 200):
        status, body = ask(port, "/metrics")
        assert status == 200
        assert b"permille_attempt_seconds" in body
    for path in ("/", "/metrics/../etc/passwd", "/debug"):
        assert ask(port, path) == (404, b"")


class Named:
    """What the local server asks of a model to list it."""

    variants = ()
