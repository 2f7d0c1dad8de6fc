"""Tests of the rollouts' state machine: opening of waves, reasons to stop, and the rate of false stops."""

import random
from dataclasses import replace
from datetime import timedelta

import pytest

from permille.errors import InputError
from permille_rollouts.offer import ReportCode, RolloutState
from permille_rollouts.state_machine import Position, Reason, Rules, Statistics, Tally, advance, bounds_of
from tests.rollouts.simulated import BEGIN, Ending, simulate

RULES = Rules(waves=("20%", "100%"), min_reports=100, success_percent=99.0)
NOISE = 0.01
"""Standard deviation of the difference that a device measures between two trainings."""
FAILING = 0.001
"""Share of failures among devices with a good version."""


def good(rng: random.Random) -> tuple[ReportCode, float]:
    code = ReportCode.CRASH if rng.random() < FAILING else ReportCode.OK
    return code, rng.gauss(0.0, NOISE)


def failing(share: float, code: ReportCode) -> Ending:
    def ending(rng: random.Random) -> tuple[ReportCode, float]:
        return (code, 0.0) if rng.random() < share else good(rng)

    return ending


def worse(rng: random.Random) -> tuple[ReportCode, float]:
    code, difference = good(rng)
    return code, difference + (0.05 if rng.random() < 0.3 else 0.0)


@pytest.mark.slow
def test_a_good_version_stops_falsely_in_at_most_one_of_a_hundred_rollouts() -> None:
    stopped = [run for seed in range(300) if (run := simulate(good, RULES, seed=seed)).step.reason]
    assert len(stopped) <= 3, [run.step for run in stopped]


@pytest.mark.parametrize(
    ("ending", "reasons"),
    [
        (failing(0.05, ReportCode.INSTALL), {Reason.FAILURES, Reason.SUCCESS}),
        (failing(0.10, ReportCode.SILENT), {Reason.FAILURES, Reason.SUCCESS}),
        (worse, {Reason.WORSE}),
    ],
)
def test_a_bad_version_stops_in_the_first_wave(ending: Ending, reasons: set[Reason]) -> None:
    for seed in range(50):
        run = simulate(ending, RULES, seed=seed)
        assert run.step.reason in reasons
        assert (run.step.wave, run.touched <= 200) == (0, True)


def test_a_rare_crash_stops_in_the_first_wave_where_it_shows() -> None:
    """With a rate of 2%, the first 200 devices have four crashes on average. Two are allowed."""
    runs = [simulate(failing(0.02, ReportCode.CRASH), RULES, seed=seed) for seed in range(200)]
    assert sum(run.step.wave == 0 and run.step.reason is not None for run in runs) >= 140
    assert all(run.step.reason is not None for run in runs), "the last wave shows it in any case"


def standing(wave: int = 0, looks: int = 0) -> Position:
    return Position(wave=wave, opened_at=BEGIN, looks=looks)


SOAKED = BEGIN + timedelta(seconds=RULES.soak_s)
WELL = Tally(codes={ReportCode.OK: 100}, wave_devices=200, wave_began=100, wave_ended=100, wave_ok=100)


def test_a_wave_opens_after_its_soak_time_with_enough_reports() -> None:
    assert advance(standing(), RULES, WELL, SOAKED - timedelta(seconds=1)).wave == 0
    assert advance(standing(), RULES, replace(WELL, wave_ended=99, wave_ok=99), SOAKED).wave == 0
    assert advance(standing(), RULES, WELL, SOAKED).wave == 1
    assert advance(standing(1), RULES, WELL, SOAKED).state is RolloutState.DONE


def test_a_wave_that_needs_approval_waits_for_it_alone() -> None:
    rules = replace(RULES, approval=True)
    early = advance(standing(), rules, WELL, SOAKED - timedelta(seconds=1))
    assert (early.wave, early.awaits_approval) == (0, False)
    waits = advance(standing(), rules, WELL, SOAKED)
    assert (waits.state, waits.wave, waits.awaits_approval) == (RolloutState.RUNNING, 0, True)
    assert advance(replace(standing(), approved=2), rules, WELL, SOAKED).wave == 1
    assert advance(standing(1), rules, WELL, SOAKED).state is RolloutState.DONE, "no wave is left"


