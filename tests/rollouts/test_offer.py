"""Tests of a rollout's signed record: who takes part, and which records are refused."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from permille.errors import InputError
from permille_rollouts.offer import (
    MAX_MEMBERS,
    Choice,
    Facts,
    Offer,
    RolloutState,
    member_digest,
    members_of,
    place_of,
)
from permille_rollouts.windows import Window

FACTS = Facts(agent_version="0.10.2", engine="light", memory_bytes=8 << 30)
OFFER = Offer(
    rollout="rollout_a", version=2, state=RolloutState.RUNNING, places=10_000, choice=Choice(), window=None
)
DEVICES = [f"dev_{number}" for number in range(5000)]


def test_a_record_comes_back_as_it_was_written() -> None:
    chosen = Choice(agent_version="0.1.0", engines=("light",), memory_bytes=5, members=("ab", "cd"))
    window = Window(cron="0 2 * * 1-5", minutes=90, zone="Europe/Berlin")
    for offer in (OFFER, replace(OFFER, choice=chosen, places=700), replace(OFFER, window=window)):
        assert Offer.parse(offer.to_document()) == offer


@pytest.mark.parametrize(
    "change",
    [
        {"places": 10_001},
        {"places": -1},
        {"places": 1.5},
        {"places": True},
        {"version": 0},
        {"version": "2"},
        {"version": 1 << 60},
        {"rollout": 5},
        {"rollout": None},
        {"rollout": "../../runs?x"},
        {"state": "finished"},
        {"choice": None},
        {"choice": {}},
        {"window": {}},
        {"window": {"cron": "0 2 * * *", "minutes": 1e9, "zone": None}},
        {"window": {"cron": "61 2 * * *", "minutes": 60, "zone": None}},
        {"window": {"cron": "0 2 * * *", "minutes": 60, "zone": "../../etc/passwd"}},
        {"more": 1},
    ],
)
def test_what_is_no_record_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="record of a rollout"):
        Offer.parse({**OFFER.to_document(), **change})


@pytest.mark.parametrize(
    "change",
    [
        {"agent_version": 5},
        {"memory_bytes": "8"},
        {"memory_bytes": None},
        {"memory_bytes": float("nan")},
        {"engines": [{}]},
        {"engines": "light"},
        {"members": [["ab"]]},
        {"members": "ab"},
        {"members": ["ab"] * (MAX_MEMBERS + 1)},
    ],
)
def test_what_is_no_choice_is_refused(change: dict[str, Any]) -> None:
    document = OFFER.to_document()
    with pytest.raises(InputError, match="record of a rollout"):
        Offer.parse({**document, "choice": {**document["choice"], **change}})


def test_other_types_are_refused() -> None:
    others: list[object] = [None, 3, [], {}]
    for document in others:
        with pytest.raises(InputError):
            Offer.parse(document)


def test_waves_are_shares_of_the_devices_and_each_holds_the_one_before() -> None:
    open_at = [
        {one for one in DEVICES if replace(OFFER, places=100 * percent).is_for(one, FACTS)}
        for percent in (0, 1, 10, 50, 100)
    ]
    assert [len(found) for found in (open_at[0], open_at[-1])] == [0, len(DEVICES)]
    assert all(before < after for before, after in pairwise(open_at))
    assert 0.08 < len(open_at[2]) / len(DEVICES) < 0.12


def test_another_rollout_begins_with_other_devices() -> None:
    first, second = (
        {one for one in DEVICES if place_of(rollout, one) < 1000} for rollout in ("rollout_a", "rollout_b")
    )
    assert len(first & second) < len(first) / 4


@pytest.mark.parametrize("state", [state for state in RolloutState if state is not RolloutState.RUNNING])
def test_nobody_begins_unless_it_runs(state: RolloutState) -> None:
    assert not replace(OFFER, state=state).is_for("dev_1", FACTS)


@pytest.mark.parametrize(
    ("choice", "fits"),
    [
        (Choice(agent_version="0.9.9"), True),
        (Choice(agent_version="0.11.0"), False),
        (Choice(engines=("torch", "light")), True),
        (Choice(engines=("torch",)), False),
        (Choice(memory_bytes=8 << 30), True),
        (Choice(memory_bytes=9 << 30), False),
        (Choice(members=(member_digest("rollout_a", "dev_1"),)), True),
        (Choice(members=(member_digest("rollout_b", "dev_1"),)), False),
        (Choice(members=()), False),
    ],
)
def test_a_group_chooses_by_every_condition(choice: Choice, fits: bool) -> None:
    assert replace(OFFER, choice=choice).is_for("dev_1", FACTS) is fits


def test_a_group_of_too_many_named_devices_is_refused() -> None:
    assert len(members_of("rollout_a", DEVICES[:MAX_MEMBERS])) == MAX_MEMBERS
    with pytest.raises(InputError, match="at most"):
        members_of("rollout_a", DEVICES)
