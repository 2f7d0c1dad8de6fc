"""Tests of webhooks: events become rows, which workers claim, send and try again."""

import hashlib
import hmac
import json
import socket
import ssl
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import BadStatusLine
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Event, Thread
from typing import Any

import pytest
from sqlalchemy import text

from permille.addresses import is_public
from permille.store import rows
from permille.store.database import Database, now
from permille.store.errors import ConflictError, NotFoundError
from permille.store.tables import Webhook, WebhookDelivery
from permille_rollouts.schemas.webhooks import EventType
from permille_rollouts.store import webhooks
from permille_rollouts.workers.webhooks import post, send_due
from tests.unit.store.conftest import Clock
from tests.unit.store.test_clock import YEAR_S


@contextmanager
def receiver(*statuses: int, location: str | None = None) -> Iterator[tuple[str, list[Any]]]:
    """Run a server that answers with these statuses, and repeats the last one.

    Yields its address and the list of received requests.
    """
    left, came = list(statuses), list[Any]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            came.append((self.path, dict(self.headers.items()), body))
            self.send_response(left.pop(0) if len(left) > 1 else left[0])
            if location is not None:
                self.send_header("location", location)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/in?a=b", came
        server.shutdown()


def add(db: Database, tenant_id: str, url: str) -> tuple[str, str]:
    with db.write() as session:
        row = webhooks.create(session, tenant_id=tenant_id, url=url)
        return row.id, row.secret


def tell(db: Database, tenant_id: str) -> None:
    with db.write() as session:
        webhooks.tell(session, tenant_id=tenant_id, event=EventType.DONE, data={"version": 2})


def delivery(db: Database, tenant_id: str, webhook_id: str) -> WebhookDelivery:
    with db.read() as session:
        found = webhooks.deliveries(session, tenant_id=tenant_id, webhook_id=webhook_id, window=rows.FIRST)
        return found.items[0]


def send(db: Database, *, allow_private: bool = True) -> int:
    return send_due(db, lambda message, at: post(message, at, allow_private=allow_private))


def test_an_event_is_sent_once_and_its_signature_holds(db: Database, tenant_id: str, clock: Clock) -> None:
    with receiver(204) as (url, came):
        webhook_id, secret = add(db, tenant_id, url)
        tell(db, tenant_id)
        assert [send(db), send(db)] == [1, 0]
    [(path, headers, body)] = came
    assert path == "/in?a=b"
    told = json.loads(body)
    assert (told["type"], told["data"]) == ("rollout.done", {"version": 2})
    row = delivery(db, tenant_id, webhook_id)
    assert (row.attempts, row.next_at, row.failure) == (1, None, None)
    # A receiver checks the signature in this way, according to Standard Webhooks.
    assert headers["webhook-id"] == row.id
    assert headers["webhook-timestamp"] == str(int(clock.at.timestamp()))
    signed = f"{row.id}.{headers['webhook-timestamp']}.".encode() + body
    digest = hmac.digest(b64decode(secret.removeprefix("whsec_")), signed, hashlib.sha256)
    version, _, found = headers["webhook-signature"].partition(",")
    assert (version, b64decode(found)) == ("v1", digest)


def test_a_refused_event_comes_again_later_with_the_same_id_and_is_given_up_at_last(
    db: Database, tenant_id: str, clock: Clock
) -> None:
    with receiver(500) as (url, came):
        webhook_id, _ = add(db, tenant_id, url)
        tell(db, tenant_id)
        assert send(db) == 1
        for seconds in webhooks.RETRY_AFTER_S:
            clock.forward(seconds - 1)
            assert send(db) == 0, "not before its time"
            clock.forward(1)
            assert send(db) == 1
        row = delivery(db, tenant_id, webhook_id)
        assert (row.attempts, row.next_at, row.failure) == (7, None, "the answer was 500")
        clock.forward(30 * 86_400)
        assert send(db) == 0
    assert len({headers["webhook-id"] for _, headers, _ in came}) == 1
    with db.read() as session:
        assert session.get(WebhookDelivery, row.id) is None, "kept for thirty days"


def test_an_event_that_a_killed_worker_has_claimed_is_sent_by_another(
    db: Database, tenant_id: str, clock: Clock
) -> None:
    with receiver(200) as (url, came):
        add(db, tenant_id, url)
        tell(db, tenant_id)
        with db.write() as session:
            assert len(webhooks.claim(session)) == 1
        assert send(db) == 0, "the other one may still be sending"
        clock.forward(webhooks.CLAIMED_FOR.total_seconds())
        assert (send(db), len(came)) == (1, 1)


