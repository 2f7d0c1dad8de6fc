"""Tests of the estimated time that is left."""

import pytest

from permille.time_left import TimeLeft, span


def test_the_pace_is_measured_anew_if_the_work_starts_again() -> None:
    left = TimeLeft()
    assert left.seen(0.0, 0.5) is None
    assert left.seen(9.0, 0.51) is None  # too little to tell
    assert left.seen(10.0, 0.6) == pytest.approx(40.0)
    assert left.seen(100.0, 0.1) is None
    assert left.seen(110.0, 0.2) == pytest.approx(80.0)


@pytest.mark.parametrize(("seconds", "words"), [(59.0, "59 s"), (90.0, "2 min"), (2 * 86_400.0, "2 days")])
def test_a_duration_is_told_in_its_largest_unit(seconds: float, words: str) -> None:
    assert span(seconds) == words
