"""Devices in rounds of the real service: joined by choice, trained, sent, followed, adopted, left."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from permille_agent.federation.by_hand import TookPart
from tests.federations import Site, make_site
from tests.rounds_site import SKETCH, Agent, Service, make_agent, rounds_service


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with rounds_service(tmp_path / "service") as service:
        yield service


@pytest.fixture
def site(service: Service) -> Site:
    return make_site(service.api, **SKETCH)


@pytest.fixture
def agents(service: Service, site: Site, tmp_path: Path) -> list[Agent]:
    return [make_agent(service, tmp_path / f"device-{number}", number) for number in range(2)]


def test_two_devices_join_train_and_follow_to_one_state(site: Site, agents: list[Agent]) -> None:
    for agent in agents:
        offered = agent.command("federations", "list")["federations"]
        assert [(offer["name"], offer["member"]) for offer in offered] == [("readers", False)]
        joined = agent.command("federations", "join", "readers", "--yes")
        assert "129 integers" in joined["leaves_each_round"]
    for number in range(3):
        assert [agent.take_part() for agent in agents] == [TookPart(invited=1, trained=1, sent=1)] * 2
        assert site.work() == 1
        assert site.read()["number"] == number + 1
        assert site.round(number)["counted"] == 2
    assert site.round(2)["mean_gain"] > site.round(1)["mean_gain"] > site.round(0)["mean_gain"] == 0.0
    for agent in agents:
        agent.take_part()
        (standing,) = agent.command("federations", "status")["federations"]
        assert (standing["rounds_done"], standing["sent"], standing["last"]) == (3, 4, "sent")
        (shown,) = agent.command("status")["federations"]
        assert shown == standing