@pytest.mark.attack(18, "a webhook that leads into the operator's network, also by a redirect")
@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:{}/", "http://localhost:{}/", "http://[::ffff:127.0.0.1]:{}/"]
)
def test_a_webhook_does_not_reach_private_addresses(db: Database, tenant_id: str, address: str) -> None:
    with receiver(200) as (url, came):
        webhook_id, _ = add(db, tenant_id, address.format(url.split(":")[2].split("/")[0]))
        tell(db, tenant_id)
        assert send(db, allow_private=False) == 1
        assert came == []
    failure = delivery(db, tenant_id, webhook_id).failure or ""
    assert "has no public address. Set PERMILLE_WEBHOOK_PRIVATE=true" in failure


def resolve(monkeypatch: pytest.MonkeyPatch, name: str, *addresses: str) -> None:
    """Let a name have these addresses, in this order."""
    plain = socket.getaddrinfo

    def found(host: str, port: int, *more: Any, **named: Any) -> list[Any]:
        if host != name:
            return list(plain(host, port, *more, **named))
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", found)


@pytest.mark.parametrize("first", ["100::1", "127.0.0.2", "::1"])
def test_the_next_address_of_a_name_is_tried_when_the_first_cannot_be_reached(
    db: Database, tenant_id: str, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    with receiver(200) as (url, came):
        webhook_id, _ = add(db, tenant_id, url.replace("127.0.0.1", "dual.example"))
        tell(db, tenant_id)
        resolve(monkeypatch, "dual.example", first, "127.0.0.1")
        assert send(db) == 1
        assert len(came) == 1
    assert delivery(db, tenant_id, webhook_id).failure is None


@pytest.mark.attack(18, "a webhook whose name has a public address and one in the operator's network")
def test_no_address_of_a_name_is_reached_unchecked(
    db: Database, tenant_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = list[str]()

    def refuse(address: tuple[str, int], _timeout_s: float) -> socket.socket:
        tried.append(address[0])
        raise ConnectionRefusedError("refused")

    resolve(monkeypatch, "mixed.example", "93.184.215.14", "127.0.0.1", "10.0.0.7", "2606:2800:21f:cb07::1")
    monkeypatch.setattr(socket, "create_connection", refuse)
    webhook_id, _ = add(db, tenant_id, "http://mixed.example/")
    tell(db, tenant_id)
    assert send(db, allow_private=False) == 1
    assert tried == ["93.184.215.14", "2606:2800:21f:cb07::1"]
    assert delivery(db, tenant_id, webhook_id).failure == "the receiver refused the connection"


@pytest.mark.attack(18, "a webhook to an address that a library takes for public")
@pytest.mark.parametrize(
    "address",
    [
        *("0.0.0.0", "10.1.2.3", "100.100.100.200", "127.9.9.9", "168.63.129.16", "169.254.169.254"),
        *("172.31.0.1", "192.0.0.192", "192.88.99.1", "192.168.1.1", "198.19.0.1", "224.0.0.1", "240.0.0.1"),
        *(
            "255.255.255.255",
            "::",
            "::1",
            "::7f00:1",
            "::ffff:10.0.0.1",
            "::ffff:0:10.0.0.1",
            "64:ff9b::a00:1",
        ),
        *("64:ff9b:1::a00:1", "100::1", "2001::1", "2001:db8::1", "2002:a00:1::1", "3fff::1", "5f00::1"),
        *("fc00::1", "fd00:ec2::254", "fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1"),
    ],
)
def test_an_address_of_a_special_network_is_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "93.184.215.14", "::ffff:8.8.8.8", "2606:2800:21f:cb07::1"])
def test_an_address_of_the_internet_is_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.attack(18, "the failures of a webhook draw a map of the operator's network for viewers")
@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (ConnectionRefusedError(111, "refused by 10.0.0.7"), "the receiver refused the connection"),
        (TimeoutError("10.0.0.7 timed out"), "the receiver did not answer in time"),
        (OSError(113, "No route to host 10.0.0.7"), "the connection failed"),
        (socket.gaierror(-2, "dns 10.0.0.53 says no"), "the host name has no address"),
        (ssl.SSLError("certificate of gateway.internal"), "the TLS connection failed"),
        (BadStatusLine("SSH-2.0 internal"), "the answer was no HTTP"),
        (ValueError("10.0.0.7"), "the URL or the secret cannot be used"),
    ],
)
def test_only_the_log_has_the_addresses_of_a_failure(
    db: Database,
    tenant_id: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    failure: Exception,
    words: str,
) -> None:
    def fail(*_: object) -> socket.socket:
        raise failure

    monkeypatch.setattr(socket, "create_connection", fail)
    webhook_id, _ = add(db, tenant_id, "http://127.0.0.1:1/")
    tell(db, tenant_id)
    with caplog.at_level("INFO"):
        send(db)
    assert delivery(db, tenant_id, webhook_id).failure == words
    assert str(failure) in caplog.text


