"""When a rollout goes on, and when it stops itself: a pure function of counts, rules and the time.

    draft -> running (wave 1, 2 ...) -> done
                  |-> paused -> running (counting anew), stopped
                  '-> stopped -> reverted

Reports are looked at when 20, 40, 80 ... of them are there. Look j may err with chance `ALPHA / 2**j` in all
its tests together, so watching a good version for ever stops it wrongly with chance `ALPHA` at most. The gate
at a wave's end is no test: its chance of a pause is that of more failures than the operator allows.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final

from permille.fleet.offer import ReportCode, RolloutState
from permille.fleet.statistics import lower_mean, lower_share

ALPHA: Final = 0.01
FIRST_LOOK: Final = 20
MAX_DIFFERENCE: Final = 0.25
"""Nats a token: a report's difference is clipped to this at both ends, so that none outweighs the others."""
WORSE_NATS: Final = 0.02
"""A device is worse where its retrained model lost more than this; training alone moves losses by less."""
LOSS_LIMIT: Final = 0.01
GENERAL_LIMIT: Final = 0.02
SAME_CODE: Final = 4
_TESTS: Final = 4


class Reason(StrEnum):
    """Why a rollout stopped itself.

    Attributes:
        FAILURES: the share of failures surely passes its limit.
        INTEGRITY: four devices found the same damage.
        WORSE: the share of devices that became worse surely passes its limit.
        LOSS: the mean loss after training surely rose by more than 0.01 nats a token.
        GENERAL: the mean loss on general text surely rose by more than 0.02 nats a token.
        SUCCESS: a wave ended with less success than it needs.
        SILENCE: too few devices of a wave reported in time.
        YANKED: the version was withdrawn.
    """

    FAILURES = "failures"
    INTEGRITY = "integrity"
    WORSE = "worse"
    LOSS = "loss"
    GENERAL = "general"
    SUCCESS = "success"
    SILENCE = "silence"
    YANKED = "yanked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """When a wave may end, and what stops a rollout.

    Attributes:
        waves: percentages of the group that are open in each wave, growing to 100.
        min_reports: of a wave's devices, before the next one opens; fewer where it has not as many.
        success_percent: of the devices that began, so those that have not ended yet count against it.
        failure_percent, worse_percent: shares that must not surely be passed.
        deadline_s: a device that began and has not reported after so long is silent.
    """

    waves: tuple[int, ...] = (1, 10, 50, 100)
    min_reports: int = 20
    soak_s: int = 86_400
    success_percent: float = 98.0
    failure_percent: float = 2.0
    worse_percent: float = 10.0
    deadline_s: int = 3 * 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Number, mean and standard deviation of some values."""

    n: int = 0
    mean: float = 0.0
    deviation: float = 0.0

    @classmethod
    def of_sums(cls, n: int, total: float, squares: float) -> "Moments":
        """From the sums of values and of their squares."""
        if n < 2:
            return cls(n=n, mean=total / max(n, 1))
        variance = max(0.0, (squares - total * total / n) / (n - 1))
        return cls(n=n, mean=total / n, deviation=math.sqrt(variance))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What was counted since the start, or since an operator resumed.

    Attributes:
        codes: devices by how they ended.
        damage: devices with a damaged package, by the code of the damage.
        judged, worse: devices that compared their models, and those that became worse.
        losses: differences of the loss after training, in nats a token.
        general: changes of the loss on general text, by device.
        wave_devices: devices of the open waves that have not ended before this count.
        wave_began, wave_ended, wave_ok: of these, those that began, that ended, and that ended well.
    """

    codes: Mapping[ReportCode, int] = field(default_factory=Counter)
    damage: Mapping[str, int] = field(default_factory=Counter)
    judged: int = 0
    worse: int = 0
    losses: Moments = Moments()
    general: Moments = Moments()
    wave_devices: int = 0
    wave_began: int = 0
    wave_ended: int = 0
    wave_ok: int = 0

    @property
    def ended(self) -> int:
        """Devices that have ended."""
        return sum(self.codes.values())

    @property
    def failed(self) -> int:
        """Devices that have ended otherwise than well."""
        return self.ended - self.codes.get(ReportCode.OK, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a running rollout stands: its wave from 0, since when that is open, and the looks taken."""

    wave: int
    opened_at: datetime
    looks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What follows: a state and a wave; for a stop the reason, and the numbers for the audit log."""

    state: RolloutState
    wave: int
    looks: int
    reason: Reason | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)


def look_at(looks: int) -> int:
    """Return at how many reports the next look is taken, after so many looks."""
    return FIRST_LOOK << looks


def advance(standing: Standing, rules: Rules, tally: Tally, now: datetime) -> Step:
    """Decide on a running rollout; call it as often as you like.

    Example:

        step = advance(Standing(wave=0, opened_at=begun), Rules(), tally, now)
        if step.reason is not None:
            print(f"stopped by {step.reason}: {step.numbers}")
    """
    looks = standing.looks
    count = max(tally.damage.values(), default=0)
    if count >= SAME_CODE:
        return _halt(standing, Reason.INTEGRITY, {"devices": count, "reports": tally.ended})
    while tally.ended >= look_at(looks):
        looks += 1
    if looks > standing.looks and (found := _look(tally, rules, ALPHA / 2**looks / _TESTS)) is not None:
        reason, numbers = found
        return _halt(standing, reason, {**numbers, "look": looks, "reports": tally.ended}, looks)
    return _gate(standing, rules, tally, now, looks)


def _look(tally: Tally, rules: Rules, alpha: float) -> tuple[Reason, dict[str, float]] | None:
    """Test what may be wrong; the first that surely is."""
    shares = (
        (Reason.FAILURES, tally.failed, tally.ended, rules.failure_percent / 100),
        (Reason.WORSE, tally.worse, tally.judged, rules.worse_percent / 100),
    )
    for reason, count, n, limit in shares:
        if n and (low := lower_share(count, n, alpha)) > limit:
            return reason, {"devices": count, "of": n, "lower_bound": low, "limit": limit, "alpha": alpha}
    means = ((Reason.LOSS, tally.losses, LOSS_LIMIT), (Reason.GENERAL, tally.general, GENERAL_LIMIT))
    for reason, values, limit in means:
        if (low := lower_mean(values.mean, values.deviation, values.n, alpha)) > limit:
            told = {"mean": values.mean, "of": values.n, "lower_bound": low, "limit": limit, "alpha": alpha}
            return reason, told
    return None


def _gate(standing: Standing, rules: Rules, tally: Tally, now: datetime, looks: int) -> Step:
    """Open the next wave, wait, or pause where waiting cannot help."""
    here = Step(state=RolloutState.RUNNING, wave=standing.wave, looks=looks)
    soaked_at = standing.opened_at + timedelta(seconds=rules.soak_s)
    if now < soaked_at:
        return here
    needed = min(rules.min_reports, tally.wave_devices)
    if tally.wave_ended < needed:
        if now < soaked_at + timedelta(seconds=rules.deadline_s):
            return here
        return _halt(standing, Reason.SILENCE, {"reports": tally.wave_ended, "needed": needed}, looks)
    if tally.wave_ok * 100 < rules.success_percent * tally.wave_began:
        if tally.wave_ended < tally.wave_began:
            return here
        numbers = {"ok": tally.wave_ok, "of": tally.wave_began, "needed_percent": rules.success_percent}
        return _halt(standing, Reason.SUCCESS, numbers, looks)
    if standing.wave + 1 == len(rules.waves):
        return Step(state=RolloutState.DONE, wave=standing.wave, looks=looks)
    return Step(state=RolloutState.RUNNING, wave=standing.wave + 1, looks=looks)


def _halt(standing: Standing, reason: Reason, numbers: Mapping[str, float], looks: int | None = None) -> Step:
    return Step(
        state=RolloutState.PAUSED,
        wave=standing.wave,
        looks=standing.looks if looks is None else looks,
        reason=reason,
        numbers=numbers,
    )
