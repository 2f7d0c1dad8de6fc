"""The budget of a run: by steps a function of the steps, by time within the time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from permille_agent.training.plan import EVALUATIONS, JUDGED, TRIALS, budget_of_steps, budget_of_time

seconds = st.floats(1e-4, 100.0)


@pytest.mark.parametrize(("steps", "trial_steps"), [(1, 5), (50, 5), (200, 20), (400, 40), (100_000, 40)])
def test_a_trial_makes_a_tenth_of_the_steps_within_bounds(steps: int, trial_steps: int) -> None:
    budget = budget_of_steps(steps)
    assert (budget.steps, budget.trial_steps, budget.limit_s) == (steps, trial_steps, None)


@given(st.floats(60.0, 100_000.0), seconds, seconds, seconds)
def test_a_run_that_has_time_for_its_parts_stays_within_its_time(
    available_s: float, step_s: float, evaluation_s: float, judgement_s: float
) -> None:
    budget = budget_of_time(available_s, step_s=step_s, evaluation_s=evaluation_s, judgement_s=judgement_s)
    assert budget.limit_s is not None
    assert 0.599 * available_s <= budget.limit_s <= 0.951 * available_s
    search_s = TRIALS * (budget.trial_steps * step_s + evaluation_s)
    train_s = budget.steps * step_s + budget.evaluations * evaluation_s
    roomy = available_s > 100 * max(step_s, evaluation_s, judgement_s)
    if roomy:
        assert search_s + train_s <= budget.limit_s + 1e-6
        assert available_s - budget.limit_s >= JUDGED * judgement_s - 1e-6


def test_slow_evaluations_are_fewer() -> None:
    quick = budget_of_time(1800.0, step_s=1.0, evaluation_s=1.0, judgement_s=5.0)
    slow = budget_of_time(1800.0, step_s=1.0, evaluation_s=30.0, judgement_s=150.0)
    assert quick.evaluations == EVALUATIONS
    assert slow.evaluations < EVALUATIONS
    assert slow.evaluations * 30.0 < 0.3 * 1800.0
    assert slow.steps < quick.steps


def test_a_minute_on_a_slow_machine_makes_one_step_at_least() -> None:
    assert budget_of_time(60.0, step_s=50.0, evaluation_s=20.0, judgement_s=100.0).steps == 1