def test_a_damaged_secret_stops_no_other_webhook(db: Database, tenant_id: str) -> None:
    damaged, other = (add(db, tenant_id, "http://127.0.0.1:1/")[0] for _ in range(2))
    with db.write() as session:
        session.get_one(Webhook, damaged).secret = "whsec_x"
    tell(db, tenant_id)
    send(db)
    assert delivery(db, tenant_id, damaged).failure == "the URL or the secret cannot be used"
    assert delivery(db, tenant_id, other).failure == "the receiver refused the connection"


@pytest.mark.parametrize("column", ["attempts", "next_at"])
def test_a_damaged_event_stops_no_other(db: Database, tenant_id: str, column: str) -> None:
    webhook_id, _ = add(db, tenant_id, "http://127.0.0.1:1/")
    for _ in range(2):
        tell(db, tenant_id)
    broken = delivery(db, tenant_id, webhook_id).id
    with db.write() as session:
        sqlite = session.get_bind().dialect.name == "sqlite"
        if not sqlite and column == "attempts":
            pytest.skip("PostgreSQL stores no text there")
        value = "'many'" if sqlite else str(2**62)
        session.execute(
            text(f"UPDATE webhook_deliveries SET {column} = {value} WHERE id = :id"), {"id": broken}
        )
    assert [send(db), send(db)] == [1, 0]
    row = delivery(db, tenant_id, webhook_id)
    assert (row.id, row.next_at, row.failure) == (broken, None, "the event is damaged")


def test_a_receiver_that_drips_its_answer_is_left(
    db: Database, tenant_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("permille_rollouts.workers.webhooks.TIMEOUT_S", 0.5)
    done = Event()

    def drip(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection, suppress(OSError):
            connection.sendall(b"HTTP/1.")
            while not done.wait(0.1):
                connection.sendall(b"1")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        Thread(target=drip, args=(listening,), daemon=True).start()
        webhook_id, _ = add(db, tenant_id, f"http://127.0.0.1:{listening.getsockname()[1]}/")
        tell(db, tenant_id)
        assert send(db) == 1, "it ends, though no single read takes long"
        done.set()
    assert delivery(db, tenant_id, webhook_id).failure is not None


def test_a_redirect_is_not_followed(db: Database, tenant_id: str) -> None:
    with receiver(200) as (inner, never), receiver(302, location=inner) as (url, _):
        webhook_id, _ = add(db, tenant_id, url)
        tell(db, tenant_id)
        send(db)
        assert never == []
    assert delivery(db, tenant_id, webhook_id).failure == "the answer was 302"


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1/", "http://no-such-host.invalid/", "http://127.0.0.1:99999/", "http://[::1"]
)
def test_a_receiver_that_is_away_is_a_failure_with_its_reason(db: Database, tenant_id: str, url: str) -> None:
    webhook_id, _ = add(db, tenant_id, url)
    tell(db, tenant_id)
    assert send(db) == 1
    row = delivery(db, tenant_id, webhook_id)
    assert row.failure
    with db.read() as session:
        assert row.next_at is not None and row.next_at > now(session)


def test_a_removed_webhook_takes_its_events_along(db: Database, tenant_id: str) -> None:
    webhook_id, _ = add(db, tenant_id, "http://127.0.0.1:1/")
    tell(db, tenant_id)
    with db.write() as session:
        [message] = webhooks.claim(session)
        webhooks.remove(session, tenant_id=tenant_id, webhook_id=webhook_id)
    with db.write() as session:
        webhooks.note(session, message.id, None)
        assert webhooks.claim(session) == []
        with pytest.raises(NotFoundError):
            webhooks.remove(session, tenant_id=tenant_id, webhook_id=webhook_id)


def test_a_tenant_has_a_limited_number_of_webhooks(db: Database, tenant_id: str) -> None:
    for number in range(webhooks.MAX_WEBHOOKS):
        add(db, tenant_id, f"http://127.0.0.1:1/{number}")
    with pytest.raises(ConflictError, match="The tenant has 20 of 20 possible webhooks"):
        add(db, tenant_id, "http://127.0.0.1:1/")


def test_an_event_of_the_wrong_time_is_sent(db: Database, tenant_id: str, clock: Clock) -> None:
    clock.forward(YEAR_S)
    with db.write() as session:
        webhooks.create(session, tenant_id=tenant_id, url="https://example.org/")
        webhooks.tell(session, tenant_id=tenant_id, event=EventType.DONE, data={})
    clock.forward(-YEAR_S)
    with db.write() as session:
        assert len(webhooks.claim(session)) == 1
        assert webhooks.claim(session) == []
