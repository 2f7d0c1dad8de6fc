"""The simulation of decisions: its draws are what they are called, and the rules differ where they must."""

from pathlib import Path

import numpy as np
import pytest

from permille_lab.decision.__main__ import DRAWS, measure
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


def test_the_table_has_a_column_for_each_gain(tmp_path: Path) -> None:
    cells = Cells(tmp_path / "decision.jsonl")
    for gain, share in ((0.0, 0.001), (0.2, 0.75)):
        settings = {"draw": "normal", "groups": 20, "gain": gain, "trials": 9}
        cells.keep("decision", settings, {"evidence": share, "bootstrap": 1.0})
    *_, row = tables(tmp_path)["adopted"].splitlines()
    assert [cell.strip() for cell in row.split("|")[1:-1]] == ["normal", "20", "0.1 (100.0)", "75.0 (100.0)"]
