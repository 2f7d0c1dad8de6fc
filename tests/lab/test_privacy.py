"""Tests of the attack on published rounds: certain without noise, bounded with noise, and its page."""

from pathlib import Path

import pytest

from permille_lab.measuring.cells import Cells
from permille_lab.privacy.__main__ import measure
from permille_lab.privacy.page import tables


def test_the_attacker_is_sure_without_noise_and_bounded_with_it() -> None:
    bare = measure(None, 10, knows_others=True, trials=10)
    noised = measure(2.0, 10, knows_others=True, trials=60)
    assert bare["auc"] == 1.0
    assert noised["most"] == pytest.approx(0.617, abs=0.005)
    assert noised["auc"] < noised["most"] + 3 * noised["error"]
    assert noised["noise_multiplier"] == pytest.approx(7.5, abs=0.1)


def test_other_devices_hide_one_a_little() -> None:
    few = measure(None, 10, knows_others=False, trials=40)
    many = measure(None, 300, knows_others=False, trials=40)
    assert few["auc"] > many["auc"] > 0.5


def test_the_page_has_a_row_for_what_the_attacker_knows(tmp_path: Path) -> None:
    cells = Cells(tmp_path / "privacy.jsonl")
    for epsilon in (None, 4.0):
        settings = {"knows_others": True, "devices": 10, "dp_epsilon": epsilon}
        cells.keep("attack", settings, {"auc": 0.7, "error": 0.01, "most": 0.71, "noise_multiplier": 4.0})
    text = tables(tmp_path)["attack"]
    assert "no noise" in text
    assert "0.70 ± 0.02 (at most 0.71)" in text