def test_devices_that_have_not_ended_hold_a_wave_until_they_do() -> None:
    waiting = replace(WELL, wave_began=110)
    step = advance(standing(), RULES, waiting, SOAKED)
    assert (step.state, step.wave) == (RolloutState.RUNNING, 0)
    ended = replace(waiting, wave_ended=110, codes={ReportCode.OK: 100, ReportCode.SILENT: 10})
    step = advance(standing(), RULES, replace(ended, codes=WELL.codes), SOAKED)
    assert (step.state, step.reason) == (RolloutState.PAUSED, Reason.SUCCESS)


def test_a_small_wave_needs_as_many_reports_as_it_has_devices() -> None:
    few = Tally(codes={ReportCode.OK: 3}, wave_devices=3, wave_began=3, wave_ended=3, wave_ok=3)
    assert advance(standing(), RULES, few, SOAKED).wave == 1
    assert advance(standing(), RULES, Tally(), SOAKED).wave == 1, "nobody is in it"


def test_silence_after_the_deadline_pauses() -> None:
    nobody = Tally(wave_devices=200)
    late = SOAKED + timedelta(seconds=RULES.deadline_s)
    assert advance(standing(), RULES, nobody, late - timedelta(seconds=1)).reason is None
    assert advance(standing(), RULES, nobody, late).reason is Reason.SILENCE


def test_four_times_the_same_damage_stops_at_once_and_other_damages_do_not() -> None:
    found = Tally(codes={ReportCode.INTEGRITY: 6}, damage={"blob-digest": 3, "block-digest": 3})
    assert advance(standing(), RULES, found, BEGIN).reason is None
    found = Tally(codes={ReportCode.INTEGRITY: 4}, damage={"blob-digest": 4})
    assert advance(standing(), RULES, found, BEGIN).reason is Reason.INTEGRITY


def test_a_look_is_taken_once_and_each_is_stricter() -> None:
    five = Tally(codes={ReportCode.OK: 15, ReportCode.CRASH: 5})
    step = advance(standing(), RULES, five, BEGIN)
    assert (step.reason, step.looks) == (Reason.FAILURES, 1)
    assert step.numbers["lower_bound"] > step.numbers["limit"] == 0.02
    assert advance(standing(looks=1), RULES, five, BEGIN).reason is None, "it was looked at before"
    three = Tally(codes={ReportCode.OK: 17, ReportCode.CRASH: 3})
    assert advance(standing(), RULES, three, BEGIN).reason is None


@pytest.mark.parametrize(("mean", "loss", "general"), [(0.03, True, False), (0.05, True, True)])
def test_a_mean_that_surely_rose_stops(mean: float, loss: bool, general: bool) -> None:
    """A rise of 0.03 is surely above the limit of losses, but not surely above that of general text."""
    rise, tally = Statistics(n=40, mean=mean, deviation=0.02), Tally(codes={ReportCode.OK: 40}, judged=40)
    found = advance(standing(), RULES, replace(tally, losses=rise), BEGIN).reason
    assert found is (Reason.LOSS if loss else None)
    found = advance(standing(), RULES, replace(tally, general=rise), BEGIN).reason
    assert found is (Reason.GENERAL if general else None)


def test_moments_are_those_of_the_values() -> None:
    assert Statistics.of_sums(0, 0.0, 0.0) == Statistics()
    assert Statistics.of_sums(3, 6.0, 14.0) == Statistics(n=3, mean=2.0, deviation=1.0)


def test_a_count_opens_as_many_devices_and_a_share_its_places() -> None:
    places = random.Random(0).sample(range(10_000), 300)
    bounds = bounds_of(("50", "100", "50%", "100%"), places)
    assert [sum(place < bound for place in places) for bound in bounds[:2]] == [50, 100]
    assert bounds[2:] == [5_000, 10_000]


def test_devices_that_share_a_place_stay_together_below_the_count() -> None:
    assert bounds_of(("2", "100%"), [7, 7, 7, 3]) == [7, 10_000]


@pytest.mark.parametrize("waves", [("20", "100%"), ("15", "50%", "100%")])
def test_a_count_that_holds_the_next_wave_already_is_refused(waves: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match=r"Of 20 devices, wave 1 \(\d+\) holds all of wave 2"):
        bounds_of(waves, range(0, 10_000, 500))
