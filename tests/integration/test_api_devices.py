"""The life of a device: invited, enrolled, given tokens, seen, revoked, and requests that must fail."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from permille.trust.metadata import root_digest
from permille_service.access import principals
from tests.api_service import Api, TestDevice, running_api


def test_device_enrols_and_reads_its_own_record(api: Api) -> None:
    invitation = api.post("/v1/invitations", {"release": "tiny", "alias": "canary"}).json()
    device = TestDevice(api=api, key=Ed25519PrivateKey.generate())
    answer = device.enrol(invitation["invitation"])
    assert answer.status_code == 201
    enrolment = answer.json()
    device.id = enrolment["device_id"]
    assert (enrolment["release"], enrolment["alias"]) == ("tiny", "canary")
    assert root_digest(enrolment["root"].encode()) == invitation["invitation"].partition(".")[2]
    own = api.get("/v1/device", device.token()).json()
    assert (own["id"], own["state"], own["name"]) == (device.id, "active", "test laptop")
    assert api.get(f"/v1/devices/{device.id}").json()["last_seen_at"] is not None


def test_invitation_enrols_one_key_only(api: Api) -> None:
    code = api.post("/v1/invitations", {"release": "tiny"}).json()["invitation"]
    first = TestDevice(api=api, key=Ed25519PrivateKey.generate())
    second = TestDevice(api=api, key=Ed25519PrivateKey.generate())
    assert first.enrol(code).status_code == 201
    assert second.enrol(code).status_code == 403
    assert [item["state"] for item in api.get("/v1/invitations").json()["items"]] == ["used"]


def test_enrolling_the_same_key_again_is_the_same_device(api: Api) -> None:
    code = api.post("/v1/invitations", {"release": "tiny"}).json()["invitation"]
    device = TestDevice(api=api, key=Ed25519PrivateKey.generate())
    first, again = device.enrol(code), device.enrol(code)
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["device_id"] == again.json()["device_id"]
    assert len(api.get("/v1/devices").json()["items"]) == 1


def test_invitation_ends_after_a_day_or_when_revoked(tmp_path: Path) -> None:
    moment = [datetime(2026, 1, 1, tzinfo=UTC)]
    with running_api(tmp_path, clock=lambda: moment[0]) as api:
        device = TestDevice(api=api, key=Ed25519PrivateKey.generate())
        made = api.post("/v1/invitations", {"release": "tiny"}).json()
        assert api.post(f"/v1/invitations/{made['id']}/revoke").status_code == 204
        assert device.enrol(made["invitation"]).status_code == 403
        late = api.post("/v1/invitations", {"release": "tiny"}).json()
        moment[0] += timedelta(hours=24)
        assert device.enrol(late["invitation"]).status_code == 403
        states = [item["state"] for item in api.get("/v1/invitations").json()["items"]]
        assert states == ["expired", "revoked"]


def test_nonce_is_good_once_and_only_for_its_device_and_key(api: Api) -> None:
    device, other = api.device(), api.device()
    nonce = device.nonce()
    answer = device.ask_token(nonce)
    assert answer.status_code == 201
    assert 3590 <= answer.json()["expires_in"] <= 3600
    assert device.ask_token(nonce).status_code == 401
    stolen = device.nonce()
    assert other.ask_token(stolen).status_code == 401
    forged = device.nonce()
    assert device.ask_token(forged, key=other.key).status_code == 401
    assert device.ask_token("A" * 48).status_code == 401
    assert device.ask_token(forged).status_code == 201, "a stranger uses no nonce up"


def test_revoked_device_is_refused_at_its_next_request_and_for_good(api: Api) -> None:
    device = api.device()
    token, nonce = device.token(), device.nonce()
    assert api.post(f"/v1/devices/{device.id}/revoke").json()["state"] == "revoked"
    assert api.get("/v1/device", token).status_code == 401
    assert device.ask_token(nonce).status_code == 401
    asked = api.client.post("/v1/device-tokens/nonces", json={"device_id": device.id})
    assert asked.status_code == 404
    code = api.post("/v1/invitations", {"release": "tiny"}).json()["invitation"]
    assert device.enrol(code).status_code == 403


def test_device_leaves_and_comes_back_with_a_new_invitation(api: Api) -> None:
    device = api.device()
    token = device.token()
    assert api.delete("/v1/device", token).status_code == 204
    assert api.get("/v1/device", token).status_code == 401
    assert api.get(f"/v1/devices/{device.id}").json()["state"] == "unenrolled"
    code = api.post("/v1/invitations", {"release": "tiny"}).json()["invitation"]
    assert device.enrol(code).status_code == 201
    assert api.get("/v1/device", device.token()).json()["id"] == device.id


def test_guessing_is_slowed_by_address_and_a_valid_invitation_is_not(tmp_path: Path) -> None:
    with running_api(tmp_path, sign_ins_per_minute=3) as api:
        device = TestDevice(api=api, key=Ed25519PrivateKey.generate())
        codes = [device.enrol("A" * 22 + "." + "0" * 32).status_code for _ in range(5)]
        assert codes == [403, 403, 403, 429, 429]
        answer = device.enrol("A" * 22 + "." + "0" * 32)
        assert int(answer.headers["retry-after"]) >= 1
        assert api.device().token()
        assert api.get("/v1/models").status_code == 200


def test_a_poll_takes_few_statements(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request also records that the device was seen, and the version that it was told."""
    monkeypatch.setattr(principals, "_SEEN_EVERY", timedelta(days=1))
    package = api.package()
    api.publish(package)
    device = api.device()
    token = device.token()
    alias, timestamp = "/v1/releases/tiny/aliases/stable", "/v1/trust/metadata/timestamp.json"
    counted = [api.statements(path, token) for path in (alias, alias, timestamp, "/v1/device/federations")]
    assert counted == [4, 2, 2, 2]
    assert api.get(f"/v1/devices/{device.id}").json()["last_seen_at"] is not None
    assert api.statements(f"/v1/packages/{package.digest}/manifest", token) == 3
    job = api.get("/v1/jobs").json()["items"][0]["id"]
    assert api.statements(f"/v1/jobs/{job}") == 2
