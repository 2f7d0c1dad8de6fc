"""Tests of the policy: what it allows at which hour, and which files are valid."""

from datetime import datetime

import pytest

from permille.errors import InputError
from permille_agent.state.home import Home
from permille_agent.state.policy import (
    Policy,
    PowerAndLoad,
    read_machine,
    read_policy,
    reasons_to_stop,
    reasons_to_wait,
)

IDLE = PowerAndLoad(on_ac=True, battery=None, load=0.0)
NIGHT = Policy.model_validate({"hours": ["22:00-07:00"]})


def at(hour: int, minute: int = 0) -> datetime:
    return datetime(2026, 3, 1, hour, minute).astimezone()


def test_hours_may_pass_midnight() -> None:
    times = [(22, 0), (23, 59), (0, 0), (6, 59), (7, 0), (12, 0), (21, 59)]
    found = [reasons_to_wait(NIGHT, IDLE, now=at(*time), minutes_used=0.0) for time in times]
    assert [not reasons for reasons in found] == [True] * 4 + [False] * 3


def test_several_ranges_and_none() -> None:
    written = ["12:00-13:00", "18:30-19:00"]
    policy = Policy.model_validate({"hours": written})
    assert [str(hours) for hours in policy.hours] == written
    waits = {hour: reasons_to_wait(policy, IDLE, now=at(hour, 45), minutes_used=0.0) for hour in range(24)}
    assert [hour for hour, reasons in waits.items() if not reasons] == [12, 18]
    never = Policy.model_validate({"hours": []})
    assert all(reasons_to_wait(never, IDLE, now=at(hour), minutes_used=0.0) for hour in range(24))


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        (PowerAndLoad(on_ac=False, battery=90.0, load=0.0), "runs on battery"),
        (PowerAndLoad(on_ac=True, battery=49.0, load=0.0), "49%, below 50%"),
        (PowerAndLoad(on_ac=True, battery=100.0, load=0.51), "load is 0.51"),
    ],
)
def test_power_and_load_speak_against_training(machine: PowerAndLoad, reason: str) -> None:
    reasons = reasons_to_wait(Policy(), machine, now=at(12), minutes_used=0.0)
    assert [reason in text for text in reasons] == [True]


def test_the_minutes_of_a_day_run_out() -> None:
    assert not reasons_to_wait(Policy(), IDLE, now=at(12), minutes_used=56.9)
    assert reasons_to_wait(Policy(), IDLE, now=at(12), minutes_used=57.0)
    assert reasons_to_wait(Policy(minutes_per_day=0.0), IDLE, now=at(12), minutes_used=0.0)


def test_all_reasons_are_told_at_once() -> None:
    machine = PowerAndLoad(on_ac=False, battery=3.0, load=9.0)
    assert len(reasons_to_wait(NIGHT, machine, now=at(12), minutes_used=60.0)) == 5


def test_load_does_not_end_a_training_that_runs_but_a_pulled_plug_does() -> None:
    busy = PowerAndLoad(on_ac=True, battery=80.0, load=4.0)
    assert not reasons_to_stop(Policy(), busy, now=at(12))
    unplugged = PowerAndLoad(on_ac=False, battery=80.0, load=0.0)
    assert reasons_to_stop(Policy(), unplugged, now=at(12))
    assert reasons_to_stop(NIGHT, IDLE, now=at(7))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hour = ['22:00-07:00']", "hour: Extra"),
        ("hours = '22:00-07:00'", "hours: Input should be a valid tuple"),
        ("hours = ['22-7']", "HH:MM-HH:MM"),
        ("hours = ['24:00-07:00']", "HH:MM-HH:MM"),
        ("hours = ['09:00-09:00']", "the two times of .* must differ"),
        ("hours = [7]", "HH:MM-HH:MM"),
        ("require_ac = 1", "require_ac: Input should be a valid boolean"),
        ("min_battery = 101", "min_battery: .*less than or equal to 100"),
        ("min_battery = 50.5", "min_battery: .*valid integer"),
        ("min_battery = true", "min_battery: .*valid integer"),
        ("max_load = nan", "max_load: .*finite number"),
        ("max_load = -1.0", "max_load: .*greater than or equal to 0"),
        ("minutes_per_day = 1441", "minutes_per_day: .*less than or equal to 1440"),
        ("minutes_per_day = '60'", "minutes_per_day: .*valid number"),
        ("minutes_per_run = 0", "minutes_per_run: .*greater than or equal to 0.1"),
        ("hours = [", "is not valid TOML"),
        ("\xff\xfe", "is not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_by_key(home: Home, text: str, message: str) -> None:
    home.policy.write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=message) as refused:
        read_policy(home)
    assert "policy.toml" in str(refused.value)


def test_a_file_changes_only_what_it_names(home: Home) -> None:
    assert read_policy(home) == Policy()
    home.policy.write_text("max_load = 1\nhours = ['00:00-24:00']\n")
    assert read_policy(home) == Policy(max_load=1.0)
    assert [str(hours) for hours in read_policy(home).hours] == ["00:00-24:00"]


def test_this_machine_can_be_read() -> None:
    machine = read_machine()
    assert machine.load is None or machine.load >= 0.0
    assert machine.battery is None or 0.0 <= machine.battery <= 100.0
