"""Training policy of the daemon: hours, power, load and minutes a day, from `policy.toml`.

    hours = ["22:00-07:00"]     # local time; a range may pass midnight; [] means never
    require_ac = true           # only while plugged in (machines without a battery always are)
    min_battery = 50            # percent, checked where there is a battery
    max_load = 0.5              # load average of one minute per core, before training starts
    minutes_per_day = 60          # of training; an unfinished run continues the next day
    minutes_per_run = 30          # including the judgement; default: the release's steps, else 30 min
    method = "zeroth-order"       # or "gradient"; by default the release or the engine decides
    report_loss = "number"        # report a new version's change of the loss as a number, or as one "bit"
    tags = ["canary"]             # operators may choose devices for a new version by these tags

All keys are optional. An unknown key is an error, because a typing error must not switch off a limit.
"""

import os
import re
import tomllib
from dataclasses import dataclass
from datetime import datetime, time
from typing import Annotated, Literal

import psutil
from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from permille.choices import Method
from permille.errors import InputError
from permille.schemas.fields import Name
from permille_agent.state.home import Home

_HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)|00:00-24:00", re.ASCII)
LIMIT_BYTES = 64 << 10
# Share of the day's minutes after which no training starts. Loading the model would use up the rest.
LAST_START = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Hours:
    """Hours from `start` up to, but not including, `end`.

    The hours span midnight if `end` is not later than `start`.
    """

    start: time
    end: time

    def __str__(self) -> str:
        """Return the hours as the file writes them."""
        return "00:00-24:00" if self == ALWAYS else f"{self.start:%H:%M}-{self.end:%H:%M}"

    def contain(self, moment: time) -> bool:
        """Return whether local time `moment` is within these hours."""
        if self.start < self.end:
            return self.start <= moment < self.end
        return moment >= self.start or moment < self.end


ALWAYS = Hours(start=time(0), end=time(0))


def _read_hours(item: object) -> Hours:
    if not isinstance(item, str) or _HOURS.fullmatch(item) is None:
        raise ValueError(f'write hours as "HH:MM-HH:MM", from 00:00 to 23:59, not {item!r}')
    if item == "00:00-24:00":
        return ALWAYS
    start, end = (time.fromisoformat(part) for part in item.split("-"))
    if start == end:
        raise ValueError(f'the two times of {item!r} must differ; all day is "00:00-24:00"')
    return Hours(start=start, end=end)


_WrittenHours = Annotated[Hours, BeforeValidator(_read_hours)]


class Policy(BaseModel, frozen=True, extra="forbid", strict=True):
    """Conditions under which the daemon may train. The defaults suit a laptop in daily use."""

    hours: Annotated[tuple[_WrittenHours, ...], Field(strict=False)] = (ALWAYS,)
    require_ac: bool = True
    min_battery: Annotated[int, Field(ge=0, le=100)] = 50
    max_load: Annotated[float, Field(ge=0, le=1000, allow_inf_nan=False)] = 0.5
    minutes_per_day: Annotated[float, Field(ge=0, le=1440)] = 60.0
    minutes_per_run: Annotated[float | None, Field(ge=0.1, le=1440)] = None
    method: Annotated[Method | None, Field(strict=False)] = None
    report_loss: Literal["number", "bit"] = "number"
    tags: Annotated[tuple[Name, ...], Field(strict=False, max_length=20)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerAndLoad:
    """Measurements that the policy checks.

    Attributes:
        on_ac: whether the machine is plugged in or has no battery.
        battery: charge in percent, or None without a battery.
        load: load average of one minute per core, or None if unknown.
    """

    on_ac: bool
    battery: float | None
    load: float | None


def reasons_to_wait(
    policy: Policy, machine: PowerAndLoad, *, now: datetime, minutes_used: float
) -> tuple[str, ...]:
    """Return all reasons against a training that starts at local time `now`, after `minutes_used` today.

    Example:
        >>> machine = PowerAndLoad(on_ac=False, battery=80.0, load=0.1)
        >>> reasons_to_wait(Policy(), machine, now=datetime(2026, 3, 1, 12), minutes_used=0.0)
        ('the machine runs on battery',)
    """
    reasons = reasons_to_stop(policy, machine, now=now)
    if machine.load is not None and machine.load > policy.max_load:
        reasons.append(f"the load is {machine.load:.2f} a core, above {policy.max_load:.2f}")
    if minutes_used >= LAST_START * policy.minutes_per_day:
        reasons.append(f"{minutes_used:.0f} of {policy.minutes_per_day:g} minutes of today are used")
    return tuple(reasons)


def reasons_to_stop(policy: Policy, machine: PowerAndLoad, *, now: datetime) -> list[str]:
    """Return all reasons against a running training. The load is ignored, because training raises it."""
    reasons = []
    if not any(hours.contain(now.time()) for hours in policy.hours):
        reasons.append(f"{now:%H:%M} is outside of the allowed hours")
    if policy.require_ac and not machine.on_ac:
        reasons.append("the machine runs on battery")
    if machine.battery is not None and machine.battery < policy.min_battery:
        reasons.append(f"the battery is at {machine.battery:.0f}%, below {policy.min_battery}%")
    return reasons


def read_machine() -> PowerAndLoad:
    """Read power and load now. A machine that reports no battery counts as plugged in."""
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    return PowerAndLoad(
        # If the state of the plug is unknown (None), the machine counts as plugged in.
        on_ac=battery is None or battery.power_plugged is not False,
        battery=None if battery is None else float(battery.percent),
        load=_load(),
    )


def read_policy(home: Home) -> Policy:
    """Read the user's policy. Without a file, return the defaults.

    Raises:
        InputError: the file is not TOML, or a value is not valid. The message names the key.
    """
    try:
        with home.policy.open("rb") as file:
            data = file.read(LIMIT_BYTES + 1)
    except FileNotFoundError:
        return Policy()
    except OSError as exc:
        raise InputError(f"Cannot read {home.policy}: {exc}") from exc
    if len(data) > LIMIT_BYTES:
        raise InputError(f"{home.policy} is larger than {LIMIT_BYTES} bytes.")
    try:
        return Policy(**tomllib.loads(data.decode()))
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        raise InputError(f"{home.policy}: {first['loc'][0]}: {first['msg']}, got {first['input']!r}") from exc
    except ValueError as exc:
        raise InputError(f"{home.policy} is not valid TOML: {exc}") from exc


def _load() -> float | None:
    try:
        return float(psutil.getloadavg()[0]) / (os.cpu_count() or 1)
    except OSError:
        return None
