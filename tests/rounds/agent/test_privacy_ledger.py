"""Tests of the device's privacy ledger: each contribution is charged once, and the promised limit holds."""

from pathlib import Path

import pytest

from permille.errors import InputError
from permille_agent.state.home import Home, open_home
from permille_rounds.agent.ledger import charge, is_used_up, read_ledger
from tests.rounds.federations import make_definition
from tests.rounds.private import make_private

RULES = make_private()
SENT, OTHER = ("sha256:" + digit * 64 for digit in "ab")


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return open_home(tmp_path / "home")


def charge_round(home: Home, number: int, digest: str = SENT) -> None:
    charge(home, RULES, name="readers", number=number, digest=digest)


def test_the_same_bytes_cost_once_and_others_are_not_sent(home: Home) -> None:
    for _ in range(3):
        charge_round(home, 0)
    with pytest.raises(InputError, match="has left this device already"):
        charge_round(home, 0, OTHER)
    account = read_ledger(home).accounts[RULES.digest]
    assert account.rounds == {"0": SENT}
    assert RULES.privacy is not None
    assert account.dp_epsilon(1) == RULES.privacy.dp_epsilon(1)


def test_no_more_rounds_are_charged_than_were_promised(home: Home) -> None:
    for number in range(3):
        assert not is_used_up(home, RULES)
        charge_round(home, number)
    assert is_used_up(home, RULES)
    with pytest.raises(InputError, match="All 3 rounds"):
        charge_round(home, 3)
    charge_round(home, 2)


def test_rounds_without_privacy_are_not_charged(home: Home) -> None:
    charge(home, make_definition(), name="open", number=0, digest=SENT)
    assert not home.ledger.exists()
    assert not is_used_up(home, make_definition())


def test_a_damaged_ledger_lets_nothing_leave(home: Home) -> None:
    charge_round(home, 0)
    data = home.ledger.read_bytes()
    for damaged in (b"", data[:-9], data.replace(b'"0"', b'"1"')):
        home.ledger.write_bytes(damaged)
        with pytest.raises(InputError, match="Cannot read the privacy ledger"):
            charge_round(home, 1)


def test_a_ledger_that_cannot_be_written_lets_nothing_leave(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("permille_rounds.agent.ledger.write_record", full)
    with pytest.raises(OSError, match="No space"):
        charge_round(home, 0)
    assert not read_ledger(home).accounts
