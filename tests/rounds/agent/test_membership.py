"""Tests of joining and leaving: the user's choices are durable and counted."""

import pytest

from permille.errors import InputError, OperatorError, PackageError
from permille_agent.state.home import Home
from permille_rounds.agent.exchange import find_offer
from permille_rounds.agent.membership import drop_left, join, leave, memberships, named
from permille_rounds.schemas import FederationOffer, FederationState
from tests.rounds.federations import make_definition

FIRST, SECOND = make_definition(), make_definition(guard_bits=1)


def test_a_federation_is_found_by_its_name_and_by_its_digest(home: Home) -> None:
    first = join(home, FIRST, federation_id="fed_1", name="readers")
    for empty in ("", "sha256:"):
        with pytest.raises(InputError):
            named(home, empty)
    second = join(home, SECOND, federation_id="fed_2", name="writers")
    assert named(home, "readers") == named(home, FIRST.digest) == named(home, first.path.name[:9]) == first
    assert sorted(memberships(home), key=lambda each: each.choice().name) == [first, second]
    assert second.definition() == SECOND
    with pytest.raises(InputError):
        named(home, "nobody")


def _offer(digit: str, name: str) -> FederationOffer:
    return FederationOffer(
        id=f"fed_{digit * 26}",
        name=name,
        state=FederationState.RUNNING,
        release="chat",
        version=1,
        package_digest="sha256:" + digit * 64,
        definition_digest="sha256:" + digit * 64,
        number=0,
        rounds=5,
        adopted_round=None,
        member=False,
        target=3,
    )


def test_an_offer_is_found_by_name_or_digest_and_a_refusal_lists_both() -> None:
    first, second = _offer("1", "readers"), _offer("2", "readers")
    assert find_offer([first], "readers") == find_offer([first, second], "11") == first
    assert find_offer([first, second], second.definition_digest) == second
    with pytest.raises(InputError, match=r"2 offered .* readers \(1{12}\), readers \(2{12}\)\."):
        find_offer([first, second], "readers")
    for empty in ("", "sha256:"):
        with pytest.raises(InputError, match="Give one of these names"):
            find_offer([first], empty)
    with pytest.raises(InputError, match=r"^The service offers this device no federations\.$"):
        find_offer([], "readers")


def test_what_was_agreed_to_ends_with_leaving_and_joining_again_is_another_choice(home: Home) -> None:
    first = join(home, FIRST, federation_id="fed_1", name="readers")
    agreed = first.choice().withdrawals
    assert first.agrees(agreed)
    (first.path / "rounds" / "3").mkdir(parents=True)
    first.end(2, "sent")
    leave(first)
    assert not first.agrees(agreed) and not first.agrees(agreed + 1)
    assert sorted(path.name for path in first.path.iterdir()) == ["joined.json", "joined.lock"]
    join(home, FIRST, federation_id="fed_1", name="readers")
    assert first.agrees(agreed + 1) and not first.agrees(agreed)
    assert not first.has_ended(2)


def test_what_was_left_is_dropped_once_the_service_knows_unless_it_was_joined_again(home: Home) -> None:
    first = join(home, FIRST, federation_id="fed_1", name="readers")
    leave(first)
    said = first.choice()
    join(home, FIRST, federation_id="fed_1", name="readers")
    drop_left(first, said)
    assert first.choice().joined
    assert first.definition() == FIRST
    leave(first)
    drop_left(first, first.choice())
    assert memberships(home) == []
    assert not first.path.exists()


def test_a_damaged_choice_agrees_to_nothing_and_joining_writes_it_anew(home: Home) -> None:
    first = join(home, FIRST, federation_id="fed_1", name="readers")
    agreed = first.choice().withdrawals
    path = first.path / "joined.json"
    path.write_bytes(path.read_bytes().replace(b"true", b"null", 1))
    with pytest.raises(OperatorError, match="federations join"):
        first.agrees(agreed)
    join(home, FIRST, federation_id="fed_1", name="readers")
    assert first.choice().joined
    assert not first.agrees(agreed)


def test_a_definition_of_another_digest_is_refused(home: Home) -> None:
    first = join(home, FIRST, federation_id="fed_1", name="readers")
    (first.path / "definition.json").write_bytes(SECOND.to_bytes())
    with pytest.raises(PackageError, match="round-definition"):
        first.definition()


def test_a_round_ends_once(home: Home) -> None:
    first = join(home, FIRST, federation_id="fed_1", name="readers")
    assert not first.has_ended(0)
    first.end(4, "sent")
    first.end(5, "late")
    assert [first.has_ended(number) for number in (4, 5, 6)] == [True, True, False]
    assert (first.standing().sent, first.standing().last) == (1, "late")
