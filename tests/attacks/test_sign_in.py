"""Many devices behind one address, and strangers who try to lock them out, against a real API process."""

import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from permille.errors import InputError, RetryableError
from permille.store.tables import DeviceNonce
from permille_agent.link.client import Connection, RequestRefusedError
from permille_agent.link.enrolment import enroll, open_api
from permille_agent.state.home import Home, open_home
from tests.api_service import Api, running_api
from tests.running_service import running_service

AT_ONCE = 24


@pytest.mark.attack(6, "devices behind one address enrol and sign in at once, junk enrolments in between")
def test_devices_behind_one_address_enrol_and_sign_in_among_junk(tmp_path: Path) -> None:
    _enrol_all(tmp_path, devices=40, junk=100)


@pytest.mark.slow
@pytest.mark.attack(6, "500 devices behind one address, 1,000 junk enrolments in between")
def test_five_hundred_devices_behind_one_address_among_a_thousand_junk_enrolments(tmp_path: Path) -> None:
    _enrol_all(tmp_path, devices=500, junk=1000)


@pytest.mark.attack(6, "a caller makes up the addresses that it comes from")
def test_forwarded_addresses_are_believed_of_named_proxies_only(tmp_path: Path) -> None:
    few = {"PERMILLE_SIGN_INS_PER_MINUTE": "5"}
    with _stranger_to(tmp_path, **few) as stranger:
        assert [_junk_from(stranger, f"192.0.2.{number}") for number in range(7)] == [403] * 5 + [429] * 2
    proxies = {"PERMILLE_TRUSTED_PROXIES": '["10.0.0.0/8", "127.0.0.1"]'}
    with _stranger_to(tmp_path, **few, **proxies) as stranger:
        assert [_junk_from(stranger, "192.0.2.1") for _ in range(7)] == [403] * 5 + [429] * 2
        assert _junk_from(stranger, "192.0.2.2") == 403
        # A client's own header values stand before the address that the proxy adds, so they are ignored.
        assert [_junk_from(stranger, f"198.51.100.{n}, 192.0.2.3") for n in range(6)] == [403] * 5 + [429]
        # An IPv6 client has a whole /64 network, which counts as one address.
        assert [_junk_from(stranger, f"2001:db8::{number}") for number in range(6)] == [403] * 5 + [429]
        assert _junk_from(stranger, "2001:db8:0:1::1") == 403


@pytest.mark.attack(6, "a stranger who learned a device's id asks for nonces and signs them in its name")
def test_who_knows_a_devices_id_keeps_it_signed_out_for_no_minute(tmp_path: Path) -> None:
    with running_api(tmp_path, sign_ins_per_minute=3) as api:
        device = api.device()
        for _ in range(20):
            assert device.ask_token(device.nonce(), key=Ed25519PrivateKey.generate()).status_code == 401
        assert _nonces_kept(api) == 0, "a stranger writes nothing"
        assert [device.ask_token(device.nonce()).status_code for _ in range(4)] == [201] * 3 + [429]


def _nonces_kept(api: Api) -> int:
    with api.service.database.read() as session:
        return session.query(DeviceNonce).count()


@contextmanager
def _stranger_to(folder: Path, **settings: str) -> Iterator[httpx.Client]:
    with (
        running_service(folder, "--no-worker", **settings) as running,
        httpx.Client(base_url=running.url, trust_env=False, timeout=60.0) as stranger,
    ):
        yield stranger


def _junk_from(stranger: httpx.Client, forwarded: str) -> int:
    body = {
        "invitation": secrets.token_urlsafe(15) + "AA." + "0" * 32,
        "public_key": "A" * 43,
        "name": "x",
        "agent_version": "0.1.0",
        "signature": "A" * 86,
    }
    answer = stranger.post("/v1/enrolments", json=body, headers={"X-Forwarded-For": forwarded})
    return answer.status_code


class _Kept(Connection):
    """A connection that its context does not close. Opening one is slow: it reads all certificates."""

    def __exit__(self, *_exc: object) -> None:
        """Keep the connection open."""


def _enrol_all(folder: Path, *, devices: int, junk: int) -> None:
    with running_service(folder, "--no-worker") as running:
        with running.client() as operator:
            answers = [operator.post("/v1/invitations", json={"release": "tiny"}) for _ in range(devices)]
        invitations: list[str] = [answer.json()["invitation"] for answer in answers]
        junk_home, stranger = open_home(folder / "junk"), _Kept(running.url, attempts=1)
        with ThreadPoolExecutor(AT_ONCE) as devices_pool, ThreadPoolExecutor(4) as strangers:
            refused = [strangers.submit(_try_junk, stranger, junk_home, invitations[0]) for _ in range(junk)]
            signed_in = [
                devices_pool.submit(_enrol_and_poll, running.url, folder / f"home{number}", invitation)
                for number, invitation in enumerate(invitations)
            ]
            assert all(one.result() for one in signed_in)
            assert all(one.result() for one in refused)
        stranger.close()
        listed = running.answer("devices", "list", "--limit", str(devices))
        assert len(listed) == devices


def _try_junk(stranger: Connection, home: Home, invitation: str) -> bool:
    """Try a made-up invitation. Return True if it was refused."""
    made_up = secrets.token_urlsafe(15) + "AA" + invitation[22:]
    try:
        enroll(home, stranger.server, made_up, connection=lambda _server, _ca_file: stranger)
    except (InputError, RetryableError):
        return True
    return False


def _enrol_and_poll(url: str, home: Path, invitation: str) -> bool:
    """Enrol, sign in and ask for a release that does not exist. Return True if the answer was 404."""
    opened, kept = open_home(home), _Kept(url)
    enroll(opened, url, invitation, connection=lambda _server, _ca_file: kept)
    try:
        with open_api(opened, connection=lambda _server, _ca_file: kept) as api:
            api.release("tiny", "stable")
    except RequestRefusedError as exc:
        return exc.status == 404
    finally:
        kept.close()
    return False
