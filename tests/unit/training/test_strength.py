"""Tests of a state's strength: exact on the lattice, and the largest within the bound."""

import math
from fractions import Fraction

import numpy as np
import pytest

from permille.errors import InputError
from permille.training.strength import Strength, choose_strength, scaled
from permille.zo.lattice import STATE_LIMIT


@pytest.mark.parametrize("eighths", range(1, 9))
def test_a_state_is_scaled_to_the_nearest_integer_and_ties_to_even(eighths: int) -> None:
    rng = np.random.default_rng(eighths)
    edge = [STATE_LIMIT, -STATE_LIMIT, STATE_LIMIT - 1, 1 - STATE_LIMIT]
    s_K = np.array([*range(-40, 41), *edge, *rng.integers(-STATE_LIMIT, STATE_LIMIT, 200)], np.int64)
    # `round` rounds fractions with ties to even.
    expected = [round(Fraction(int(s) * eighths, 8)) for s in s_K]
    assert scaled(s_K, eighths).tolist() == expected
    assert scaled(s_K, eighths).dtype == np.int64


@pytest.mark.parametrize("eighths", [0, 9, -1])
def test_no_other_strength_is_taken(eighths: int) -> None:
    with pytest.raises(InputError, match="1 to 8 eighths"):
        scaled(np.zeros(1, np.int64), eighths)


def test_the_largest_strength_within_the_bound_is_chosen_and_no_smaller_one_measured() -> None:
    measured = []

    def rise_of(eighths: int) -> float:
        measured.append(eighths)
        return 0.04 * eighths

    assert choose_strength(rise_of, 0.25) == Strength(eighths=6, rise=0.24)
    assert measured == [8, 7, 6]


@pytest.mark.parametrize("rise", [0.11, math.inf, math.nan])
def test_a_rise_beyond_the_bound_at_every_strength_leaves_nothing(rise: float) -> None:
    assert choose_strength(lambda _: rise, 0.1).eighths == 0


def test_a_fall_is_within_every_bound() -> None:
    assert choose_strength(lambda _: -0.5, 0.0) == Strength(eighths=8, rise=-0.5)


def test_a_lost_answer_is_as_bad_as_a_rise_and_asked_only_within_the_bound() -> None:
    asked = []

    def fault_at(eighths: int) -> str:
        asked.append(eighths)
        return "lose it" if eighths > 3 else ""

    found = choose_strength(lambda eighths: 0.04 * eighths, 0.25, fault_at)
    assert found == Strength(eighths=3, rise=0.12, fault="lose it")
    assert asked == [6, 5, 4, 3]


def test_the_fault_is_that_of_the_next_larger_strength() -> None:
    found = choose_strength(lambda eighths: 0.1 * eighths, 0.25, lambda _: "")
    assert found == Strength(eighths=2, rise=0.2, fault="")
    assert choose_strength(lambda _: 0.0, 0.25, lambda eighths: f"at {eighths}").fault == "at 1"
