"""Tests of the paper's table: the planned cells and the missing ones."""

from pathlib import Path

from permille_lab.evidence.paper import MODEL, planned, tables
from permille_lab.evidence.plan import Materials
from permille_lab.evidence.records import describe
from tests.sweep_files import EXAMPLE_MODEL


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
        assert (sweep.zo_steps, sweep.queries, sweep.estimator) == (1000, 1, "spsa")
        assert [method.name for method in sweep.methods] == unit.choices["methods"]
    assert not any("zo:full" in unit.choices["methods"] for unit in units if unit.choices["bases"] == ["nf4"])


def test_a_cell_that_did_not_run_is_named(tmp_path: Path) -> None:
    describe(tmp_path / "paper", planned(Path(MODEL)))
    found = tables(tmp_path)
    assert found["lacking"] == "63 of the table's 63 entries"
    (row,) = (line.split("|") for line in found["accuracies"].splitlines() if line.startswith("| zo:full"))
    # No cells with all weights on 4-bit bases.
    assert [cell.strip() for cell in row[2:-1]] == ["0 of 3 seeds"] * 3 + [""] * 3
