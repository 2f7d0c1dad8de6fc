"""Up to a thousand idle or slow connections do not stop the small servers from answering others."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from permille_workers.runtime.metrics import serve_metrics
from permille_workers.runtime.settings import WorkerSettings
from tests.ports import free_port
from tests.unit.edge_agent.runs import home_with_package

BEGUN = (
    b"",
    b"GET /v1/models HTTP/1.1\r\nx: ",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: 9\r\n\r\n",
)


@contextmanager
def idle(port: int, count: int) -> Iterator[None]:
    """Hold `count` connections. Each has sent nothing or the beginning of a request."""
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


@pytest.mark.attack(5, "a thousand idle connections to `permille-agent serve`")
def test_a_thousand_idle_connections_do_not_occupy_the_local_server(tmp_path: Path) -> None:
    home, _ = home_with_package(tmp_path / "home")
    port = free_port()
    command = (sys.executable, "-P", "-m", "permille_agent", "--home", str(home.root), "serve", "--json")
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port)], stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        assert process.stdout is not None
        lines = takewhile(lambda line: line.rstrip() != "}", process.stdout)
        told = json.loads("".join(lines) + "}")
        token = {"Authorization": f"Bearer {Path(told['token_file']).read_text().strip()}"}
        threads, files = _held(process.pid)
        with idle(port, 1000):
            for _ in range(3):
                assert ask(port, "/v1/models", **token)[0] == 200
            more_threads, more_files = _held(process.pid)
        assert more_threads - threads < 200, "each has a thread and a timer"
        assert more_files - files < 100
    finally:
        process.terminate()
        process.communicate(timeout=60)


def _held(pid: int) -> tuple[int, int]:
    """Return the numbers of threads and of open files of a process."""
    folder = Path(f"/proc/{pid}")
    return len(list((folder / "task").iterdir())), len(list((folder / "fd").iterdir()))


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
