"""Devices in rounds of the real service: they join, train, send, follow, adopt and leave."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sqlalchemy import update

from permille.errors import InputError, OperatorError
from permille.package.blobs import BlobFolder
from permille.package.reader import Package
from permille.store import tables
from permille.zo.estimators import Batch
from permille.zo.lattice import values
from permille_agent.cli.main import main
from permille_agent.link.client import ServiceUnavailableError
from permille_agent.link.enrolment import require_enrolment
from permille_agent.state.home import write_record
from permille_agent.state.models import active_model, read_releases
from permille_agent.training.adopted import adopted_round, adopted_state
from permille_agent.training.options import RunContext, Start, TrainOptions
from permille_agent.training.outcome import RunResult
from permille_agent.training.personal import model_values
from permille_agent.training.run import BegunRun, find_run
from permille_agent.training.train import run_training
from permille_rounds.agent import part
from permille_rounds.agent.calls import FederationsApi
from permille_rounds.agent.exchange import TookPart
from permille_rounds.local import take_local_steps
from tests.bigram_engine import BigramEngine
from tests.integration.agent_site import ROOT
from tests.preloaded import run
from tests.rounds.agent.kill_rounds import STEPS
from tests.rounds.agent.site import GRADIENT, Agent, Service, make_agent, rounds_service
from tests.rounds.site import Site, make_site


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with rounds_service(tmp_path / "service") as service:
        yield service


@pytest.fixture
def site(service: Service) -> Site:
    return make_site(service.api, **GRADIENT)


@pytest.fixture
def agents(service: Service, site: Site, tmp_path: Path) -> list[Agent]:
    return [make_agent(service, tmp_path / f"device-{number}", number) for number in range(2)]


def test_two_devices_join_train_and_follow_to_one_state(site: Site, agents: list[Agent]) -> None:
    for agent in agents:
        offered = agent.command("federations", "list")["federations"]
        assert [(offer["name"], offer["member"]) for offer in offered] == [("readers", False)]
        joined = agent.command("federations", "join", "readers", "--yes", "--few-devices")
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
    """Make a federation with a round that one member missed. It must catch up before it takes part."""
    folder = tmp_path_factory.mktemp("kills")
    with rounds_service(folder / "service") as service:
        site = make_site(service.api, **GRADIENT)
        agents = [make_agent(service, folder / f"device-{number}", number) for number in range(2)]
        for agent in agents:
            agent.join("readers")
        assert agents[1].take_part().sent == 1
        site.pass_deadline()
        site.work()
        assert site.read()["number"] == 1
        yield site, agents[0]


def no_network(_api: FederationsApi) -> None:
    raise ServiceUnavailableError("expected an answer, there is no network")


def kept_contribution(agent: Agent, number: int) -> bytes:
    (path,) = agent.home.federations.glob(f"*/rounds/{number}/contribution.bin")
    return path.read_bytes()


SHORT = ("step-durable", "contribution-kept", "contribution-sent")
"""The steps of `make test`. The others are slow."""


@pytest.mark.parametrize(
    "step",
    [step if step in SHORT else pytest.param(step, marks=pytest.mark.slow) for step in STEPS],
)
def test_a_device_killed_at_any_step_sends_the_same_bytes_and_is_counted_once(
    two_rounds: tuple[Site, Agent], step: str, tmp_path: Path
) -> None:
    site, member = two_rounds
    undisturbed = member.copied(tmp_path / "undisturbed")
    assert undisturbed.take_part() == TookPart(invited=1, trained=1, sent=1)
    killed = member.copied(tmp_path / "killed")
    command = [
        sys.executable,
        "-m",
        "tests.rounds.agent.kill_rounds",
        str(killed.home.root),
        str(killed.text),
        step,
    ]
    ended = run(command, cwd=ROOT)
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
        offline.setattr(FederationsApi, "offers", no_network)
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
    with pytest.raises(OperatorError, match="Leaving"):
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
    # This is like a restored older database: the federation is at its beginning again.
    with site.api.service.database.write() as session:
        session.execute(update(tables.Federation).values(number=0))
    agents[1].take_part()
    (standing,) = agents[1].command("federations", "status")["federations"]
    assert "round-chain" in standing["waiting_for"]
    assert standing["rounds_done"] == 1


class Stuck(BigramEngine):
    """An engine whose gradient is NaN, so that training takes no step."""

    def gradient(self, values_K: NDArray[np.float32], batch: Batch) -> tuple[float, NDArray[np.float32]]:
        loss, gradient_K = super().gradient(values_K, batch)
        return loss, np.full_like(gradient_K, np.nan)


def train(agent: Agent, engine: type[BigramEngine] = BigramEngine, **changes: Any) -> RunResult:
    options = TrainOptions(steps=40, batch_rows=2, row_tokens=32, **changes)
    return run_training(agent.home, [agent.text], options, RunContext(engine_of=engine))


def test_an_adopted_round_is_where_training_begins_and_alone_a_candidate(
    site: Site, agents: list[Agent]
) -> None:
    for agent in agents:
        agent.join("readers")
    for _ in range(4):
        for agent in agents:
            agent.take_part()
        site.work()
    assert train(agents[1]).outcome == "adopted"
    adopted = site.api.post(f"{site.path}/adoptions", {"round": 3, "reason": "two devices are all there are"})
    assert adopted.status_code == 201, adopted.text
    for agent in agents:
        agent.take_part()
        (standing,) = agent.command("federations", "status")["federations"]
        assert (standing["adopted_round"], standing["rounds_done"]) == (3, 4)
    start = adopted_round(agents[0].home, site.definition.log.package_digest)
    assert start is not None
    assert start.state_digest == adopted.json()["state_digest"]

    alone = train(agents[0], Stuck)  # Training takes no step, so the pooled state is judged.
    assert alone.decision is not None
    assert (alone.outcome, alone.decision.step) == ("adopted", 0)
    active = active_model(agents[0].home)
    assert active is not None
    package = Package.open(BlobFolder(agents[0].home.blobs), active.package)
    adopted = adopted_state(agents[0].home, package, start.start)
    pooled_K = values(package.values(), adopted.s_K, adopted.header.step_unit_exponent)
    assert np.array_equal(model_values(agents[0].home, active, package), pooled_K)

    own = train(agents[0], seed=1)  # This continues from the active model, which is that state.
    assert own.decision is not None
    assert own.decision.loss_personal is not None and alone.decision.loss_personal is not None
    assert own.decision.loss_personal < alone.decision.loss_personal

    # The adopted round is tried before the device's earlier personal model is continued.
    first = train(agents[1], seed=2)
    begun = find_run(agents[1].home, first.run).require("run", BegunRun).definition
    assert begun.start == start.start
    assert train(agents[1], seed=2).known
    again = train(agents[1], seed=3)
    begun = find_run(agents[1].home, again.run).require("run", BegunRun).definition
    assert begun.start == active_run_before(agents[1], again)


def active_run_before(agent: Agent, result: RunResult) -> str | None:
    """Return the run that was active when a run was decided."""
    assert result.decision is not None
    return result.decision.incumbent.run


def test_a_federation_that_was_left_is_no_start(site: Site, agents: list[Agent]) -> None:
    agents[0].join("readers")
    agents[0].take_part()
    site.pass_deadline()
    site.work()
    site.api.post(f"{site.path}/adoptions", {"round": 0, "reason": "test"})
    agents[0].take_part()
    package = site.definition.log.package_digest
    assert adopted_round(agents[0].home, package) is not None
    agents[0].command("federations", "leave", "readers")
    assert adopted_round(agents[0].home, package) is None
    with pytest.raises(InputError, match="No round was adopted"):
        train(agents[0], start=Start.ROUND)


@pytest.mark.attack(13, "an operator's federation publishes the sum of one device, and its owner is not told")
def test_nobody_joins_sums_over_few_devices_unawares(site: Site, agents: list[Agent]) -> None:
    join = ("federations", "join", "readers", "--yes")
    assert agents[0].command(*join, code=3) is None
    assert not agents[0].home.federations.exists()
    assert "sees what this device sent" in agents[0].command(*join, "--few-devices")["warning"]


def test_joining_shows_what_leaves_and_asks(service: Service, site: Site, agents: list[Agent]) -> None:
    agent = agents[0]
    asked = subprocess.run(
        [
            sys.executable,
            "-m",
            "permille_agent",
            "--home",
            str(agent.home.root),
            "federations",
            "join",
            "readers",
        ],
        cwd=ROOT,
        input="n\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert asked.returncode == 130
    shown = " ".join(asked.stdout.split())
    told = ("at least 1, else nothing is published. The service wants 2.", "sees what this device sent")
    for said in (
        "129 integers: 64 for each of 2 steps",
        "Text never leaves",
        "The service sees",
        "no noise is added",
        *told,
    ):
        assert said in shown
    assert "Send this from" in asked.stderr
    assert "You did not join" in asked.stderr
    assert not agent.home.federations.exists()
    assert site.read()["members"] == 0
    assert agent.take_part() == TookPart(invited=0, trained=0, sent=0)
    assert agent.command("federations", "join", "nobody", "--yes", code=3) is None


def test_people_read_lists_of_federations_as_lines(
    site: Site, agents: list[Agent], capsys: pytest.CaptureFixture[str]
) -> None:
    home = str(agents[0].home.root)
    assert main(["--home", home, "federations", "status"]) == 0
    assert capsys.readouterr().out.split() == ["federations", "none"]
    assert main(["--home", home, "federations", "list"]) == 0
    shown = capsys.readouterr().out
    assert "name: readers" in shown
    assert "adopted round: -" in shown
    assert "{" not in shown


def test_too_little_text_ends_the_part_and_says_why(service: Service, site: Site, tmp_path: Path) -> None:
    agent = make_agent(service, tmp_path / "quiet", 5, lines=10)
    agent.join("readers")
    assert agent.take_part() == TookPart(invited=1, trained=0, sent=0)
    (standing,) = agent.command("federations", "status")["federations"]
    assert standing["last"].startswith("failed: There is too little text")
    assert agent.take_part() == TookPart(invited=0, trained=0, sent=0)


ZEROTH_ORDER = {
    "method": "zeroth-order",
    "queries": 4,
    "local_steps": 1,
    "learning_rate": 0.05,
    "epsilon": 0.01,
    "steps": 3,
}
ESTIMATORS: dict[str, dict[str, Any]] = {
    "spsa": {"estimator": "spsa"},
    "forward": {"estimator": "forward"},
    "one-sided": {"estimator": "one_sided"},
    "split": {"estimator": "split", "queries": 10},
}


@pytest.mark.slow
def test_rounds_of_every_estimator_by_text_of_every_size(
    service: Service, site: Site, agents: list[Agent], tmp_path: Path
) -> None:
    agents = [agents[0], make_agent(service, tmp_path / "little", 7, lines=150)]
    sites = {
        name: make_site(service.api, **GRADIENT | ZEROTH_ORDER | changes | {"name": name})
        for name, changes in ESTIMATORS.items()
    }
    for agent in agents:
        for name in sites:
            agent.join(name)
    for number in range(2):
        assert [agent.take_part() for agent in agents] == [TookPart(invited=4, trained=4, sent=4)] * 2
        for each in sites.values():
            each.work()
            assert (each.round(number)["counted"], each.round(number)["refused"]) == (2, {})
    for name, each in sites.items():
        assert each.round(1)["mean_gain"] != 0.0, name
