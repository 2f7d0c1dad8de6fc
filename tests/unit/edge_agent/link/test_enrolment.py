"""Tests of enrolment: by an invitation, again with the same key, and with a pinned root."""

import json
import stat
from pathlib import Path

import pytest

from permille.errors import InputError, OperatorError, RetryableError
from permille_agent.link.api import Credentials, DeviceApi, load_identity, load_or_create_identity
from permille_agent.link.client import AccessRefusedError, ServiceUnavailableError
from permille_agent.link.enrolment import Enrolment, enroll, load_enrolment, open_api, require_enrolment
from permille_agent.state.home import Home, open_home
from tests.device_service import CODE, DeviceService, Fault
from tests.unit.edge_agent.conftest import fast_connection

OTHER_INVITATION = "A" * 22 + "." + "0" * 32


def test_enrolment_is_kept_without_secrets_and_pins_the_root(
    home: Home, service: DeviceService, enrolment: Enrolment
) -> None:
    assert load_enrolment(home) == enrolment
    assert not list(home.root.glob(".enrolment*"))
    private = home.identity_key.read_text().splitlines()[1].encode()
    assert not any(private in sent for sent in service.traffic)
    assert CODE not in home.enrolment.read_text()
    identity = load_identity(home)
    assert identity is not None
    assert enrolment.name == f"device-{identity.public_key[:8]}"  # the name reveals nothing about the machine
    assert stat.S_IMODE(home.enrolment.stat().st_mode) == 0o600
    assert enrolment.root.encode() == service.repository.newest["root"]


def test_the_same_key_enrols_again_as_the_same_device(
    home: Home, service: DeviceService, enrolment: Enrolment
) -> None:
    # The request is repeated if its answer is lost.
    service.faults = [Fault(path="enrolments", status=503, times=2)]
    again = enroll(home, service.url, service.invitation, connection=fast_connection)
    assert again == enrolment
    assert len(service.devices) == 1


def test_a_device_that_enrols_again_keeps_its_name(home: Home, service: DeviceService) -> None:
    named = enroll(home, service.url, service.invitation, name="kitchen", connection=fast_connection)
    again = enroll(home, service.url, service.invitation, connection=fast_connection)
    assert (named.name, again.name) == ("kitchen", "kitchen")


def test_an_address_with_tls_of_a_service_without_says_so(home: Home, service: DeviceService) -> None:
    server = service.url.replace("http:", "https:")
    with pytest.raises(OperatorError, match=r"answers without TLS. Write its address with http://"):
        enroll(home, server, service.invitation, connection=fast_connection)


def test_a_used_invitation_is_refused_for_another_device(
    home: Home, service: DeviceService, enrolment: Enrolment, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="not valid, or was used before"):
        enroll(open_home(tmp_path / "other"), service.url, service.invitation, connection=fast_connection)


@pytest.mark.parametrize(
    "invitation",
    ["", "short", CODE, "A" * 23 + "." + "0" * 32, OTHER_INVITATION[:-1] + "\n", "../../" + OTHER_INVITATION],
)
def test_what_cannot_be_an_invitation_is_not_sent(
    home: Home, service: DeviceService, invitation: str
) -> None:
    with pytest.raises(InputError, match="22 characters"):
        enroll(home, service.url, invitation, connection=fast_connection)
    assert service.traffic == []


def test_another_server_needs_unenroll_first(home: Home, enrolment: Enrolment) -> None:
    with pytest.raises(InputError, match="unenroll"):
        enroll(home, "https://other.example.org", OTHER_INVITATION, connection=fast_connection)


@pytest.mark.parametrize("body", [b"<html>welcome to the hotel</html>", b"[]", b"{}"])
def test_an_answer_of_somebody_else_is_try_later(home: Home, service: DeviceService, body: bytes) -> None:
    service.faults = [Fault(path="enrolments", status=200, body=body)]
    with pytest.raises(RetryableError):
        enroll(home, service.url, service.invitation, connection=fast_connection)
    assert load_enrolment(home) is None


def test_a_damaged_or_absent_enrolment_is_for_a_person(home: Home, enrolment: Enrolment) -> None:
    home.enrolment.write_text('{"server": "https://x"}')
    with pytest.raises(OperatorError, match="is damaged and holds no Enrolment"):
        load_enrolment(home)
    home.enrolment.unlink()
    with pytest.raises(OperatorError, match="permille-agent enroll"):
        require_enrolment(home)


def test_tokens_are_renewed_but_not_those_of_a_revoked_device(
    home: Home, service: DeviceService, enrolment: Enrolment
) -> None:
    seconds = 0.0
    credentials = Credentials(device_id=enrolment.device_id, identity=load_or_create_identity(home))
    with fast_connection(service.url, None) as connection:
        api = DeviceApi(connection, credentials, monotonic=lambda: seconds)
        api.release(enrolment.release, "stable")
        seconds = 3000.0
        api.release(enrolment.release, "stable")
        assert len(service.tokens) == 1
        seconds = 3590.0
        api.release(enrolment.release, "stable")
        assert len(service.tokens) == 2
        service.tokens.clear()  # the service ended the token: the device renews it once
        assert api.release(enrolment.release, "stable").version == 1
        service.revoked.add(enrolment.device_id)
        with pytest.raises(AccessRefusedError):
            api.release(enrolment.release, "stable")


def test_a_copied_enrolment_without_its_key_is_worth_nothing(
    home: Home, service: DeviceService, enrolment: Enrolment, tmp_path: Path
) -> None:
    thief = load_or_create_identity(open_home(tmp_path / "thief"))
    credentials = Credentials(device_id=enrolment.device_id, identity=thief)
    with fast_connection(service.url, None) as connection, pytest.raises(AccessRefusedError):
        DeviceApi(connection, credentials).release(enrolment.release, "stable")


def test_a_token_that_no_header_can_carry_is_the_services_fault(
    home: Home, enrolment: Enrolment, service: DeviceService
) -> None:
    body = json.dumps({"access_token": "tok\u00e9n\r\n", "token_type": "Bearer", "expires_in": 60}).encode()
    service.faults = [Fault(path="/v1/device-tokens$", status=201, body=body)]
    with (
        open_api(home, connection=fast_connection) as api,
        pytest.raises(ServiceUnavailableError, match="a malformed token"),
    ):
        api.unenrol()
