"""Simulation of a rollout by the state machine only: devices report, and the clock advances."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from permille_rollouts.offer import ReportCode, RolloutState
from permille_rollouts.state_machine import WORSE_NATS, Position, Rules, Statistics, Step, Tally, advance

BEGIN = datetime(2030, 1, 1, tzinfo=UTC)
Ending = Callable[[random.Random], tuple[ReportCode, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """End of a simulated rollout, and the number of devices that had begun by then."""

    step: Step
    touched: int


def simulate(ending: Ending, rules: Rules, *, devices: int = 1000, seed: int = 0) -> Run:
    """Let `devices` report one after the other, with a sweep after each, until the rollout ends or stops.

    Args:
        ending: draws the end of a device, and its difference of the loss.
        rules: the rules of the rollout.
        devices: the number of devices.
        seed: the seed of the draws.
    """
    rng, codes = random.Random(seed), Counter[ReportCode]()
    wave = looks = done = ok = last = judged = worse = 0
    total = squares = 0.0
    while True:
        size = devices * int(rules.waves[wave].removesuffix("%")) // 100 - last
        opened = BEGIN + timedelta(seconds=rules.soak_s * wave)
        if done < size:
            code, difference = ending(rng)
            codes[code] += 1
            done, ok = done + 1, ok + (code is ReportCode.OK)
            if code is ReportCode.OK:
                judged, worse = judged + 1, worse + (difference > WORSE_NATS)
                total, squares = total + difference, squares + difference * difference
        is_over = done == size
        tally = Tally(
            codes=codes,
            judged=judged,
            worse=worse,
            losses=Statistics.of_sums(judged, total, squares),
            wave_devices=size,
            wave_began=done,
            wave_ended=done,
            wave_ok=ok,
        )
        now = opened + timedelta(seconds=rules.soak_s if is_over else 0)
        step = advance(Position(wave=wave, opened_at=opened, looks=looks), rules, tally, now)
        looks = step.looks
        if step.state is not RolloutState.RUNNING:
            return Run(step=step, touched=last + done)
        if step.wave != wave:
            last, wave = devices * int(rules.waves[wave].removesuffix("%")) // 100, step.wave
            done = ok = 0
        elif is_over:
            raise RuntimeError("expected a step at the end of a wave")
