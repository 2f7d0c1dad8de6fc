"""Devices in rounds of the real service: joined by choice, trained, sent, followed, adopted, left."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from permille.errors import OperatorError
from permille.federation.local import take_local_steps
from permille.store import tables
from permille_agent.federation import part
from permille_agent.federation.by_hand import TookPart
from permille_agent.link.api import DeviceApi
from permille_agent.link.client import ServiceUnavailableError
from permille_agent.link.enrolment import require_enrolment
from permille_agent.state.home import write_record
from permille_agent.state.models import read_releases
from tests.federations import Site, make_site
from tests.integration.agent_site import ROOT
from tests.kill_rounds import STEPS
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


@pytest.fixture(scope="module")
def two_rounds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Site, Agent]]:
    """A member whose federation has done one round without it: it has to follow, and then to take part."""
    folder = tmp_path_factory.mktemp("kills")
    with rounds_service(folder / "service") as service:
        site = make_site(service.api, **SKETCH)
        agents = [make_agent(service, folder / f"device-{number}", number) for number in range(2)]
        for agent in agents:
            agent.join("readers")
        assert agents[1].take_part().sent == 1
        site.pass_deadline()
        site.work()
        assert site.read()["number"] == 1
        yield site, agents[0]


def no_network(_api: DeviceApi) -> None:
    raise ServiceUnavailableError("expected an answer, there is no network")


def kept_contribution(agent: Agent, number: int) -> bytes:
    (path,) = agent.home.federations.glob(f"*/rounds/{number}/contribution.bin")
    return path.read_bytes()


@pytest.mark.parametrize("step", STEPS)
def test_a_device_killed_at_any_step_sends_the_same_bytes_and_is_counted_once(
    two_rounds: tuple[Site, Agent], step: str, tmp_path: Path
) -> None:
    site, member = two_rounds
    undisturbed = member.copied(tmp_path / "undisturbed")
    assert undisturbed.take_part() == TookPart(invited=1, trained=1, sent=1)
    killed = member.copied(tmp_path / "killed")
    command = [sys.executable, "-m", "tests.kill_rounds", str(killed.home.root), str(killed.text), step]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    killed.take_part()
    assert kept_contribution(killed, 1) == kept_contribution(undisturbed, 1)
    (standing,) = killed.command("federations", "status")["federations"]
    assert (standing["sent"], standing["last_round"], standing["last"]) == (1, 1, "sent")
    assert site.round(1)["received"] == 1
    assert site.round(1)["refused"] == {}


def test_what_comes_late_is_dropped_and_the_next_round_has_this_device(
    site: Site, agents: list[Agent]
) -> None:
    for agent in agents:
        agent.join("readers")
    late, other = agents
    late.without_sending()
    assert other.take_part().sent == 1
    site.pass_deadline()
    site.work()
    assert site.round(0)["counted"] == 1
    assert late.take_part() == TookPart(invited=1, trained=1, sent=1)
    (standing,) = late.command("federations", "status")["federations"]
    assert (standing["last_round"], standing["sent"]) == (1, 1)
    assert site.round(1)["received"] == 1


def test_a_deadline_that_passes_while_it_trains_ends_the_part(site: Site, agents: list[Agent]) -> None:
    for agent in agents:
        agent.join("readers")
    agents[0].without_sending()
    with site.api.service.database.write() as session:
        session.execute(update(tables.Round).values(deadline_at=tables.Round.opened_at))
    agents[0].take_part()
    (standing,) = agents[0].command("federations", "status")["federations"]
    assert (standing["last_round"], standing["last"], standing["sent"]) == (0, "late", 0)


def test_leaving_ends_everything_at_once_and_what_was_sent_is_not_counted(
    site: Site, agents: list[Agent]
) -> None:
    for agent in agents:
        agent.join("readers")
    assert agents[0].take_part().sent == 1
    assert site.round(0)["received"] == 1
    left = agents[0].command("federations", "leave", "readers")
    assert left == {"left": "readers", "service_told": True}
    assert site.round(0)["received"] == 0
    assert site.read()["members"] == 1
    assert list(agents[0].home.federations.iterdir()) == []
    assert agents[0].take_part() == TookPart(invited=0, trained=0, sent=0)
    assert agents[1].take_part().sent == 1
    site.pass_deadline()
    site.work()
    assert site.round(0)["counted"] == 1


def test_leaving_without_a_network_sends_nothing_and_is_told_later(
    site: Site, agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = agents[0]
    agent.join("readers")
    agent.without_sending()  # a contribution is ready
    with monkeypatch.context() as offline:
        offline.setattr(DeviceApi, "federations", no_network)
        left = agent.command("federations", "leave", "readers")
    assert left == {"left": "readers", "service_told": False}
    assert [path.name for path in agent.home.federations.glob("*/*")] != []
    assert not list(agent.home.federations.glob("*/rounds"))
    assert site.read()["members"] == 1
    assert agent.take_part() == TookPart(invited=0, trained=0, sent=0)
    assert site.read()["members"] == 0
    assert site.round(0)["received"] == 0
    assert list(agent.home.federations.iterdir()) == []


def test_a_device_that_left_while_it_trains_makes_nothing(
    site: Site, agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = agents[0]
    agent.join("readers")

    def leaves_meanwhile(*arguments: Any, **options: Any) -> Any:
        agent.command("federations", "leave", "readers")
        return take_local_steps(*arguments, **options)

    monkeypatch.setattr(part, "take_local_steps", leaves_meanwhile)
    with pytest.raises(OperatorError, match="leaving"):
        agent.take_part()
    assert site.round(0)["received"] == 0
    assert site.read()["members"] == 0


def test_forgetting_leaves_all_federations(site: Site, agents: list[Agent]) -> None:
    agents[0].join("readers")
    assert agents[0].take_part().sent == 1
    erased = agents[0].command("forget", "--yes")
    assert (erased["federations_left"], erased["service_told_of_leaving"]) == (1, True)
    assert site.read()["members"] == 0
    assert site.round(0)["received"] == 0
    assert not list(agents[0].home.federations.glob("*/*"))


def test_a_revoked_device_is_told_and_keeps_nothing_waiting(site: Site, agents: list[Agent]) -> None:
    agents[0].join("readers")
    device_id = require_enrolment(agents[0].home)[0].device_id
    assert site.api.post(f"/v1/devices/{device_id}/revoke").status_code == 200
    with pytest.raises(OperatorError):
        agents[0].take_part()
    assert site.read()["members"] == 0


def test_another_package_pauses_the_device_until_the_first_is_back(site: Site, agents: list[Agent]) -> None:
    agent = agents[0]
    agent.join("readers")
    installed = read_releases(agent.home)
    assert installed.installed is not None
    other = replace(installed.installed, manifest_digest="sha256:" + "0" * 64)
    write_record(agent.home.releases, replace(installed, installed=other))
    assert agent.take_part() == TookPart(invited=0, trained=0, sent=0)
    (standing,) = agent.command("federations", "status")["federations"]
    assert "another package" in standing["waiting_for"]
    write_record(agent.home.releases, installed)
    assert agent.take_part().sent == 1


def test_a_damaged_history_comes_again_and_another_one_is_refused(site: Site, agents: list[Agent]) -> None:
    for agent in agents:
        agent.join("readers")
        agent.take_part()
    site.work()
    for agent in agents:
        agent.take_part()
    (kept,) = agents[0].home.federations.glob("*/history.bin")
    data = kept.read_bytes()
    kept.write_bytes(data[:100] + b"x" + data[101:])
    agents[0].take_part()
    assert kept.read_bytes() == data
    # An older database: its federation is at the beginning again
    with site.api.service.database.write() as session:
        session.execute(update(tables.Federation).values(number=0))
    agents[1].take_part()
    (standing,) = agents[1].command("federations", "status")["federations"]
    assert "round-chain" in standing["waiting_for"]
    assert standing["rounds_done"] == 1
