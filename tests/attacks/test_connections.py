"""Slow and many callers against a real API process: endless heads and bodies, streams, no free connection.

Health answers under each attack. Refused callers get an error document where possible.
"""

import os
import resource
import select
import socket
import ssl
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from permille.schemas.access import Role
from permille.schemas.problems import MEDIA_TYPE, TYPE_BASE
from permille.schemas.runs import LOG_MEDIA_TYPE
from permille.store import access, devices, runs
from permille.store.database import Database
from permille.store.jobs import queue
from permille.store.jobs.transitions import NewJob
from tests.running_service import Running, environment, running_service
from tests.unit.edge_agent.samples import metrics

FILES = "1024"
HALF_HEAD = b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "
HALF_BODY = (
    b"POST /v1/enrolments HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    b"Content-Length: 200\r\nExpect: 100-continue\r\n\r\n"
)
UNREAD = b"GET /static/swagger-ui-bundle.js HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 20
GENEROUS_S = 30.0
"""Limit in seconds of an answer of health on a busy machine.

Without the limits under test, the answer takes a minute or never comes.
"""


@pytest.fixture
def many_files() -> Iterator[None]:
    """Raise the limit of open files of this process, the attacker."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Run a service that waits three seconds for a head and for a body. It may open 1,024 files."""
    folder, short = tmp_path_factory.mktemp("impatient"), {"PERMILLE_HEADER_S": "3", "PERMILLE_BODY_S": "3"}
    with running_service(folder, "--no-worker", files=FILES, **short) as running:
        yield running


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Run a service that accepts few connections."""
    few = {"PERMILLE_MAX_CONNECTIONS": "24", "PERMILLE_MAX_CONNECTIONS_PER_ADDRESS": "8"}
    with running_service(tmp_path_factory.mktemp("small"), "--no-worker", **few) as running:
        yield running


@contextmanager
def sending(
    url: str, data: bytes, number: int, *, source: str = "127.0.0.1"
) -> Iterator[list[socket.socket]]:
    """Open `number` connections that each send `data` and then stop."""
    parts = urlsplit(url)
    sockets: list[socket.socket] = []
    try:
        for _ in range(number):
            opened = socket.create_connection(
                (parts.hostname or "", parts.port or 0), timeout=30.0, source_address=(source, 0)
            )
            sockets.append(opened)
            try:
                opened.sendall(data)
            except OSError:
                continue  # the server may have closed the connection already
        yield sockets
    finally:
        for opened in sockets:
            opened.close()


def answer_of(opened: socket.socket) -> bytes:
    """Return all that the server sends until it closes the connection."""
    opened.settimeout(60.0)
    answer = b""
    try:
        while part := opened.recv(65_536):
            answer += part
    except ConnectionError:
        return answer
    return answer


def health_s(url: str, **options: Any) -> float:
    """Ask for health over a new connection. Return the seconds that it took."""
    started = time.monotonic()
    answer = httpx.get(f"{url}/v1/health", timeout=60.0, trust_env=False, **options)
    assert answer.status_code == 200, answer.text
    return time.monotonic() - started


def ask_models(running: Running) -> httpx.Response:
    """Send a request without a token. If a connection is free, it is refused for the missing token."""
    return httpx.get(f"{running.url}/v1/models", timeout=60.0, trust_env=False)


def is_problem(answer: bytes, status: int, slug: str) -> bool:
    """Return True if the raw answer is this problem document."""
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = (f" {status} ".encode(), MEDIA_TYPE.encode())
    return all(line in head for line in lines) and f'"{TYPE_BASE}{slug}"'.encode() in body


@pytest.mark.attack(5, "1,100 half-sent heads where 1,024 files may be open")
def test_half_sent_heads_do_not_stop_the_api(impatient: Running, many_files: None) -> None:
    with sending(impatient.url, HALF_HEAD, 1100) as sockets:
        assert max(health_s(impatient.url) for _ in range(5)) < GENEROUS_S
        assert impatient.answer("models", "list") == []
        answers = [answer_of(opened) for opened in sockets]
    assert any(is_problem(answer, 408, "request-timeout") for answer in answers)
    assert any(is_problem(answer, 429, "too-many-requests") for answer in answers)
    assert health_s(impatient.url) < GENEROUS_S


@pytest.mark.attack(5, "1,100 TLS handshakes that never go on where 1,024 files may be open")
def test_half_done_handshakes_do_not_stop_the_api(tmp_path: Path, many_files: None) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = "openssl req -x509 -newkey ed25519 -nodes -days 1 -subj /CN=permille -addext subjectAltName=IP:"
    made = [*f"{command}127.0.0.1".split(), "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(made, check=True, capture_output=True)
    options = ("--no-worker", "--tls-certificate", str(certificate), "--tls-key", str(key))
    trusted = ssl.create_default_context(cafile=certificate)
    with running_service(tmp_path, *options, files=FILES, PERMILLE_HEADER_S="3") as running:
        with sending(running.url, b"\x16\x03\x01", 1100) as sockets:
            assert max(health_s(running.url, verify=trusted) for _ in range(5)) < GENEROUS_S
            assert all(answer_of(opened) == b"" for opened in sockets)
        assert health_s(running.url, verify=trusted) < GENEROUS_S


@pytest.mark.attack(5, "600 event streams by one viewer")
def test_event_streams_of_one_viewer_are_bounded(tmp_path: Path, many_files: None) -> None:
    with running_service(tmp_path, "--no-worker", PERMILLE_MAX_CONNECTIONS_PER_ADDRESS="1000") as running:
        with sending(running.url, _stream_of(running), 600) as sockets:
            firsts = [_first_answer(opened) for opened in sockets]
            assert sum(b" 200 OK" in first for first in firsts) == 10
            assert sum(is_problem(first, 429, "too-many-requests") for first in firsts) == 590
            assert max(health_s(running.url) for _ in range(5)) < GENEROUS_S
            assert len(running.answer("jobs", "list")) == 1
        assert health_s(running.url) < GENEROUS_S


@pytest.mark.attack(5, "as many busy connections as there may be, of one address and of all")
def test_a_full_house_says_so_and_health_answers(tmp_path: Path) -> None:
    few = {"PERMILLE_MAX_CONNECTIONS": "6", "PERMILLE_MAX_CONNECTIONS_PER_ADDRESS": "4"}
    with running_service(tmp_path, "--no-worker", **few) as running:
        with sending(running.url, _stream_of(running), 4) as busy:
            assert all(b" 200 OK" in opened.recv(65_536) for opened in busy)
            assert health_s(running.url) < GENEROUS_S
            refused = ask_models(running)
            assert (refused.status_code, refused.json()["type"]) == (429, f"{TYPE_BASE}too-many-requests")
            assert int(refused.headers["retry-after"]) > 0
        wait_until(lambda: ask_models(running).status_code == 401)
    few["PERMILLE_MAX_CONNECTIONS_PER_ADDRESS"] = "100"
    with (
        running_service(tmp_path, "--no-worker", **few) as running,
        sending(running.url, _stream_of(running), 6) as busy,
    ):
        assert all(b" 200 OK" in opened.recv(65_536) for opened in busy)
        assert health_s(running.url) < GENEROUS_S
        refused = ask_models(running)
        assert (refused.status_code, refused.json()["type"]) == (503, f"{TYPE_BASE}unavailable")


@pytest.mark.attack(
    5, "every place taken, of many addresses, by bodies half sent or answers that nobody reads"
)
@pytest.mark.parametrize("sent", [HALF_BODY, UNREAD], ids=["bodies", "answers"])
def test_places_of_those_who_keep_us_waiting_go_to_who_asks(small: Running, sent: bytes) -> None:
    idle = _sockets_of(small.api_pid)
    with ExitStack() as opened:
        attackers = []
        for last in (2, 3, 4):
            attackers += opened.enter_context(sending(small.url, sent, 8, source=f"127.0.0.{last}"))
        for each in attackers:
            each.recv(16)  # The head is read, so the connection is accepted.
        wait_until(lambda: _is_at_rest(small.api_pid))  # Wait until the sent bytes have filled the buffers.
        for number in range(3):
            assert small.answer("tokens", "create", f"ci{number}")["name"] == f"ci{number}"
        # Only a few attackers were closed to make room.
        assert sum(not _is_closed(each) for each in attackers) >= 20
    wait_until(lambda: _sockets_of(small.api_pid) <= idle)


IMPATIENT = """
from permille_service import connections
from permille_service.__main__ import main
connections.STALL_S = 2.0
raise SystemExit(main())
"""


@pytest.mark.attack(9, "asks for much and never reads it")
def test_an_answer_that_nobody_takes_ends(tmp_path: Path) -> None:
    settings = environment(PERMILLE_DATA_DIR=str(tmp_path), PERMILLE_PORT="0")
    url = tmp_path / "service.url"
    with subprocess.Popen([sys.executable, "-c", IMPATIENT], env=settings) as process:
        try:
            wait_until(lambda: url.exists() or process.poll() is not None)
            with sending(url.read_text().strip(), UNREAD, 4) as sockets:
                for opened in sockets:
                    opened.recv(16)  # The connection is accepted.
                # Bytes in the kernel's buffers may still arrive.
                wait_until(lambda: not _served(process.pid, sockets))
                # The requests ask for 33 MiB.
                assert all(len(answer_of(opened)) < 20 << 20 for opened in sockets)
        finally:
            process.terminate()


@pytest.mark.attack(9, "bodies of one byte now and then hold no thread, lock or transaction")
def test_slow_bodies_hold_nothing_and_end(impatient: Running) -> None:
    with sending(impatient.url, HALF_BODY, 100) as sockets:
        for opened in sockets:
            assert b" 100 " in opened.recv(65_536)
            opened.sendall(b"{")
        assert health_s(impatient.url) < GENEROUS_S
        assert impatient.answer("tokens", "create", "ci")["name"] == "ci"  # This is a write.
        answers = [answer_of(opened) for opened in sockets]
    assert all(is_problem(answer, 408, "request-timeout") for answer in answers)


@pytest.mark.attack(9, "a log of one byte a second leaves neither a file nor a place behind")
def test_a_slow_upload_ends_and_leaves_nothing(impatient: Running) -> None:
    token, run_id = device_and_run(impatient)
    head = f"PUT /v1/runs/{run_id}/log HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n"
    head += f"Content-Type: {LOG_MEDIA_TYPE}\r\nContent-Length: 1000000\r\nExpect: 100-continue\r\n\r\n"
    before = _files(impatient.data_dir)
    with sending(impatient.url, head.encode(), 3) as sockets:
        assert all(b" 100 " in opened.recv(65_536) for opened in sockets)
        _drip(sockets)
        assert all(is_problem(answer_of(opened), 408, "request-timeout") for opened in sockets)
    wait_until(lambda: _files(impatient.data_dir) == before)
    with impatient.client() as operator:
        assert operator.get(f"/v1/runs/{run_id}").json()["log"] is None


def test_connections_that_broke_off_are_forgotten(tmp_path: Path) -> None:
    few = {"PERMILLE_MAX_CONNECTIONS": "6", "PERMILLE_MAX_CONNECTIONS_PER_ADDRESS": "4"}
    with running_service(tmp_path, "--no-worker", **few) as running:
        for _ in range(20):
            with sending(running.url, HALF_BODY, 4), sending(running.url, HALF_HEAD, 2):
                pass
        assert ask_models(running).status_code == 401


def _sockets_of(pid: int) -> int:
    found = 0
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found += str(path.readlink()).startswith("socket:")
    return found


def _served(pid: int, callers: list[socket.socket]) -> int:
    """Count the connections of `callers` that the process still holds."""
    ports = {caller.getsockname()[1] for caller in callers}
    held = psutil.Process(pid).net_connections("tcp")
    return sum(bool(connection.raddr) and connection.raddr.port in ports for connection in held)


def _is_at_rest(pid: int) -> bool:
    """Return True if a process is waiting and has used no processor time for half a second."""

    def seen() -> tuple[str, ...]:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return state, *rest[10:12]

    before = seen()
    time.sleep(0.5)
    return before[0] == "S" and seen() == before


def _drip(sockets: list[socket.socket]) -> None:
    """Send a byte a second on each connection until the server has answered all."""
    waiting = list(sockets)
    while waiting:
        answered = select.select(waiting, [], [], 1.0)[0]
        waiting = [opened for opened in waiting if opened not in answered]
        for opened in waiting:
            opened.sendall(b"x")


def _files(folder: Path) -> set[Path]:
    # os.walk ignores a folder that vanishes while it is read. Path.rglob raises an error.
    found = (Path(place) / name for place, _, names in os.walk(folder) for name in names)
    return {path for path in found if not path.name.startswith("permille.db")}


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _first_answer(opened: socket.socket) -> bytes:
    """Return the head of an answer, and its body if it is a problem document."""
    answer = b""
    while b"\r\n\r\n" not in answer or (MEDIA_TYPE.encode() in answer and not answer.endswith(b"}")):
        answer += opened.recv(65_536)
    return answer


def _is_closed(opened: socket.socket) -> bool:
    """Return True if the server has closed the connection. Unread bytes do not matter."""
    poll = select.poll()
    poll.register(opened, select.POLLRDHUP | select.POLLHUP)
    return bool(poll.poll(0))


def _stream_of(running: Running) -> bytes:
    """Return a request for the events of a job. The stream ends with the job."""
    viewer, job_id = _viewer_and_job(running)
    asking = f"GET /v1/jobs/{job_id}/events/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    return f"{asking}Authorization: Bearer {viewer}\r\n\r\n".encode()


def _viewer_and_job(running: Running) -> tuple[str, str]:
    """Add a viewer and a queued job to the service's database. Return the viewer's token and the job's id."""
    database = Database(f"sqlite:///{running.data_dir}/permille.db")
    with database.write() as session:
        tenant = access.first_tenant(session)
        assert tenant is not None
        _, secret = access.create_token(session, tenant_id=tenant.id, name="eyes", role=Role.VIEWER)
        job = queue.submit(session, NewJob(tenant_id=tenant.id, kind="mask", payload={"method": "random"}))
    database.close()
    return secret, job.id


def device_and_run(running: Running) -> tuple[str, str]:
    """Add a device and its run to the service's database. Return the device's token and the run's id."""
    database = Database(f"sqlite:///{running.data_dir}/permille.db")
    run_id = str(uuid.uuid4())
    with database.write() as session:
        tenant = access.first_tenant(session)
        assert tenant is not None
        _, code = devices.invite(session, tenant_id=tenant.id, release="tiny", alias="stable")
        device = devices.enrol(
            session, code=code, public_key="A" * 43, name="d", agent_version="0.1.0"
        ).device
        secret, _ = devices.issue_token(session, device=device)
        reported = metrics(state_digest=None).model_dump(mode="json")
        runs.report(session, tenant_id=tenant.id, device_id=device.id, run_id=run_id, metrics=reported)
    database.close()
    return secret, run_id
