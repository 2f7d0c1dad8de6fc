"""Tests of the connection: permitted servers, retries, errors for refusals, and what requests contain."""

import json
import random
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from permille.errors import InputError, OperatorError
from permille.version import __version__
from permille_agent.link.api import DeviceApi, Identity
from permille_agent.link.client import (
    AccessRefusedError,
    Connection,
    RequestRefusedError,
    ServiceUnavailableError,
    check_server,
)
from tests.device_service import DeviceService, Fault


@dataclass
class Waits:
    """A `sleep` that only records its arguments."""

    seconds: list[float] = field(default_factory=list)

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


@pytest.fixture
def waits() -> Waits:
    return Waits()


@pytest.fixture
def connection(service: DeviceService, waits: Waits) -> Iterator[Connection]:
    """Yield a connection to `service` that records its waits instead of sleeping."""
    with Connection(service.url, sleep=waits, rng=random.Random(0)) as opened:
        yield opened


def ask_nonce(connection: Connection, **options: Any) -> None:
    connection.call("POST", "/v1/device-tokens/nonces", body={"device_id": "d"}, **options)


@pytest.mark.parametrize(
    "server",
    [
        "https://models.example.org",
        "https://models.example.org:8443/permille/",
        "http://127.0.0.1:8000",
        "http://localhost:8000",
        "http://[::1]:8000",
        "http://127.8.9.1",
    ],
)
def test_https_and_loopback_are_servers(server: str) -> None:
    assert check_server(server) == server.rstrip("/")


@pytest.mark.parametrize(
    "server",
    [
        "http://models.example.org",
        "http://10.0.0.5:8000",
        "http://localhost.example.org",
        "http://127.0.0.1.example.org",
        "ftp://models.example.org",
        "https://user:secret@models.example.org",
        "https://models.example.org/?tenant=1",
        "models.example.org",
        "https://user:secret@[",
        "http://[::1]evil",
        "https://xn--99999999",
        "https://",
        "",
    ],
)
def test_other_servers_are_refused_without_repeating_secrets(server: str) -> None:
    with pytest.raises(InputError) as refused:
        check_server(server)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_what_may_succeed_later_is_tried_again(
    service: DeviceService, connection: Connection, waits: Waits, status: int
) -> None:
    service.faults = [Fault(path="nonces", status=status, times=2)]
    ask_nonce(connection)
    assert [answered for *_, answered in service.requests] == [status, status, 201]
    assert len(waits.seconds) == 2


def test_waits_grow_and_are_spread(service: DeviceService, waits: Waits) -> None:
    service.faults = [Fault(path="nonces", status=503, times=9)]
    with (
        Connection(service.url, sleep=waits, rng=random.Random(1), attempts=6) as connection,
        pytest.raises(ServiceUnavailableError),
    ):
        ask_nonce(connection)
    assert len(waits.seconds) == 5
    assert all(wait <= 0.5 * 2**number for number, wait in enumerate(waits.seconds))
    assert len(set(waits.seconds)) == 5


def test_retry_after_in_seconds_is_honoured(
    service: DeviceService, connection: Connection, waits: Waits
) -> None:
    service.faults = [Fault(path="nonces", status=429, headers={"retry-after": "7"})]
    ask_nonce(connection)
    assert len(waits.seconds) == 1
    assert 7.0 <= waits.seconds[0] <= 8.0


@pytest.mark.parametrize("as_date", [False, True])
def test_a_long_retry_after_is_handed_to_the_caller(
    service: DeviceService, connection: Connection, waits: Waits, *, as_date: bool
) -> None:
    when = format_datetime(datetime.now(UTC) + timedelta(hours=2), usegmt=True) if as_date else "7200"
    service.faults = [Fault(path="nonces", status=503, headers={"retry-after": when})]
    with pytest.raises(ServiceUnavailableError) as busy:
        ask_nonce(connection)
    assert busy.value.retry_after_s == 7200.0 or (as_date and 7000 < (busy.value.retry_after_s or 0) <= 7200)
    assert waits.seconds == []


def test_a_refusal_is_not_tried_again_and_names_its_problem(
    service: DeviceService, connection: Connection, waits: Waits
) -> None:
    with pytest.raises(RequestRefusedError, match="refused: not-found") as refused:
        connection.call("GET", "/v1/nothing")
    assert (refused.value.status, refused.value.problem, waits.seconds) == (404, "not-found", [])


def test_an_access_refusal_is_for_a_person(connection: Connection) -> None:
    with pytest.raises(AccessRefusedError, match="401"):
        connection.call("DELETE", "/v1/device")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault(path="nonces", status=307, headers={"location": "https://elsewhere.example.org/"}), "307"),
        (Fault(path="nonces", status=200, body=b"x" * 5000), "more than 1000 bytes"),
    ],
    ids=["a redirect is not followed", "an endless answer is cut"],
)
def test_what_no_service_answers_is_for_a_person(
    service: DeviceService, connection: Connection, fault: Fault, message: str
) -> None:
    service.faults = [replace(fault)]
    with pytest.raises(OperatorError, match=message):
        ask_nonce(connection, limit_bytes=1000)


