"""Devices in private rounds of the real service: what they see, what they are charged, when they stop."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from sqlalchemy import select

from permille.store import tables
from permille_agent.link.forget import forget
from permille_rounds.agent.exchange import TookPart
from permille_rounds.keeper.main import init, public_text
from tests.rounds.agent.site import GRADIENT, Service, make_agent, rounds_service
from tests.rounds.keeper.keepers import running
from tests.rounds.site import Site, make_site

PRIVATE: dict[str, Any] = GRADIENT | {"clip": 4000, "privacy": {"dp_epsilon": 300.0, "participations": 2}}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with rounds_service(tmp_path / "service") as service:
        yield service


@pytest.fixture
def site(service: Service) -> Site:
    return make_site(service.api, **PRIVATE)


def test_owners_see_epsilon_before_and_after_and_devices_stop_where_it_is_used_up(
    service: Service, site: Site, tmp_path: Path
) -> None:
    agents = [make_agent(service, tmp_path / f"device-{number}", number) for number in range(2)]
    for agent in agents:
        joined = agent.command("federations", "join", "readers", "--yes")
        assert "after 2 rounds. This device takes part in no more." in joined["promised"]
        assert agent.command("privacy") == {"privacy": []}
    for number in range(2):
        assert [agent.take_part() for agent in agents] == [TookPart(invited=1, trained=1, sent=1)] * 2
        assert site.work() == 1
        assert site.round(number)["state"] == "published"
    for agent in agents:
        assert agent.take_part() == TookPart(invited=0, trained=0, sent=0)
        (standing,) = agent.command("federations", "status")["federations"]
        assert "all the rounds that its privacy promise allows" in standing["waiting_for"]
        (shown,) = agent.command("privacy")["privacy"]
        assert (shown["federation"], shown["rounds"], shown["rounds_at_most"]) == ("readers", 2, 2)
        assert shown["epsilon"] == shown["epsilon_at_most"] <= 300
    with service.api.service.database.read() as session:
        states = session.scalars(select(tables.PrivacyCharge.state)).all()
    assert states == ["spent"] * 4


def test_a_ledger_survives_leaving_and_forgetting(service: Service, site: Site, tmp_path: Path) -> None:
    agent = make_agent(service, tmp_path / "device", 0)
    agent.command("federations", "join", "readers", "--yes")
    agent.take_part()
    before = json.loads(agent.home.ledger.read_bytes())
    agent.command("federations", "leave", "readers")
    forget(agent.home)
    assert json.loads(agent.home.ledger.read_bytes()) == before
    (shown,) = agent.command("privacy")["privacy"]
    assert shown["rounds"] == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_32_agents_and_a_keeper_make_a_round_of_parts_that_nobody_saw(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "keeper"
    init(home)
    monkeypatch.setenv("PERMILLE_KEEPER_TOKEN", (home / "keeper.token").read_text())
    key = X25519PrivateKey.from_private_bytes((home / "keeper.key").read_bytes())
    with running(home) as (port, _):
        kept = {"keeper_key": public_text(key), "keeper_url": f"http://127.0.0.1:{port}"}
        site = make_site(
            service.api, **PRIVATE | {"target": 32, "minimum": 32, "privacy": PRIVATE["privacy"] | kept}
        )
        agents = [make_agent(service, tmp_path / f"device-{number}", number) for number in range(32)]
        for agent in agents:
            joined = agent.command("federations", "join", "readers", "--yes")
            assert "collude" in joined["seen_by"]
        assert [agent.take_part().sent for agent in agents] == [1] * 32
        with service.api.service.database.read() as session:
            sent = session.scalars(select(tables.Participation.data)).all()
        assert {str(len(content or b"")) for content in sent} == {joined["bytes_each_round"]}
        assert site.work() == 1
        assert (site.round(0)["state"], site.round(0)["counted"]) == ("published", 32)
        assert agents[0].take_part().sent == 1
    assert agents[0].command("federations", "status")["federations"][0]["rounds_done"] == 1
