"""Tests of the paper's table: the planned cells, the missing ones, and verdicts from tuned cells only."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from permille_lab.evidence.coverage import concentration, coverage, measured
from permille_lab.evidence.paper import MODEL, planned
from permille_lab.evidence.paper_page import tables, verdict_rows
from permille_lab.evidence.plan import Materials
from permille_lab.evidence.records import describe
from tests.sweep_files import EXAMPLE_MODEL

ITEMS = 200


def test_every_sweep_of_the_table_can_be_run(sweep_file: Path) -> None:
    units = planned(EXAMPLE_MODEL)
    assert len({unit.name for unit in units}) == len(units)
    materials = Materials(
        models=(EXAMPLE_MODEL,),
        tasks={task: {"train": sweep_file.parent / "train.tsv"} for task in {unit.task for unit in units}},
        corpus=sweep_file.parent / "corpus.jsonl",
    )
    for unit in units:
        sweep = unit.sweep(materials)
        assert [method.name for method in sweep.methods] == unit.choices["methods"]
        # Whatever trains is tuned, except for the part `reading`.
        assert (sweep.trials > 1) is (unit.stage == "tuned")
        assert unit.stage == "tuned" or sweep.methods[0].order is None or unit.name.endswith("-reading")
    trained = {unit.task for unit in units if any("zo:" in name for name in unit.choices["methods"])}
    assert trained == {"sst2"}


def test_a_cell_that_did_not_run_is_counted(tmp_path: Path) -> None:
    units = planned(Path(MODEL))
    describe(tmp_path / "paper", units)
    found = tables(tmp_path)
    runs = sum(len(unit.choices["methods"]) * len(unit.choices["seeds"]) for unit in units)
    assert found["lacking"] == f"{runs} of {runs}"
    assert found["decided"].startswith("0 of ")
    assert not any("|" in found[name] for name in ("verdicts", "tuned", "coverage"))


def _records(method: str, loss: float, seeds: int = 3, **changed: Any) -> list[dict[str, Any]]:
    """Return a record for each seed. Losses vary by 0.1 between items, and right is who has less than 1."""
    found = []
    for seed in range(seeds):
        losses_N = loss + 0.1 * np.random.default_rng([seed, len(method)]).standard_normal(ITEMS)
        found.append(
            {
                "model": MODEL,
                "base": "nf4",
                "method": method,
                "task": "sst2",
                "seed": seed,
                "items": [str(n) for n in range(ITEMS)],
                "correct": "".join("01"[int(one < 1)] for one in losses_N),
                "item_losses": losses_N.tolist(),
                "majority": 0.5,
                "validation_loss": loss,
                "stage": "tuned",
                "density": 0.001,
                "queries": 1,
                "on_edge": False,
            }
            | changed
        )
    return found


REFERENCES = [
    *_records("zero-shot", 3.0, 1, stage="references"),
    *_records("fo:lora-8", 0.1, 1, stage="untuned"),
]


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({}, "holds: +0.50"),
        ({"seeds": 2}, "open: needs 3 seeds that all its tasks have, has 2"),
        ({"on_edge": True}, None),
        ({"stage": "untuned"}, None),
    ],
)
def test_only_tuned_cells_of_three_seeds_give_a_verdict(changed: dict[str, Any], verdict: str | None) -> None:
    found = verdict_rows(
        [*REFERENCES, *_records("zo:sensitive-c4", 1.0), *_records("zo:random", 1.5, **changed)]
    )
    if verdict is None:
        assert found == []
    else:
        (row,) = found
        assert row["claim of the paper"] == "sensitive weights beat random ones, nf4"
        assert row["by loss, nats"].startswith(verdict)
        assert row["by accuracy, points"].startswith(verdict.partition(":")[0])


def test_shares_of_a_gradient_are_those_that_masks_hold() -> None:
    scores = {"a": np.array([[9.0, 1.0]], np.float32), "b": np.array([[2.0, 8.0]], np.float32)}
    assert concentration(scores, 0.5) == [0.9, 0.8]
    mask = {"a": np.array([1], np.uint32), "b": np.array([1], np.uint32)}
    assert coverage(scores, mask) == pytest.approx(9 / 20)
    large = {"a": np.arange(1e4, dtype=np.float32)[None]}
    found = measured(large, {"none": {at: {"a": np.array([0], np.uint32)} for at in (1e-4, 1e-3, 1e-2)}})
    # The largest 1 % of 0 to 9,999 are 9,900 to 9,999.
    assert found["0.01"]["own"] == pytest.approx(sum(range(9900, 10000)) / sum(range(10000)), rel=1e-5)
    assert found["0.01"]["none"] == 0.0
