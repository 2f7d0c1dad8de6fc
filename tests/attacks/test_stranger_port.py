"""Another user of the machine listens on the port of a service that has ended, and waits for its token."""

import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from permille.exits import CommandError, Exit
from permille_service.access.proof import PATH, prove
from permille_service.cli.client import Client
from permille_service.cli.proving import ProvenTransport
from tests.ports import free_port
from tests.running_service import permille, running_service

TOKEN = "pmo_" + "t" * 40
Answer = Callable[[bytes], bytes]


@contextmanager
def stranger(port: int, answer: Answer) -> Iterator[tuple[int, list[bytes]]]:
    """Listen on a port of loopback. Yield it, and the requests that came."""
    got: list[bytes] = []

    def serve() -> None:
        while True:
            try:
                opened, _ = listening.accept()
            except OSError:
                return
            with opened:
                opened.settimeout(10)
                try:
                    while request := opened.recv(65_536):
                        got.append(request)
                        opened.sendall(answer(request))
                except OSError:
                    continue

    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        while True:
            try:
                listening.bind(("127.0.0.1", port))
                break
            except OSError as error:  # What the killed service started may hold the port for a moment.
                if error.errno != errno.EADDRINUSE:
                    raise
                time.sleep(0.05)
        listening.listen()
        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        yield listening.getsockname()[1], got
        listening.shutdown(socket.SHUT_RDWR)
    serving.join()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def page(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


ANSWERS: dict[str, Answer] = {
    "empty": lambda _: page(b""),
    "no-proof": lambda _: page(b"0" * 64),
    "endless": lambda _: b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n" + b"0" * 100_000,
    "no-http": lambda _: b"hello\r\n\r\n",
    "not-found": lambda _: b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
    "redirect": lambda _: b"HTTP/1.1 307 Go\r\nLocation: /\r\nContent-Length: 0\r\n\r\n",
    "letters": lambda _: page("é".encode()),
}


@pytest.mark.attack(25, "a stranger takes the port of a killed service, and gets the administrator's token")
def test_the_token_does_not_go_to_a_stranger(tmp_path: Path) -> None:
    with running_service(tmp_path, "--no-worker", "--port", str(free_port())) as running:
        port = int(running.url.rpartition(":")[2])
        url_path = running.data_dir / "service.url"
        assert running.permille("tokens", "list").returncode == 0
        written = url_path.read_bytes()
        api = running.api_pid
        for pid in (running.process.pid, api):
            os.kill(pid, signal.SIGKILL)
        running.process.wait()
        while is_running(api):
            time.sleep(0.01)
        url_path.write_bytes(written)  # The API may have had time to remove it.
        for options in ((), ("--url", running.url)):
            with stranger(port, ANSWERS["no-proof"]) as (_, got):
                done = permille("--data-dir", str(running.data_dir), *options, "tokens", "list")
            assert done.returncode == Exit.ACCESS
            assert "is not the service of this data folder" in done.stderr
            assert got
            assert running.token.encode() not in b"".join(got)


@pytest.mark.attack(25, "answers of a stranger in place of a proof")
@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_that_is_no_proof_gets_no_token(name: str) -> None:
    with (
        stranger(0, ANSWERS[name]) as (port, got),
        Client(f"http://127.0.0.1:{port}", TOKEN, proven=True) as client,
        pytest.raises(CommandError, match="no token was sent"),
    ):
        client.get("/v1/tokens")
    assert TOKEN.encode() not in b"".join(got)


@pytest.mark.attack(25, "a stranger passes on the proof of the true service at another port")
def test_a_proof_of_another_port_is_none(tmp_path: Path) -> None:
    with running_service(tmp_path, "--no-worker", "--port", str(free_port())) as running:

        def passed_on(request: bytes) -> bytes:
            target = request.split()[1].decode()
            return page(httpx.get(running.url + target, trust_env=False).content)

        with (
            stranger(0, passed_on) as (port, got),
            Client(f"http://127.0.0.1:{port}", running.token, proven=True) as client,
            pytest.raises(CommandError, match="no token was sent"),
        ):
            client.get("/v1/tokens")
        assert running.token.encode() not in b"".join(got)


@pytest.mark.attack(25, "a stranger takes the port between two connections of one command")
def test_each_new_connection_is_proven() -> None:
    asked: list[str] = []

    def once(request: bytes) -> bytes:
        target = request.split()[1].decode()
        asked.append(target)
        if not target.startswith(PATH):
            return b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
        if len(asked) > 1:
            return page(b"0" * 64)
        return page(prove(TOKEN, target.partition("=")[2], ("127.0.0.1", places[0])).encode())

    places: list[int] = []
    with stranger(0, once) as (port, _):
        places.append(port)
        headers = {"Authorization": TOKEN}
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", transport=ProvenTransport(TOKEN), headers=headers
        ) as client:
            assert client.get("/v1/tokens").status_code == 200
            with pytest.raises(CommandError, match="no token was sent"):
                client.get("/v1/tokens")
    assert [target.startswith(PATH) for target in asked] == [True, False, True]
