"""Maintenance windows: the times at which a device may begin to install a version.

A window opens at the times of a cron expression, and stays open for some minutes. The device uses
its own clock.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Final
from zoneinfo import ZoneInfo

from permille.errors import InputError

MAX_MINUTES: Final = 1440
_MINUTE: Final = timedelta(minutes=1)
# The number of days of each month, in a leap year. The index 0 stands for no month.
_LONGEST: Final = (0, 31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_RANGES: Final = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))
_PART: Final = re.compile(r"(?:\*|(\d{1,2})(?:-(\d{1,2}))?)(?:/(\d{1,2}))?", re.ASCII)
_UNCLEAR: Final = re.compile(r"(?<![-\d])\d+/\d*", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Times at which a device may begin to install.

    Attributes:
        cron: minute, hour, day of the month, month and weekday (0 and 7 are Sunday). Each is `*`, a
            number, a range `1-5`, or several of these with commas. `*` and ranges may have a step: `*/15`. If
            both the day of the month and the weekday are restricted, one of them must fit, as in cron.
        minutes: how long the window stays open, 1 to 1440.
        zone: a time zone such as `Europe/Berlin`; None for the device's own.

    Example:
        >>> from datetime import UTC
        >>> nights = Window(cron="0 2 * * 1-5", minutes=180, zone="UTC")
        >>> nights.is_open(datetime(2026, 11, 26, 4, 59, tzinfo=UTC))
        True
        >>> nights.is_open(datetime(2026, 11, 26, 5, 0, tzinfo=UTC))
        False
    """

    cron: str
    minutes: int
    zone: str | None = None

    def __post_init__(self) -> None:
        """Raise InputError for a time that never comes, a wrong duration or an unknown time zone."""
        _, _, days, months, _ = _fields(self.cron)
        if not self._is_either and all(min(days) > _LONGEST[month] for month in months):
            raise InputError(f"The times {self.cron!r:.80} never come: no such month has a day {min(days)}.")
        if type(self.minutes) is not int or not 1 <= self.minutes <= MAX_MINUTES:
            raise InputError(f"A window is open for 1 to {MAX_MINUTES} minutes, got {self.minutes!r}.")
        _zone(self.zone)

    def is_open(self, at: datetime) -> bool:
        """Return whether the window is open at an aware time.

        A time that the clocks skip counts as the first minute after it, as in cron. A time that comes twice
        opens the window twice.
        """
        fields, zone = _fields(self.cron), _zone(self.zone)
        # Step back in real time, then convert to local time: subtraction in a local zone ignores its changes.
        now = at.astimezone(UTC)
        shown = [
            (now - _MINUTE * ago).astimezone(zone).replace(tzinfo=None) for ago in range(self.minutes + 1)
        ]
        for begin, earlier in pairwise(shown):
            # More than one minute has passed only if the clocks were set forward. It comes to less if back.
            passed = max((begin - earlier) // _MINUTE, 1)
            if any(self._begins(begin - _MINUTE * ago, fields) for ago in range(passed)):
                return True
        return False

    @property
    def _is_either(self) -> bool:
        """Return whether one of the day fields suffices. As in cron, both must be restricted for that."""
        parts = self.cron.split()
        return not (parts[2].startswith("*") or parts[4].startswith("*"))

    def _begins(self, begin: datetime, fields: list[set[int]]) -> bool:
        minutes, hours, days, months, weekdays = fields
        fits = (begin.day in days, begin.isoweekday() % 7 in weekdays)
        return (
            begin.minute in minutes
            and begin.hour in hours
            and begin.month in months
            and (any(fits) if self._is_either else all(fits))
        )


def check_steps(cron: str) -> None:
    """Raise InputError for a step after a single number.

    Some programs read `0/15` as `0-59/15`, and others as `0`, so a new window must not have such a step. In a
    window that is already signed, it changes nothing.
    """
    found = _UNCLEAR.search(cron)
    if found is not None:
        raise InputError(f"{found[0]!r:.40} is not a time of a window: a step needs `*` or a range.")


def _fields(cron: str) -> list[set[int]]:
    parts = cron.split()
    if len(parts) != len(_RANGES):
        raise InputError(
            f"A window's times are five fields (minute, hour, day, month, weekday), got {cron!r:.80}. For "
            "example `0 2 * * *`: each night at two."
        )
    fields = [_values(part, low, high) for part, (low, high) in zip(parts, _RANGES, strict=True)]
    # In cron, both 0 and 7 mean Sunday.
    fields[4] = {weekday % 7 for weekday in fields[4]}
    return fields


def _values(text: str, low: int, high: int) -> set[int]:
    found = set[int]()
    for part in text.split(","):
        match = _PART.fullmatch(part)
        first, last, step = match.groups() if match else (None, None, "0")
        begin = low if first is None else int(first)
        end = int(last) if last is not None else high if first is None else begin
        stride = int(step or 1)
        if not low <= begin <= end <= high or not stride:
            raise InputError(
                f"{part!r:.40} is not a time of a window: it must lie within {low} to {high}, and a step is "
                "at least 1."
            )
        found.update(range(begin, end + 1, stride))
    return found


def _zone(name: str | None) -> ZoneInfo | None:
    try:
        return None if name is None else ZoneInfo(name)
    except (KeyError, ValueError, TypeError, OSError) as exc:  # ValueError: a path out of the zone folder
        raise InputError(
            f"There is no time zone {name!r:.80} here. Give a name such as `Europe/Berlin`."
        ) from exc
