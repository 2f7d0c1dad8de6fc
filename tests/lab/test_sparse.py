"""Tests of the comparison of sparse models: equal numbers of steps, contents of cells, and rows of tables."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from permille.models.checkpoint import Checkpoint
from permille_lab.measuring.cells import Cells
from permille_lab.sparse.__main__ import CASES, Material, measured, planned, settings_of
from permille_lab.sparse.page import tables, verdict
from permille_lab.sparse.rounds import IterativeText
from permille_lab.sparse.ways import ABLATED, ABLATIONS, STEPS, TABLE, Rates, Way, plan_of
from tests.unit.engines.tiny import tiny_model

RATES = Rates(lora=0.01, pooling=0.03)
ROWS = np.random.default_rng(0).integers(0, 60, (3, 8, 12))


@pytest.mark.parametrize("way", (*TABLE, *ABLATIONS))
def test_every_way_has_as_many_steps(way: Way) -> None:
    plan = plan_of(way, ABLATED, 1, RATES)
    assert plan.recovery.steps * (plan.rounds - 1 + plan.longer) == STEPS
    assert plan.recovery.rate == RATES.of(plan.adapter) / (3 if way is Way.SLOWER else 1)


def test_the_plan_names_each_cell_once_and_each_target() -> None:
    names = [repr(settings_of(case, target, way, seed)) for case, seed, target, way in planned()]
    assert (
        len(names)
        == len(set(names))
        == sum(len(case.seeds) * (len(case.ways) + (len(case.targets) - 1) * len(TABLE)) for case in CASES)
    )


def test_a_one_shot_cell_knows_the_model_before_its_recovery(tmp_path: Path) -> None:
    tiny_model("llama", num_hidden_layers=1).save_pretrained(tmp_path / "model")
    source = Checkpoint(tmp_path / "model")
    text = IterativeText(calibration_NT=ROWS[0], recovery_MT=ROWS[1], evaluation_ET=ROWS[2][:2])
    plan = plan_of(Way.WANDA, "2:4", 0, RATES)
    plan = replace(plan, recovery=replace(plan.recovery, steps=1))
    material = Material(work=text, judged={"a": ROWS[2]})
    found = measured(source, tmp_path / "work", material, plan, one_shot=True)
    assert found["zeros"] == 0.5
    assert found["pruned"]["a"] != found["recovered"]["a"]
    assert len(found["rounds"]) == 1
    assert not (tmp_path / "work").exists()


def test_rows_are_paired_by_seed(tmp_path: Path) -> None:
    cells, case = Cells(tmp_path / "sparse.jsonl"), CASES[0]
    report = {"loss": [3.0, 2.0], "loss_dense": None, "norms": [1.0, 2.0]}
    cells.keep("dense", {"model": case.model, "windows": 1}, {"losses": {"t": 1.0}})
    for seed in range(3):
        for way, loss in ((Way.WANDA, 2.0), (Way.ITERATIVE, 1.8), (Way.DENSE, 1.9)):
            after = {"recovered": {"t": loss + 10 * seed + 0.01 * seed * (way is Way.ITERATIVE)}}
            before = {"pruned": {"t": 5.0}} if way is Way.WANDA else {}
            last = report | ({"loss_dense": 1.5} if way is Way.DENSE else {})
            cells.keep("sparse", settings_of(case, "0.6", way, seed), after | before | {"rounds": [last]})
    found = tables(tmp_path)
    (row,) = (line for line in found["claims"].splitlines() if "better than Wanda" in line)
    # -0.20, -0.19, -0.18: mean -0.19, t(0.975, 2) = 4.303 standard errors of 0.01 / sqrt(3)
    assert "-0.190 ± 0.025: holds" in row
    assert "148.41 ± 0.00" in found["perplexities"]
    assert "+0.500" in found["merging"] and "2.00" in found["merging"]
    assert "20.09 → 7.39" in found["rounds"]
    assert "+0.190" in found["ablations"]


def test_gains_of_people_are_paired(tmp_path: Path) -> None:
    cells = Cells(tmp_path / "sparse.jsonl")
    losses = {"dense": [[3.0, 2.0], [3.0, 2.5]], "sparse": [[4.0, 2.8], [4.0, 3.2]]}
    result = {name: {"losses": rows} for name, rows in losses.items()}
    cells.keep("device people", {"model": "m"}, result)
    (row,) = tables(tmp_path)["people"].splitlines()[2:]
    # The gains are 1.0 and 0.5, then 1.2 and 0.8, so they grow by 0.2 and 0.3.
    assert "0.750" in row and "1.000" in row and "+0.250" in row


def test_a_verdict_needs_an_interval_without_zero() -> None:
    assert [verdict(mean, 0.1) for mean in (-0.2, -0.05, 0.05, 0.2)] == [
        "holds",
        "undecided",
        "undecided",
        "fails",
    ]
