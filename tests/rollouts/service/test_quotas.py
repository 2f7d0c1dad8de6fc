"""Groups take a limited part of a tenant's database."""

import pytest

from permille.schemas.access import FIRST_DIGEST, AuditEntry
from permille.store import audit
from permille_rollouts.store import groups
from tests.api_service import Api
from tests.attacks.test_quotas import entries


@pytest.mark.attack(28, "groups of 100 kB, made and deleted, leave large rows in the audit log")
def test_a_large_body_is_noted_by_its_digest(api: Api) -> None:
    api.publish(api.package())
    devices = [api.device().id for _ in range(3)]
    rule = {"devices": [devices[number % 3] for number in range(900)]}
    made = api.post("/v1/groups", {"name": "large", "rule": rule})
    assert made.status_code == 201, made.text
    noted = entries(api)[-1]
    assert noted["action"] == "create_group"
    assert noted["request"].keys() == {"digest", "size_bytes"}
    assert noted["request"]["size_bytes"] > audit.MAX_BODY_BYTES
    assert api.post("/v1/groups", {"name": "small"}).status_code == 201
    assert entries(api)[-1]["request"]["name"] == "small"
    digest = FIRST_DIGEST
    for entry in map(AuditEntry.model_validate, entries(api)):
        assert (digest := entry.digest_after(digest)) == entry.digest


@pytest.mark.attack(28, "groups without end fill the database")
def test_a_tenant_has_a_limited_number_of_groups(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "MAX_GROUPS", 2)
    answers = [api.post("/v1/groups", {"name": f"n{number}"}) for number in range(3)]
    assert [answer.status_code for answer in answers] == [201, 201, 409], answers[0].text
    assert "2 of 2 possible" in answers[2].json()["detail"]
