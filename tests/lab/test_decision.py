"""Tests of the simulated decisions: the distributions of the draws, and differences between the rules."""

from pathlib import Path

import numpy as np
import pytest

from permille_lab.decision.__main__ import ALIKE, DRAWS, measure, measure_little
from permille_lab.decision.page import tables
from permille_lab.measuring.cells import Cells


@pytest.mark.parametrize("draw", DRAWS)
def test_gains_have_mean_0_and_deviation_1(draw: str) -> None:
    drawn = DRAWS[draw](np.random.default_rng(0), (400, 1000))
    assert drawn.mean() == pytest.approx(0, abs=0.01)
    assert drawn.std() == pytest.approx(1, abs=0.03)


def test_rare_harm_fools_a_bootstrap_and_not_the_agents_rule() -> None:
    useless = measure("one in twenty hurt", 20, gain=0.0, trials=100)
    assert useless["evidence"] <= 0.03 < 0.2 < useless["bootstrap"]
    useful = measure("normal", 100, gain=0.4, trials=20)
    assert useful == {"evidence": 1.0, "bootstrap": 1.0}


@pytest.mark.parametrize("draw", DRAWS)
def test_a_thousand_tokens_adopt_no_useless_model_and_most_good_ones(draw: str) -> None:
    assert 0.3 in ALIKE
    for useless in (0.0, 0.01):
        assert measure_little(draw, 0.3, gain=useless, trials=300)["adopted"] <= 0.03
    assert measure_little("normal", 0.3, gain=0.4, trials=50)["adopted"] > 0.8


def test_the_table_has_a_column_for_each_gain(tmp_path: Path) -> None:
    cells = Cells(tmp_path / "decision.jsonl")
    for gain, share in ((0.0, 0.001), (0.2, 0.75)):
        settings = {"draw": "normal", "groups": 20, "gain": gain, "trials": 9}
        cells.keep("decision", settings, {"evidence": share, "bootstrap": 1.0})
        settings = {"draw": "normal", "alike": 0.3, "gain": gain, "trials": 9}
        cells.keep("little", settings, {"adopted": share})
    *_, little = tables(tmp_path)["little"].splitlines()
    assert [cell.strip() for cell in little.split("|")[1:-1]] == ["normal", "0.3", "0.1", "75.0"]
    *_, row = tables(tmp_path)["adopted"].splitlines()
    assert [cell.strip() for cell in row.split("|")[1:-1]] == ["normal", "20", "0.1 (100.0)", "75.0 (100.0)"]