BLOB = "/v1/packages/p/blobs/b"


@pytest.mark.parametrize(
    "location",
    [
        "http://elsewhere.example.org/",
        "https://user:password@elsewhere.example.org/",
        "ftp://h/",
        "/there",
        "",
    ],
)
def test_bytes_come_from_elsewhere_by_https_or_not_at_all(
    service: DeviceService, connection: Connection, location: str
) -> None:
    service.faults = [Fault(path="blobs", status=307, headers={"location": location})]
    with pytest.raises(OperatorError, match="Only https to another machine"), connection.stream(BLOB, {}):
        pass


def test_an_address_that_cannot_be_is_an_answer_that_did_not_come(
    service: DeviceService, connection: Connection
) -> None:
    service.faults = [Fault(path="blobs", status=307, headers={"location": "https://xn--99999999/"})]
    with pytest.raises(ServiceUnavailableError, match="A-label"), connection.stream(BLOB, {}):
        pass


@pytest.mark.parametrize("location", ["http://127.0.0.1:8000/", "http://localhost/", "https://[::1]/"])
def test_a_service_elsewhere_sends_nobody_to_what_runs_on_the_device(location: str) -> None:
    answer = httpx.Response(307, headers={"location": location})
    with Connection("https://models.example.org") as away, Connection("http://127.0.0.1:1") as here:
        with pytest.raises(OperatorError, match="Only https to another machine"):
            away._elsewhere(answer)
        assert here._elsewhere(answer) == location


@pytest.mark.parametrize(("etag", "asked"), [('"ours"', True), ('"other"', False)])
def test_elsewhere_is_asked_once_without_the_token(
    service: DeviceService, connection: Connection, etag: str, asked: bool
) -> None:
    cookie = {"set-cookie": "device=7; Path=/"}
    sent_to = {"location": f"{service.url}/there?signed", "etag": '"ours"', **cookie}
    service.faults = [
        Fault(path="blobs", status=307, headers=sent_to),
        Fault(path="there", status=307, headers={"location": service.url}),
    ]
    headers = {"authorization": "Bearer token", "range": "bytes=5-", "if-range": etag}
    with (
        pytest.raises(ServiceUnavailableError, match="to which the service redirected, answered 307"),
        connection.stream(BLOB, headers),
    ):
        pass
    last = service.traffic[-1].lower()
    assert not any(name in last for name in (b"authorization", b"if-range", b"cookie"))
    assert (b"range: bytes=5-" in last) is asked, "a part of other content is not continued"


def test_an_error_page_that_is_no_problem_document_is_still_an_error(
    service: DeviceService, connection: Connection
) -> None:
    service.faults = [Fault(path="nonces", status=400, body=b"<html>\xff" * 10)]
    with pytest.raises(RequestRefusedError) as refused:
        ask_nonce(connection)
    assert refused.value.problem == ""


@pytest.mark.parametrize("status", [200, 404])
def test_an_answer_nested_without_end_is_an_error_like_others(
    service: DeviceService, connection: Connection, status: int
) -> None:
    service.faults = [Fault(path="/v1/enrolments", status=status, body=b"[" * 100_000)]
    with pytest.raises((ServiceUnavailableError, RequestRefusedError)):
        DeviceApi(connection).enrol("A" * 22, Identity(Ed25519PrivateKey.generate()), "device")


def test_no_server_is_try_later(waits: Waits) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with Connection(url, sleep=waits) as connection, pytest.raises(ServiceUnavailableError):
            connection.call("GET", "/v1/health")
    assert len(waits.seconds) == 4


def test_a_request_says_no_more_than_the_contract(service: DeviceService, connection: Connection) -> None:
    ask_nonce(connection)
    head, _, body = service.traffic[0].partition(b"\n\n")
    headers = dict(line.lower().split(": ", 1) for line in head.decode().splitlines()[1:])
    names = "host accept accept-encoding connection user-agent content-type content-length"
    assert set(headers) == set(names.split())
    assert headers["user-agent"] == f"permille-agent/{__version__}"
    assert headers["accept-encoding"] == "identity"
    assert body == b'{"device_id": "d"}'


def test_proxies_and_netrc_of_the_environment_are_not_used(
    service: DeviceService, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password s3cret\n")
    monkeypatch.setenv("NETRC", str(netrc))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with Connection(service.url, sleep=Waits()) as connection:
        ask_nonce(connection)
    assert b"uthorization" not in service.traffic[0]


def test_a_ca_file_that_holds_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    path.write_text("no certificate")
    with pytest.raises(InputError, match="certificates"):
        Connection("https://models.example.org", ca_file=path)


def test_words_of_the_service_do_not_reach_a_terminal_as_commands(
    service: DeviceService, connection: Connection
) -> None:
    body = json.dumps({"type": "x/conflict", "detail": "\x1b]52;c;cm0=\x07 expected \u202e another run"})
    service.faults = [Fault(path="nonces", status=409, body=body.encode())]
    with pytest.raises(RequestRefusedError, match="expected") as refused:
        ask_nonce(connection)
    assert str(refused.value).isprintable()
