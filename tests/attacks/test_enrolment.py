"""Attacks by somebody who has a device's public key, or who has seen an invitation."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.api_service import Api, TestDevice, running_api


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    with running_api(tmp_path) as running:
        yield running


@pytest.mark.attack(2, "point a device to another release by its public key, without the private one")
def test_a_public_key_alone_moves_no_device(api: Api) -> None:
    victim = api.device(release="tiny", alias="stable")
    invitation = api.post("/v1/invitations", {"release": "evil", "alias": "canary"}).json()["invitation"]
    refused = victim.enrol(invitation, signer=Ed25519PrivateKey.generate())
    assert refused.status_code == 403
    own = api.get("/v1/device", victim.token()).json()
    assert (own["release"], own["alias"]) == ("tiny", "stable")


@pytest.mark.attack(2, "enrol by a statement that was signed for another invitation, or a root of one's own")
def test_a_signed_enrolment_is_good_for_its_invitation_and_root_alone(api: Api) -> None:
    given, other = (api.post("/v1/invitations", {"release": "tiny"}).json()["invitation"] for _ in range(2))
    device = TestDevice(api=api, key=Ed25519PrivateKey.generate())
    answer = device.enrol(given)
    assert answer.status_code == 201
    recorded = answer.request.read()
    replayed = api.client.post(
        "/v1/enrolments",
        content=recorded.replace(given.encode(), other.encode()),
        headers={"content-type": "application/json"},
    )
    assert replayed.status_code == 403
    assert device.enrol(other[:22] + "." + "0" * 32).status_code == 403
    assert [item["state"] for item in api.get("/v1/invitations").json()["items"]] == ["open", "used"]
