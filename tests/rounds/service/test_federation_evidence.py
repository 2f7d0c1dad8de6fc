"""Tests of the evidence for adopting a state: the gains that devices measured."""

import pytest

from permille.store.tables import Round
from permille_rounds.service.records import adoption_of, gain_low


def measured(devices: int, mean: float | None = 0.02, error: float | None = 0.01) -> Round:
    return Round(
        number=4, start_digest="sha256:" + "0" * 64, counted=devices, gain_mean=mean, gain_error=error
    )


@pytest.mark.parametrize(("devices", "quantile"), [(6, 2.5706), (11, 2.2281), (30, 2.0452), (1000, 1.9623)])
def test_the_interval_is_students(devices: int, quantile: float) -> None:
    low = gain_low(measured(devices))
    assert low is not None
    assert (0.02 - low) / 0.01 == pytest.approx(quantile, abs=0.003)


def test_a_gain_is_sure_above_zero_of_thirty_devices() -> None:
    assert not adoption_of(measured(30)).sure
    assert adoption_of(measured(30, error=0.009)).sure
    assert not adoption_of(measured(29, error=0.001)).sure
    assert not adoption_of(measured(1000, mean=-0.01, error=0.001)).sure
    assert not adoption_of(measured(0, mean=None, error=None)).sure
    assert gain_low(measured(5)) is None
