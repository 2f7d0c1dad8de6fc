"""Servers that answer a byte at a time or ask for a wait of decades do not block the agent."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest

from permille.errors import RetryableError
from permille.retry_after import LONGEST_S
from permille_agent.daemon.loop import LONGEST_PAUSE_S, POLL_LIMIT_S, Daemon, World
from permille_agent.daemon.state import DaemonState
from permille_agent.link import transport
from permille_agent.link.client import Connection, ServiceUnavailableError
from permille_agent.state.home import open_home, write_record
from permille_agent.state.policy import PowerAndLoad

GRACE_S = 2.0
HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n"
Answer = Callable[[socket.socket], None]


@contextmanager
def _serving(answer: Answer) -> Iterator[str]:
    """Run a real server that answers every connection with `answer`."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=one, args=(client,), daemon=True).start()

        def one(client: socket.socket) -> None:
            with client:
                try:
                    client.recv(65536)
                    answer(client)
                except OSError:
                    return  # the agent closed the connection

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


def _slow_head(client: socket.socket) -> None:
    for byte in HEAD * 100:
        client.sendall(bytes([byte]))
        time.sleep(0.2)


def _slow_body(client: socket.socket) -> None:
    client.sendall(HEAD)
    for _ in range(1000):
        client.sendall(b" ")
        time.sleep(0.2)


def _endless_interim(client: socket.socket) -> None:
    for _ in range(200):
        client.sendall(b"HTTP/1.1 103 Early Hints\r\nlink: " + b"x" * 8000 + b"\r\n\r\n")
        time.sleep(0.1)


def _swollen_chunks(client: socket.socket) -> None:
    client.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    for _ in range(200):
        client.sendall(b"1;" + b"x" * 8000 + b"\r\n \r\n")
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.attack(9, "an answer of which a byte comes now and then, or much that is none of its body")
@pytest.mark.parametrize("answer", [_slow_head, _slow_body, _endless_interim, _swollen_chunks])
def test_a_request_ends_however_slowly_its_answer_drops_in(
    answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "GRACE_S", GRACE_S, raising=False)
    with _serving(answer) as server, Connection(server, attempts=1) as connection:
        begin = time.monotonic()
        with pytest.raises(ServiceUnavailableError, match=r"slower than 4096 bytes a second|timed out"):
            connection.call("GET", "/v1/x")
        assert GRACE_S <= time.monotonic() - begin < 60


@pytest.mark.slow
@pytest.mark.attack(9, "a body of which little comes, to a stream")
def test_a_stream_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "GRACE_S", GRACE_S, raising=False)
    with (
        _serving(_slow_body) as server,
        Connection(server, attempts=1) as connection,
        pytest.raises(ServiceUnavailableError, match=r"slower|timed out"),
        connection.stream("/v1/x", {}) as answer,
    ):
        assert sum(map(len, answer.iter_raw())) < 1000


def test_a_request_that_moves_bytes_takes_the_time_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "GRACE_S", GRACE_S)

    def steady(client: socket.socket) -> None:
        client.sendall(HEAD)
        for _ in range(25):
            client.sendall(bytes(4000))
            time.sleep(0.1)  # In total, the body takes longer than the grace period.

    with _serving(steady) as server, Connection(server, attempts=1) as connection:
        assert len(connection.call("GET", "/v1/x")) == 100_000


FAR_S = 1_000_000_000


def _waits(text: str, date: str = "") -> list[str]:
    return [f"retry-after: {text}", *([f"date: {date}"] if date else [])]


def _http_date(seconds: float) -> str:
    return format_datetime(datetime.now(UTC) + timedelta(seconds=seconds), usegmt=True)


@pytest.mark.attack(9, "`Retry-After` of 33 years, and of no number at all")
@pytest.mark.parametrize(
    ("headers", "expected_s"),
    [
        (_waits(str(FAR_S)), LONGEST_S),
        (_waits("inf"), LONGEST_S),
        (_waits("1e400"), LONGEST_S),
        (_waits("nan"), 0.0),
        (_waits("-5"), 0.0),
        (_waits(_http_date(FAR_S)), LONGEST_S),
        (_waits("Mon, 01 Jan 99999999999999 00:00:00 GMT"), None),
        # The service and its date are decades off: the difference counts.
        (_waits(_http_date(FAR_S + 120), _http_date(FAR_S)), 120.0),
    ],
)
def test_a_service_asks_for_a_day_at_most(headers: list[str], expected_s: float | None) -> None:
    lines = "".join(f"{line}\r\n" for line in ["HTTP/1.1 503 Busy", "content-length: 0", *headers])

    def busy(client: socket.socket) -> None:
        client.sendall(f"{lines}\r\n".encode())

    with (
        _serving(busy) as server,
        Connection(server, attempts=1) as connection,
        pytest.raises(ServiceUnavailableError) as refused,
    ):
        connection.call("GET", "/v1/x")
    assert refused.value.retry_after_s == expected_s


@pytest.mark.attack(9, "`Retry-After` of 33 years, to the daemon")
def test_the_daemon_asks_again_within_hours(tmp_path: Path) -> None:
    error = ServiceUnavailableError("busy", retry_after_s=float(FAR_S))
    daemon = Daemon(open_home(tmp_path), threading.Event())
    assert daemon._pause_after(error) <= 1.25 * POLL_LIMIT_S


@pytest.mark.attack(9, "a training that failed under a clock nine years ahead")
def test_a_failure_under_a_wrong_clock_holds_back_for_a_day_at_most(tmp_path: Path) -> None:
    home, clock = open_home(tmp_path), [datetime(2036, 1, 1, tzinfo=UTC)]
    tried = []

    def train(*_: object) -> str:
        tried.append(clock[0])
        raise RetryableError("the disk was busy")

    machine = PowerAndLoad(on_ac=True, battery=None, load=0.0)
    world = World(train=train, now=lambda: clock[0], machine=lambda: machine)
    daemon = Daemon(home, threading.Event(), world)
    write_record(home.daemon, replace(DaemonState(), not_before=clock[0].timestamp() + LONGEST_PAUSE_S))
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr(daemon, "_wanted", lambda: "something")
        daemon.train_if_wanted()
        assert not tried
        clock[0] = datetime(2027, 1, 1, tzinfo=UTC)
        daemon.train_if_wanted()
    assert tried == [clock[0]]
