"""Tests of the statistics of paired items: known results, and Holm's example by hand."""

import numpy as np
import pytest

from permille.errors import InputError
from permille_lab.evaluate.statistics import (
    UserTest,
    average_ranks,
    beats_by,
    clustered_variance,
    holm,
    user_test,
)


def paired(accuracy: float, change: float, items: int) -> tuple[np.ndarray, np.ndarray]:
    """Return outcomes of two methods.

    Two percent of the items differ, and `change` more are wrong for the second.
    """
    rng = np.random.default_rng(0)
    first_N = (rng.random(items) < accuracy).astype(float)
    second_N = first_N.copy()
    for outcome in (0, 1):
        flipped = rng.choice(np.flatnonzero(first_N == outcome), items // 100, replace=False)
        second_N[flipped] = 1 - outcome
    worse = rng.choice(np.flatnonzero(second_N), round(change * items), replace=False)
    second_N[worse] = 0
    return first_N, second_N


def test_the_clustered_variance_of_values_alone_is_that_of_a_mean() -> None:
    value_N = np.array([1.0, 2.0, 4.0, 9.0])
    assert clustered_variance(value_N, np.array([3, 1, 0, 7])) == pytest.approx((value_N.var(ddof=1) / 4, 3))


def test_values_of_one_text_are_one_draw() -> None:
    """Repeating each value four times in its text adds no evidence.

    A case with groups of different means is computed by hand.
    """
    value_N = np.array([1.0, 2.0, 4.0, 9.0])
    alone = clustered_variance(value_N, np.arange(4))
    assert clustered_variance(np.repeat(value_N, 4), np.repeat(np.arange(4), 4)) == pytest.approx(alone)
    # The mean is 2. The groups' sums of deviations are -2 and 2, so (4 + 4) * 2 / 1 / 4^2 = 1.
    assert clustered_variance(np.array([1.0, 1.0, 2.0, 4.0]), np.array([5, 5, 6, 6])) == pytest.approx(
        (1.0, 1)
    )
    with pytest.raises(InputError, match="two or more clusters"):
        clustered_variance(value_N, np.zeros(4, np.int64))


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
    tests = [
        UserTest(name=str(p), users=9, gain=0, median=0, interval=(-1, 1), worsened=0, p_value=p)
        for p in (0.04, 0.01, 0.03, 0.005)
    ]
    # 0.005 * 4, 0.01 * 3 and 0.03 * 2. The last, 0.04 * 1, is raised to the previous value.
    assert [test.p_value for test in holm(tests)] == pytest.approx([0.06, 0.03, 0.06, 0.02])


def test_beating_a_margin_needs_more_than_the_margin() -> None:
    first_N, second_N = paired(0.8, 0.08, 2000)
    each_N = np.arange(2000)
    mean, p_value = beats_by(first_N, second_N, 0.05, each_N)
    assert mean > 0.05
    assert p_value < 0.01
    assert beats_by(first_N, second_N, 0.1, each_N)[1] > 0.5
    assert beats_by(np.ones(2), np.zeros(2), 0.05, each_N[:2])[1] > 0.2
    assert beats_by(np.ones(20), np.zeros(20), 0.05, each_N[:20])[1] < 0.01
    # Twenty items of two texts count as two.
    assert beats_by(np.ones(20), np.zeros(20), 0.05, each_N[:20] % 2)[1] > 0.2


def test_a_standard_error_of_passages_is_larger_than_one_of_their_items() -> None:
    rng = np.random.default_rng(1)
    passage_N = np.repeat(np.arange(100), 10)
    difference_N = rng.normal(0.08, 0.3, 100)[passage_N] + rng.normal(0, 0.1, 1000)
    nothing_N = np.zeros(1000)
    assert beats_by(difference_N, nothing_N, 0, np.arange(1000))[1] < 1e-5
    assert beats_by(difference_N, nothing_N, 0, passage_N)[1] > 1e-3


def test_ranks_average_over_tasks_and_share_ties() -> None:
    score_MT = np.array([[0.9, 0.5], [0.8, 0.5], [0.7, 0.6]])
    np.testing.assert_allclose(average_ranks(score_MT), [1.75, 2.25, 2.0])
    with pytest.raises(InputError, match="finite"):
        average_ranks(np.array([[0.9, np.nan]]))


def test_unpaired_items_are_refused() -> None:
    with pytest.raises(InputError, match="paired"):
        beats_by(np.ones(3), np.ones(4), 0.0, np.arange(3))
    with pytest.raises(InputError, match="finite"):
        user_test("nan", np.array([1.0, np.nan]), np.ones(2))
