"""Tests of the pooled state on a device: updates, checks at loading, and refusal of another history."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from permille.errors import PackageError
from permille_agent.state.home import Home
from permille_rounds.agent.membership import Membership, join, load_history, update_history
from permille_rounds.catch_up import encode_catch_up
from permille_rounds.definition import Definition
from permille_rounds.rounds import History, Round, combine
from tests.rounds.federations import KEY, make_contributions, make_definition

DEFINITION = make_definition()


def make_history(definition: Definition, rounds: int, *, seed: int = 0) -> tuple[History, list[Round]]:
    """Return a federation's history of `rounds` rounds, and the rounds."""
    history, made = History.begin(definition), []
    for number in range(rounds):
        made.append(combine(definition, number, make_contributions(history, 3, seed=seed + number)))
        history.apply(made[-1:])
    return history, made


def segment(history: History, rounds: Sequence[Round]) -> bytes:
    return encode_catch_up(None, [each.to_bytes() for each in rounds], history.head.signed(KEY))


@pytest.fixture
def membership(home: Home) -> Membership:
    return join(home, DEFINITION, federation_id="fed", name="readers")


def follow(membership: Membership, history: History, rounds: Sequence[Round]) -> History:
    """Update the device's history from a service that sends `rounds`."""

    def fetch(after: int, _limit_bytes: int) -> bytes:
        return segment(history, rounds[after:])

    return update_history(membership, DEFINITION, history.number, fetch)


def test_a_device_follows_round_by_round_and_after_a_restart(membership: Membership) -> None:
    for number in range(4):
        history, rounds = make_history(DEFINITION, number)
        found = follow(membership, history, rounds)
        kept = load_history(membership, DEFINITION)
        for each in (found, kept):
            assert (each.number, each.chain, each.reach) == (number, history.chain, history.reach)
            assert np.array_equal(each.s_W, history.s_W)


def test_nothing_is_fetched_where_nothing_is_new(membership: Membership) -> None:
    history, rounds = make_history(DEFINITION, 2)
    follow(membership, history, rounds)

    def fetch(_after: int, _limit_bytes: int) -> bytes:
        raise AssertionError("expected no call")

    assert update_history(membership, DEFINITION, 2, fetch).digest == history.digest


def test_another_history_is_refused_however_long_it_is_and_what_is_held_stays(membership: Membership) -> None:
    history, rounds = make_history(DEFINITION, 3)
    follow(membership, history, rounds)
    for length in (2, 4, 6):
        other, others = make_history(DEFINITION, length, seed=100)
        with pytest.raises(PackageError, match="round-chain"):
            follow(membership, other, others)
    longer, more = make_history(DEFINITION, 5)
    assert follow(membership, longer, more).digest == longer.digest


def test_a_damaged_file_is_told_and_what_is_signed_comes_again(membership: Membership) -> None:
    history, rounds = make_history(DEFINITION, 3)
    follow(membership, history, rounds)
    data = membership.history.read_bytes()
    for place in range(0, len(data), max(1, len(data) // 40)):
        membership.history.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        with pytest.raises(PackageError):
            load_history(membership, DEFINITION)
        assert follow(membership, history, rounds).chain == history.chain
        assert membership.history.read_bytes() == data


def test_a_head_that_another_key_signed_is_refused(membership: Membership, tmp_path: Path) -> None:
    history, rounds = make_history(DEFINITION, 1)
    data = segment(history, rounds)
    with pytest.raises(PackageError, match="round-signature"):
        update_history(membership, DEFINITION, 1, lambda *_: data[:-1] + bytes([data[-1] ^ 1]))
    assert not membership.history.exists()
