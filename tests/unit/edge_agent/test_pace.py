"""Lengths of a run: by steps a function of the steps, by time within the time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from permille_agent.training.plan import EVALUATIONS, JUDGED, RACERS, lengths_by_steps, lengths_by_time

seconds = st.floats(1e-4, 100.0)


@pytest.mark.parametrize(("steps", "race_steps"), [(1, 5), (50, 5), (200, 20), (400, 40), (100_000, 40)])
def test_a_racer_makes_a_tenth_of_the_steps_within_bounds(steps: int, race_steps: int) -> None:
    lengths = lengths_by_steps(steps)

    assert (lengths.steps, lengths.race_steps, lengths.limit_s) == (steps, race_steps, None)


@given(st.floats(60.0, 100_000.0), seconds, seconds, seconds)
def test_a_run_that_has_time_for_its_parts_stays_within_its_time(
    available_s: float, step_s: float, evaluation_s: float, judgement_s: float
) -> None:
    lengths = lengths_by_time(available_s, step_s=step_s, evaluation_s=evaluation_s, judgement_s=judgement_s)

    assert lengths.limit_s is not None
    assert 0.599 * available_s <= lengths.limit_s <= 0.951 * available_s
    search_s = RACERS * (lengths.race_steps * step_s + evaluation_s)
    train_s = lengths.steps * step_s + lengths.evaluations * evaluation_s
    roomy = available_s > 100 * max(step_s, evaluation_s, judgement_s)
    if roomy:
        assert search_s + train_s <= lengths.limit_s + 1e-6
        assert available_s - lengths.limit_s >= JUDGED * judgement_s - 1e-6


def test_slow_evaluations_are_fewer() -> None:
    quick = lengths_by_time(1800.0, step_s=1.0, evaluation_s=1.0, judgement_s=5.0)
    slow = lengths_by_time(1800.0, step_s=1.0, evaluation_s=30.0, judgement_s=150.0)

    assert quick.evaluations == EVALUATIONS
    assert slow.evaluations < EVALUATIONS
    assert slow.evaluations * 30.0 < 0.3 * 1800.0
    assert slow.steps < quick.steps


def test_a_minute_on_a_slow_machine_makes_one_step_at_least() -> None:
    assert lengths_by_time(60.0, step_s=50.0, evaluation_s=20.0, judgement_s=100.0).steps == 1
