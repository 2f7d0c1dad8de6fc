"""Tests of the daemon and rounds: the next part is found, trained in the child, and its failure is kept."""

import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from permille.errors import InputError, OperatorError
from permille_agent import embed
from permille_agent.daemon.loop import Daemon, World
from permille_agent.daemon.training_child import READY, AssignedTraining
from permille_agent.link.enrolment import Enrolment
from permille_agent.link.forget import forget
from permille_agent.state.choices import add_references
from permille_agent.state.home import Home
from permille_agent.state.policy import PowerAndLoad
from permille_agent.training.options import RunContext
from permille_rounds.agent import exchange, extension
from permille_rounds.agent.extension import EXTENSION, Rounds
from permille_rounds.agent.membership import drop_left, join, leave
from permille_rounds.agent.part import Invited, RoundPart, begin_part
from tests.rounds.federations import make_definition

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.fixture
def part(home: Home, tmp_path: Path) -> RoundPart:
    (tmp_path / "notes.txt").write_text("text of the user")
    add_references(home, [tmp_path / "notes.txt"])
    membership = join(home, make_definition(), federation_id="fed", name="readers")
    return begin_part(
        membership,
        Invited(
            number=3,
            deadline=NOW + timedelta(days=1),
            start_digest="sha256:" + "0" * 64,
            withdrawals=membership.choice().withdrawals,
        ),
    )


def daemon(home: Home, train: Callable[[AssignedTraining], str]) -> Daemon:
    world = World(
        train_assigned=lambda _home, request, _keep_going: train(request),
        machine=lambda: PowerAndLoad(on_ac=True, battery=None, load=0.0),
        now=lambda: NOW,
    )
    return Daemon(home, threading.Event(), world)


def test_the_daemon_orders_the_part_that_waits(home: Home, part: RoundPart, tmp_path: Path) -> None:
    requests: list[AssignedTraining] = []

    def train(request: AssignedTraining) -> str:
        requests.append(request)
        return READY

    assert daemon(home, train).train_if_wanted()
    order = f"{part.membership.path.name}/3"
    assert requests == [
        AssignedTraining(extension=EXTENSION.name, order=order, data_paths=(tmp_path / "notes.txt",))
    ]


def test_a_part_that_cannot_be_trained_is_not_tried_again(home: Home, part: RoundPart) -> None:
    def fail(_request: AssignedTraining) -> str:
        raise InputError("There is too little text: 1000 tokens are needed.")

    assert not daemon(home, fail).train_if_wanted()
    assert part.membership.has_ended(3)
    assert "1000 tokens" in part.membership.standing().last
    assert Rounds().waiting(home, now=NOW) is None


def test_a_part_whose_files_are_gone_ends_without_a_result(home: Home, part: RoundPart) -> None:
    def leave_meanwhile(_request: AssignedTraining) -> str:
        leave(part.membership)
        drop_left(part.membership, part.membership.choice())
        raise OperatorError("the folder of the part is gone")

    assert not daemon(home, leave_meanwhile).train_if_wanted()
    assert not part.membership.path.exists()


def test_a_part_is_not_wanted_any_more_when_the_user_has_left(home: Home, part: RoundPart) -> None:
    waiting = Rounds().waiting(home, now=NOW)
    assert waiting is not None and waiting.is_wanted()
    leave(part.membership)
    assert not waiting.is_wanted()
    assert Rounds().waiting(home, now=NOW) is None


def test_the_status_shows_each_federation_that_can_be_read(home: Home, part: RoundPart) -> None:
    part.membership.end(2, "sent")
    other = join(
        home, replace(make_definition(), minimum=make_definition().minimum + 1), federation_id="b", name="b"
    )
    (other.path / "standing.json").write_bytes(b"{")
    line = extension.status(home)
    assert line.words == "readers: after round 0, 1 contributions sent, the last one (round 2) sent"
    assert [type(one) for one in line.damaged] == [str]
    assert "standing.json" in line.damaged[0]


def test_an_order_for_a_round_that_is_over_is_refused(
    home: Home, enrolment: Enrolment, part: RoundPart
) -> None:
    part.erase()
    with pytest.raises(InputError, match="nothing to do for round 3"):
        Rounds().train(home, f"{part.membership.path.name}/3", [], RunContext())


def test_what_was_sent_is_told_by_federation(home: Home, part: RoundPart) -> None:
    part.membership.end(7, "sent")
    assert extension.sent(home) == "contributions of integers to readers: 1 (finished rounds: 0)"


def test_forgetting_keeps_only_choices_that_the_service_must_learn(home: Home, part: RoundPart) -> None:
    damaged = home.federations / ("0" * 64) / "joined.json"
    damaged.parent.mkdir()
    damaged.write_bytes(b"{")
    erased = forget(home)
    assert erased.federations_left == 1
    assert [path for path in home.federations.rglob("*") if path.is_file()] == [
        part.membership.path / "joined.json"
    ]
    assert not part.membership.choice().joined


def test_programs_that_embed_the_agent_can_take_part() -> None:
    assert embed.take_part is exchange.take_part
    assert embed.join_federation is exchange.join_federation
    assert embed.TookPart is exchange.TookPart
