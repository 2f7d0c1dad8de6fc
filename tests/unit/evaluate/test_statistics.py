"""Tests on paired items: what they find where the truth is known, and Holm's example by hand."""

import numpy as np
import pytest

from permille.errors import InputError
from permille.evaluate.statistics import UserTest, average_ranks, beats_by, equivalence, holm, user_test


def paired(accuracy: float, change: float, items: int) -> tuple[np.ndarray, np.ndarray]:
    """Outcomes of two methods that agree on all but two items in a hundred, whatever `change`."""
    rng = np.random.default_rng(0)
    first_N = (rng.random(items) < accuracy).astype(float)
    second_N = first_N.copy()
    for outcome in (0, 1):
        flipped = rng.choice(np.flatnonzero(first_N == outcome), items // 100, replace=False)
        second_N[flipped] = 1 - outcome
    worse = rng.choice(np.flatnonzero(second_N), round(change * items), replace=False)
    second_N[worse] = 0
    return first_N, second_N


def test_methods_that_hardly_differ_are_equivalent_and_others_not() -> None:
    close = equivalence(*paired(0.8, 0.0, 5000))
    assert close.equivalent
    assert abs(close.difference) < 0.01
    far = equivalence(*paired(0.8, 0.03, 5000))
    assert not far.equivalent
    assert far.interval[0] > 0.01
    # The same rates from fewer items prove nothing.
    assert not equivalence(*paired(0.8, 0.0, 200)).equivalent


def test_identical_outcomes_are_equivalent() -> None:
    same = equivalence(np.ones(1000), np.ones(1000))
    assert same.equivalent
    assert same.interval == (0.0, 0.0)
    assert not equivalence(np.ones(1000), np.zeros(1000)).equivalent
    # Ten items that agree may well hide one in a hundred that does not.
    assert not equivalence(np.ones(10), np.ones(10)).equivalent


def test_the_interval_is_students() -> None:
    got = equivalence(np.array([1.0, 2.0, 3.0]), np.zeros(3), margin=10.0)
    # mean 2, standard error 1/sqrt(3), t(0.95, 2) = 2.919986
    assert got.interval == pytest.approx((2 - 2.919986 / 3**0.5, 2 + 2.919986 / 3**0.5), rel=1e-5)


def test_users_are_compared_in_pairs() -> None:
    base_N = np.linspace(3, 4, 12)
    test = user_test("own against base", base_N - 0.1, base_N)
    assert test.gain == pytest.approx(0.1)
    assert test.worsened == 0
    assert test.p_value == pytest.approx(2 / 2**12)
    assert user_test("same", base_N, base_N).p_value == 1.0
    worse_N = base_N - 0.1
    worse_N[:3] += 0.2
    assert user_test("mixed", worse_N, base_N).worsened == pytest.approx(0.25)


def test_holm_steps_down() -> None:
    tests = [UserTest(name=str(p), users=9, gain=0, worsened=0, p_value=p) for p in (0.04, 0.01, 0.03, 0.005)]
    # Sorted 0.005 * 4, 0.01 * 3, 0.03 * 2, and 0.04 * 1 raised to the one before.
    assert [test.p_value for test in holm(tests)] == pytest.approx([0.06, 0.03, 0.06, 0.02])


def test_beating_a_margin_needs_more_than_the_margin() -> None:
    first_N, second_N = paired(0.8, 0.08, 2000)
    mean, p_value = beats_by(first_N, second_N, 0.05)
    assert mean > 0.05
    assert p_value < 0.01
    assert beats_by(first_N, second_N, 0.1)[1] > 0.5
    assert beats_by(np.ones(2), np.zeros(2), 0.05)[1] > 0.2
    assert beats_by(np.ones(20), np.zeros(20), 0.05)[1] < 0.01


def test_ranks_average_over_tasks_and_share_ties() -> None:
    score_MT = np.array([[0.9, 0.5], [0.8, 0.5], [0.7, 0.6]])
    np.testing.assert_allclose(average_ranks(score_MT), [1.75, 2.25, 2.0])
    with pytest.raises(InputError, match="finite"):
        average_ranks(np.array([[0.9, np.nan]]))


def test_unpaired_items_are_refused() -> None:
    with pytest.raises(InputError, match="paired"):
        equivalence(np.ones(3), np.ones(4))
    with pytest.raises(InputError, match="finite"):
        user_test("nan", np.array([1.0, np.nan]), np.ones(2))
