"""Tests of the rule that stops a descent by its evaluations."""

from typing import Any

import pytest

from permille_agent.training.run import Evaluation
from permille_agent.training.steps import Stop, best_of, stop_of


def _ends(losses: list[float | None], total_steps: int = 100, **changes: Any) -> list[Stop | None]:
    """Return the answers of `stop_of` at every evaluation, one per five steps."""
    evaluations = [Evaluation(5 * place, loss) for place, loss in enumerate(losses)]
    usual = {"rejected": 0, "out_of_time": False, "last": False}
    return [
        stop_of(evaluations[: n + 1], step=5 * n, total_steps=total_steps, **usual | changes)
        for n in range(len(evaluations))
    ]


@pytest.mark.parametrize(
    ("losses", "above", "last"),
    [
        ([3.0, 3.1, 3.2, 3.1], 3, None),
        ([3.0, 3.1, 3.1, 2.9, 3.1, 3.1], None, None),
        ([3.0, 3.1, 3.4], 2, 2),
        ([3.0, 2.9, None], 2, 2),
    ],
)
def test_a_descent_that_stays_above_the_base_diverged_but_not_the_last(
    losses: list[float | None], above: int | None, last: int | None
) -> None:
    assert _ends(losses) == [Stop.DIVERGED if place == above else None for place in range(len(losses))]
    # The last attempt diverges only if a loss is a tenth above the base or not finite.
    found = _ends(losses, last=True)
    assert found == [Stop.DIVERGED if place == last else None for place in range(len(losses))]


@pytest.mark.parametrize(
    ("losses", "level"),
    [
        ([3.0, 2.9, 2.8, 2.85, 2.8, 2.81], 5),
        ([3.0, 2.9, 2.8, 2.85, 2.8, 2.79, 2.81, 2.81, 2.81], 8),
        ([3.0, 2.9, 2.8, 2.85, 2.8, 2.79, 2.78], None),
        # In the second half, the schedule shortens the steps anyway.
        ([3.0, 2.9, 2.8, 2.7, 2.6, 2.5, 2.4, 2.3, 2.2, 2.25, 2.25, 2.25, 2.25], None),
    ],
)
def test_a_descent_without_a_new_lowest_in_its_first_half_is_level(
    losses: list[float | None], level: int | None
) -> None:
    assert _ends(losses) == [Stop.LEVEL if place == level else None for place in range(len(losses))]
    assert set(_ends(losses, last=True)) == {None}


def test_few_evaluations_say_nothing_of_a_step_size() -> None:
    """The evaluations are a quarter and a half of all steps apart.

    In the tests above, they are a twentieth apart.
    """
    assert _ends([3.0, 2.7, 2.71, 2.7], total_steps=20) == [None] * 4
    assert _ends([3.0, 3.01, 2.9], total_steps=10)[:2] == [None, None]


@pytest.mark.parametrize(
    "falling", [[2.9], [2.9 - 0.01 * place for place in range(16)]], ids=["early", "late"]
)
def test_what_was_below_the_base_and_stays_above_it_keeps_its_best(falling: list[float | None]) -> None:
    losses = [3.0, *falling, 3.1, 3.1, 3.1]
    expected = [None] * (len(losses) - 1)
    assert _ends(losses) == [*expected, Stop.LEVEL]
    assert _ends(losses, last=True) == [*expected, None]


def test_rejected_steps_time_and_the_number_of_steps_end_a_descent() -> None:
    falling: list[float | None] = [3.0, 2.9, 2.8]
    assert _ends(falling, rejected=4) == [None] * 3
    assert _ends(falling, rejected=5) == [Stop.REJECTED] * 3
    assert _ends(falling, out_of_time=True)[-1] is Stop.TIME
    assert _ends(falling, total_steps=10, out_of_time=True) == [Stop.TIME, Stop.TIME, Stop.STEPS]


def test_the_best_is_the_first_of_the_lowest() -> None:
    assert best_of([Evaluation(0, 3.0), Evaluation(5, 2.0), Evaluation(10, 2.0)]).step == 5
    assert best_of([Evaluation(0, None), Evaluation(5, 2.0)]).step == 5
    assert best_of([Evaluation(0, None), Evaluation(5, None)]).step == 0
