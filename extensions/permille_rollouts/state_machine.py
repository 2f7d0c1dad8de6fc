"""State machine of a rollout: it decides from counts, rules and time when to go on or to stop.

    draft -> running (wave 1, 2 ...) -> done
                  |-> paused -> running (counting anew), stopped
                  '-> stopped -> reverted

`advance` is a pure function. It tests the reports for harm when there are 20, 40, 80, ... reports. Each such
occasion is a *look*. All tests of look j (j = 1, 2, ...) together raise a false alarm with a probability of
at most `ALPHA / 2**j`. So the probability of stopping a good version is at most `ALPHA`, however long the
rollout runs.

The gate at the end of a wave is not a statistical test. It compares the success rate with the rate
that the operator demands.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import pairwise
from typing import Final

from permille.confidence import lower_mean, lower_share
from permille.errors import InputError
from permille_rollouts.offer import PARTS, ReportCode, RolloutState

ALPHA: Final = 0.01
FIRST_LOOK: Final = 20
# The largest loss difference that a device reports, in nats per token. Devices clip larger differences, so
# that no report dominates a mean.
MAX_DIFFERENCE: Final = 0.25
# A model counts as worse if its loss rises by more than this, in nats per token. Random differences between
# trainings are smaller.
WORSE_NATS: Final = 0.02
# Limits for the mean rise of the loss on the device's own and on general text, in nats per token.
LOSS_LIMIT: Final = 0.01
GENERAL_LIMIT: Final = 0.02
# The rollout halts once this many devices found the same damage: no single device can then be its cause.
SAME_CODE: Final = 4
# Two shares and two means are tested at each look, so each test gets a quarter of the look's probability of a
# false alarm.
_TESTS: Final = 4


class Reason(StrEnum):
    """The reason for which a rollout halted itself.

    Attributes:
        FAILURES: the share of failures is significantly above its limit.
        INTEGRITY: four devices found the same damage in the package.
        WORSE: the share of devices whose model became worse is significantly above its limit.
        LOSS: the mean loss after training rose by significantly more than 0.01 nats per token.
        GENERAL: training raises the loss on general text more than with the old version. The mean difference
            is significantly above 0.02 nats per token. Devices round each rise to 0.01, so the mean may be
            off by 0.01.
        SUCCESS: a wave ended with a success rate below its limit.
        SILENCE: too few devices of a wave reported in time.
        YANKED: the version was yanked.
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
    """Conditions that end a wave, and limits that stop a rollout.

    Attributes:
        waves: the size of each wave, as a share (`"10%"`) or a number (`"50"`) of the group's devices.
            Each size includes the earlier waves. The last is `"100%"`.
        min_reports: the number of reports that a wave needs before the next one opens. A wave with fewer
            devices needs a report from each of them.
        soak_s: the least number of seconds that a wave stays open before the next one opens.
        success_percent: the success rate that a wave needs, among the devices that began. A device
            that has not ended yet does not count as a success.
        failure_percent, worse_percent: limits of the shares of failures and of worse models.
        deadline_s: a device that began, and sent no result within this number of seconds, counts as silent.
        approval: waves after the first also wait until an operator, or a program, approves them.
    """

    waves: tuple[str, ...] = ("1%", "10%", "50%", "100%")
    min_reports: int = 20
    soak_s: int = 86_400
    success_percent: float = 98.0
    failure_percent: float = 2.0
    worse_percent: float = 10.0
    deadline_s: int = 3 * 86_400
    approval: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Number, mean and standard deviation of some values."""

    n: int = 0
    mean: float = 0.0
    deviation: float = 0.0

    @classmethod
    def of_sums(cls, n: int, total: float, squares: float) -> "Statistics":
        """Compute mean and deviation from the sum of the values and the sum of their squares."""
        if n < 2:
            return cls(n=n, mean=total / max(n, 1))
        # Rounding may make the difference slightly negative.
        variance = max(0.0, (squares - total * total / n) / (n - 1))
        return cls(n=n, mean=total / n, deviation=math.sqrt(variance))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Counts of reports since the start, or since an operator resumed.

    Attributes:
        codes: the number of devices for each report code.
        damage: the number of devices for each code of package damage.
        judged, worse: the number of devices that compared their models, and the number of those whose
            model became worse.
        losses: by how much the loss after training is higher with the new version than with the one before:
            one value for each device, in nats per token.
        general: by how much more training raises the loss on general text with the new version than with the
            one before: one value for each device, in nats per token.
        wave_devices: the number of devices of the newest open wave, without those whose result an operator
            acknowledged by a resume.
        wave_began, wave_ended, wave_ok: how many of these devices began, ended, and succeeded.
    """

    codes: Mapping[ReportCode, int] = field(default_factory=Counter)
    damage: Mapping[str, int] = field(default_factory=Counter)
    judged: int = 0
    worse: int = 0
    losses: Statistics = Statistics()
    general: Statistics = Statistics()
    wave_devices: int = 0
    wave_began: int = 0
    wave_ended: int = 0
    wave_ok: int = 0

    @property
    def ended(self) -> int:
        """Number of devices that have ended."""
        return sum(self.codes.values())

    @property
    def failed(self) -> int:
        """Number of devices that ended without success, the silent ones included."""
        return self.ended - self.codes.get(ReportCode.OK, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Position of a running rollout.

    Attributes:
        wave: the open wave, from 0.
        opened_at: the time at which the wave opened.
        looks: the number of looks so far.
        approved: the number of waves that may open.
    """

    wave: int
    opened_at: datetime
    looks: int = 0
    approved: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The next state and wave. If the rollout halts, also the reason and the numbers for the audit log.

    `awaits_approval` is true if only an approval is missing for the next wave.
    """

    state: RolloutState
    wave: int
    looks: int
    reason: Reason | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    awaits_approval: bool = False


def bounds_of(waves: Sequence[str], places: Iterable[int]) -> list[int]:
    """Return the bound of each wave: devices whose place is below it are in this wave or in an earlier one.

    A count is turned into a bound once, when the rollout starts. So no list of devices is kept, and a device
    that joins later gets a wave by its place. Devices that share a place are always in the same wave. When
    the rollout starts, a wave may therefore have fewer devices than its count, but never more.

    Args:
        waves: percentages and counts, as `Rules` has them.
        places: the places of the group's devices (`place_of`).

    Raises:
        InputError: with these devices, a wave is no larger than the one before it.

    Example:
        >>> bounds_of(["2", "50%", "100%"], [4500, 10, 400, 9000])
        [4500, 5000, 10000]
    """
    ordered = sorted(places)
    bounds = list[int]()
    for wave in waves:
        size = wave.removesuffix("%")
        if size != wave:
            bounds.append(PARTS * int(size) // 100)
        else:
            bounds.append(ordered[int(size)] if int(size) < len(ordered) else PARTS)
    for number, (last, bound) in enumerate(pairwise(bounds), start=1):
        if bound <= last:
            raise InputError(
                f"Of {len(ordered)} devices, wave {number} ({waves[number - 1]}) holds all of wave "
                f"{number + 1} ({waves[number]}) already. Give wave {number} fewer devices, or leave it out."
            )
    return bounds


def look_at(looks: int) -> int:
    """Return the number of reports at which the next look is due, if there were `looks` looks before."""
    return FIRST_LOOK << looks


def advance(standing: Position, rules: Rules, tally: Tally, now: datetime) -> Step:
    """Decide whether a running rollout waits, opens its next wave or stops.

    The result depends only on the arguments, so it does no harm to call this often.

    Example:

        step = advance(Position(wave=0, opened_at=begun), Rules(), tally, now)
        if step.reason is not None:
            print(f"stopped by {step.reason}: {step.numbers}")
    """
    looks = standing.looks
    # Damage needs no statistics: the same damage on several devices is not an accident.
    count = max(tally.damage.values(), default=0)
    if count >= SAME_CODE:
        return _halt(standing, Reason.INTEGRITY, {"devices": count, "reports": tally.ended})
    # If many reports arrive between two calls, looks are skipped. This only lowers the probability of a false
    # alarm.
    while tally.ended >= look_at(looks):
        looks += 1
    if looks > standing.looks and (found := _look(tally, rules, ALPHA / 2**looks / _TESTS)) is not None:
        reason, numbers = found
        return _halt(standing, reason, {**numbers, "look": looks, "reports": tally.ended}, looks)
    return _gate(standing, rules, tally, now, looks)


def _look(tally: Tally, rules: Rules, alpha: float) -> tuple[Reason, dict[str, float]] | None:
    """Test all shares and means. Return the first that is significantly above its limit, or None."""
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


def _gate(standing: Position, rules: Rules, tally: Tally, now: datetime, looks: int) -> Step:
    """Open the next wave, end the rollout, wait for reports, or pause if further reports cannot help."""
    here = Step(state=RolloutState.RUNNING, wave=standing.wave, looks=looks)
    soaked_at = standing.opened_at + timedelta(seconds=rules.soak_s)
    if now < soaked_at:
        return here
    # The rules may demand more reports than a small wave has devices.
    needed = min(rules.min_reports, tally.wave_devices)
    if tally.wave_ended < needed:
        if now < soaked_at + timedelta(seconds=rules.deadline_s):
            return here
        return _halt(standing, Reason.SILENCE, {"reports": tally.wave_ended, "needed": needed}, looks)
    if tally.wave_ok * 100 < rules.success_percent * tally.wave_began:
        # Devices that have not ended yet may still raise the success rate.
        if tally.wave_ended < tally.wave_began:
            return here
        numbers = {"ok": tally.wave_ok, "of": tally.wave_began, "needed_percent": rules.success_percent}
        return _halt(standing, Reason.SUCCESS, numbers, looks)
    # The last wave holds all devices, so the rollout is done.
    if standing.wave + 1 == len(rules.waves):
        return Step(state=RolloutState.DONE, wave=standing.wave, looks=looks)
    if rules.approval and standing.approved < standing.wave + 2:
        return replace(here, awaits_approval=True)
    return Step(state=RolloutState.RUNNING, wave=standing.wave + 1, looks=looks)


def _halt(standing: Position, reason: Reason, numbers: Mapping[str, float], looks: int | None = None) -> Step:
    return Step(
        state=RolloutState.PAUSED,
        wave=standing.wave,
        looks=standing.looks if looks is None else looks,
        reason=reason,
        numbers=numbers,
    )
