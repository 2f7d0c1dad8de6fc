"""A short `python -m tests.rounds.secure_sums`."""

import pytest

from tests.rounds.secure_sums import measure


def test_sums_by_a_keeper_equal_plain_sums_and_noise_whoever_drops_out() -> None:
    found = measure(rounds=6, devices=46, dropped=14)
    assert found.exact == 6
    assert found.noise_over_promise == pytest.approx(1, abs=0.15)
    assert found.upload_bytes == 284 + 4 * 65
