"""Tests of maintenance windows: cron, durations, time zones and daylight saving time."""

import zoneinfo
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from permille.errors import InputError
from permille_rollouts.windows import Window, check_steps


@pytest.fixture
def no_system_zones() -> Iterator[None]:
    """Hide the time zones of the operating system. A small container or Android has none."""
    before = zoneinfo.TZPATH
    zoneinfo.reset_tzpath(to=[])
    zoneinfo.ZoneInfo.clear_cache()
    yield
    zoneinfo.reset_tzpath(to=before)
    zoneinfo.ZoneInfo.clear_cache()


def is_open(window: Window, moment: str) -> bool:
    return window.is_open(datetime.fromisoformat(moment).replace(tzinfo=UTC))


@pytest.mark.parametrize(
    ("cron", "minutes", "inside", "outside"),
    [
        (
            "0 2 * * *",
            120,
            ["2026-11-26 02:00", "2026-11-26 03:59"],
            ["2026-11-26 01:59", "2026-11-26 04:00"],
        ),
        ("30 23 * * *", 60, ["2026-11-26 23:30", "2026-11-27 00:29"], ["2026-11-27 00:30"]),
        ("*/20 8-9 * * *", 5, ["2026-11-26 09:44"], ["2026-11-26 09:45", "2026-11-26 10:01"]),
        (
            "0 0 * * 6,7",
            1440,
            ["2026-11-28 12:00", "2026-11-29 23:59"],
            ["2026-11-27 23:59", "2026-11-30 00:00"],
        ),
        ("0 0 * * 0", 60, ["2026-11-29 00:30"], ["2026-11-28 00:30"]),
        ("0 0 1 * 1", 60, ["2026-12-01 00:10", "2026-12-07 00:10"], ["2026-12-02 00:10"]),
        ("0 0 1 * *", 60, ["2026-12-01 00:10"], ["2026-12-07 00:10"]),
        ("0 0 * 12 *", 60, ["2026-12-09 00:10"], ["2026-11-09 00:10"]),
    ],
)
def test_a_window_is_open_from_its_time_for_its_minutes(
    cron: str, minutes: int, inside: list[str], outside: list[str]
) -> None:
    window = Window(cron=cron, minutes=minutes, zone="UTC")
    assert [moment for moment in inside if not is_open(window, moment)] == []
    assert [moment for moment in outside if is_open(window, moment)] == []


def test_a_zone_moves_the_window_and_its_clocks_change() -> None:
    window = Window(cron="0 3 * * *", minutes=30, zone="Europe/Berlin")
    assert is_open(window, "2026-07-01 01:10") and not is_open(window, "2026-07-01 02:10")
    assert is_open(window, "2026-12-01 02:10") and not is_open(window, "2026-12-01 01:10")


@pytest.mark.parametrize(
    ("zone", "cron", "minutes", "day_before", "opens"),
    [
        ("Europe/Berlin", "0 2 * * *", 180, "2026-03-28 23:00", "2026-03-29 01:00"),
        ("Europe/Berlin", "30 2 * * *", 10, "2026-03-28 23:00", "2026-03-29 01:00"),
        ("America/New_York", "15 2 * * 0", 60, "2026-03-08 05:00", "2026-03-08 07:00"),
        ("Asia/Beirut", "0 0 * * *", 60, "2026-03-28 20:00", "2026-03-28 22:00"),  # midnight is skipped
        ("Australia/Lord_Howe", "10 2 * * *", 20, "2026-10-03 14:00", "2026-10-03 15:30"),  # half an hour
        ("Pacific/Apia", "0 2 30 12 *", 60, "2011-12-30 00:00", "2011-12-30 10:00"),  # a whole day
    ],
)
def test_a_time_that_the_clocks_skip_opens_its_window_when_they_go_on(
    zone: str, cron: str, minutes: int, day_before: str, opens: str
) -> None:
    window = Window(cron=cron, minutes=minutes, zone=zone)
    begin = datetime.fromisoformat(day_before).replace(tzinfo=UTC)
    found = [at for ago in range(1380) if window.is_open(at := begin + timedelta(minutes=ago))]
    assert found[0] == datetime.fromisoformat(opens).replace(tzinfo=UTC)
    assert len(found) == minutes


def test_a_time_that_comes_twice_opens_the_window_twice() -> None:
    window = Window(cron="30 2 * * *", minutes=10, zone="Europe/Berlin")
    assert sum(is_open(window, f"2026-10-25 {hour:02d}:35") for hour in range(24)) == 2


def test_a_window_is_asked_in_any_zone() -> None:
    berlin = zoneinfo.ZoneInfo("Europe/Berlin")
    window = Window(cron="0 2 * * *", minutes=180, zone="Europe/Berlin")
    assert window.is_open(datetime(2026, 3, 29, 4, 30, tzinfo=berlin))
    assert not window.is_open(datetime(2026, 3, 29, 1, 59, tzinfo=berlin))


@pytest.mark.parametrize("cron", ["0 2 31 2 *", "0 2 30-31 2 *", "0 2 31 4,6,9,11 *"])
def test_times_that_never_come_are_refused(cron: str) -> None:
    with pytest.raises(InputError, match="never come: no such month has a day 3"):
        Window(cron=cron, minutes=60)
    Window(cron=f"{cron[:-1]}1", minutes=60)  # Mondays suffice then
    Window(cron="0 2 29 2 *", minutes=60)


def test_a_step_after_a_number_is_read_in_a_signed_window_and_refused_in_a_new_one() -> None:
    window = Window(cron="0/15 2 * * *", minutes=10, zone="UTC")
    assert is_open(window, "2026-07-01 02:05") and not is_open(window, "2026-07-01 02:20")
    check_steps("*/15 10-20/2,22 * * *")
    for cron, words in (("0/15 2 * * *", "'0/15'"), ("0 1,22/3 * * *", "'22/3'")):
        with pytest.raises(InputError, match=f"{words} .* a step needs"):
            check_steps(cron)


@pytest.mark.usefixtures("no_system_zones")
def test_a_zone_is_known_without_the_system_s_time_zones() -> None:
    window = Window(cron="30 2 * * *", minutes=10, zone="Europe/Berlin")
    assert is_open(window, "2026-07-01 00:35")


@pytest.mark.parametrize(
    ("cron", "minutes", "zone", "words"),
    [
        ("0 2 * *", 60, None, "five fields"),
        ("", 60, None, "five fields"),
        ("60 2 * * *", 60, None, "must lie within 0 to 59"),
        ("0 5-2 * * *", 60, None, "must lie within 0 to 23"),
        ("0 2 0 * *", 60, None, "must lie within 1 to 31"),
        ("*/0 2 * * *", 60, None, "not a time of a window"),
        ("*/00 2 * * *", 60, None, "not a time of a window"),
        ("@daily 2 * * *", 60, None, "not a time of a window"),
        ("0 2 * * *", 0, None, "1 to 1440 minutes"),
        ("0 2 * * *", 1441, None, "1 to 1440 minutes"),
        ("0 2 * * *", 60, "Mars/Olympus", "no time zone"),
        ("0 2 * * *", 60, "/etc/passwd", "no time zone"),
    ],
)
def test_what_is_no_window_is_refused_with_what_is_wrong(
    cron: str, minutes: int, zone: str | None, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        Window(cron=cron, minutes=minutes, zone=zone)
