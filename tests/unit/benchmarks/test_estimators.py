"""The comparison of estimators: every contender runs, the order of cells, and what the page says of them."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from permille.package.reader import Package
from permille.zo.header import EstimatorKind
from permille_lab.benchmarks.cells import Cells
from permille_lab.benchmarks.estimator_page import FIGURE, loss_at, page, seconds_to
from permille_lab.benchmarks.estimator_runs import Contender, first_rows, measure, step_passes
from permille_lab.benchmarks.estimators import CONTENDERS, budget, cells_of
from tests.packages import layered_package, tiny_package
from tests.unit.edge_agent.runs import user_text
from tests.unit.zo.logs import kind_fields, make_header


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    plain = tiny_package(tmp_path_factory.mktemp("package"))
    return layered_package(plain, exponents_K=(np.arange(plain.k) % 2).astype(np.int8))


@pytest.mark.parametrize("contender", CONTENDERS, ids=lambda contender: contender.label)
def test_every_contender_runs_to_the_end_of_the_budget(
    package: Package, tmp_path: Path, contender: Contender
) -> None:
    text = user_text(tmp_path, 260)

    found = measure(package, text, contender, seed=0, row_tokens=32, passes=280)

    assert found["steps"] == int(280 / found["step_passes"])
    last = found["points"][-1]
    assert last["passes"] == pytest.approx(found["steps"] * found["step_passes"])
    assert last["cpu_s"] > 0
    assert all(math.isfinite(point["loss"]) for point in found["points"])
    assert len(found["trials"]["losses"]) <= 8


def test_a_step_costs_its_row_passes() -> None:
    costs = {
        kind: step_passes(
            make_header(**{"queries": 4} | kind_fields(kind, lower=2, upper=8), counts=(1,) * 4), 2, 3
        )
        for kind in EstimatorKind
    }
    assert costs == {
        EstimatorKind.SPSA: 24,
        EstimatorKind.ONE_SIDED: 12,
        EstimatorKind.FORWARD: 15,
        # Half the layers for 2 x 2, half for 2 x 8
        EstimatorKind.SPLIT: 30,
    }


def test_the_budget_fits_the_time() -> None:
    passes = budget(0.01, 100, seconds=1000, cells=10)
    assert 0.01 * 10 * (passes + 100) < 1000
    assert passes > 3000
    assert budget(1.0, 100, seconds=10, cells=10) == 128


def test_a_run_that_ends_early_has_compared_everything_once() -> None:
    cells = list(cells_of(["a", "b"], ["x"], [0, 1]))
    assert {(cell.model, cell.contender) for cell in cells[: len(cells) // 2]} == {
        (model, contender) for model in "ab" for contender in CONTENDERS
    }
    assert len({json.dumps(cell.settings()) for cell in cells}) == len(cells)


def points(*losses: float, pass_s: float = 0.1) -> list[dict[str, Any]]:
    return [
        {"passes": 100.0 * index, "cpu_s": 100.0 * index * pass_s, "loss": loss}
        for index, loss in enumerate(losses)
    ]


def test_the_page_compares_at_equal_passes_and_seconds(tmp_path: Path) -> None:
    cells = Cells(tmp_path / "cells.jsonl")
    chosen = list(cells_of(["m"], ["t"], [0]))[:3]
    curves = [points(5.0, 4.5, 4.0), points(5.0, 4.0, 3.0, pass_s=0.2), None]
    for cell, curve in zip(chosen, curves, strict=True):
        result: dict[str, Any] = {"points": curve} if curve else {"failed": "no epsilon"}
        cells.once(FIGURE, cell.settings(), result.copy)
    assert cells.has(FIGURE, chosen[0].settings())

    shown = page(cells)

    rows = [line for line in shown.splitlines() if line.startswith("| ")]
    # In 20 seconds: 1.0 by the first; the second has made 100 of its 200 passes, and has fallen by 1.0
    assert "| spsa 8 x 2 | 1 | 1.000 | 1.000 | - | 1.00 | 1 of 1 | 0 |" in rows
    assert "| one_sided 16 x 2 | 1 | 2.000 | 1.000 | - | 1.00 | 1 of 1 | 0 |" in rows
    assert "| one_sided 16 x 2 | 1 | +0.000 | - | 0 of 1 | 0 |" in rows
    assert "split 15 x 2: m, t, seed 0: no epsilon" in shown


def test_a_run_that_ends_above_its_base_is_told(tmp_path: Path) -> None:
    cells = Cells(tmp_path / "cells.jsonl")
    chosen = list(cells_of(["m"], ["t"], [0, 1]))
    for cell in chosen:
        rose = cell.contender.label.startswith("one_sided") and cell.settings()["seed"] == 1
        curve = points(5.0, 5.5) if rose else points(5.0, 4.0)
        if cell.contender.label.startswith("split"):
            curve[-1]["loss"] = None
        cells.keep(FIGURE, cell.settings(), {"points": curve})
    rows = [line for line in page(cells).splitlines() if line.startswith("| one_sided 16 x 2 |")]
    assert rows[0].startswith("| one_sided 16 x 2 | 2 | 0.250 |") and rows[0].endswith("| 1 |")
    assert rows[1] == "| one_sided 16 x 2 | 2 | -0.750 | 0.750 | 0 of 2 | 1 |"
    (above, _, *_) = [line for line in page(cells).splitlines() if line.startswith("| split")]
    assert above.endswith("| 2 |")
    table = page(cells).partition("| contender | runs | at equal")[2].partition("\n\n")[0].splitlines()[2:]
    means = [float(line.split(" | ")[3]) for line in table]
    finite = [mean for mean in means if math.isfinite(mean)]
    assert finite == sorted(finite, reverse=True)
    assert means[: len(finite)] == finite  # a run without a loss sorts last


def test_between_points_losses_are_on_a_line() -> None:
    curve = points(5.0, 4.0, 4.5, 3.0)
    assert loss_at(curve, "passes", 50) == 4.5
    assert loss_at(curve, "cpu_s", 25) == 3.75
    assert seconds_to(curve, 4.5) == 5.0
    assert seconds_to(curve, 3.5) == pytest.approx(20 + 10 * 1.0 / 1.5)
    assert seconds_to(curve, 2.0) == math.inf
    assert math.isnan(loss_at([*points(5.0), {"passes": 100, "cpu_s": 10, "loss": None}], "passes", 100))


def test_rows_are_taken_until_there_are_enough_tokens(package: Package, tmp_path: Path) -> None:
    from tests.bigram_engine import BigramEngine
    from tests.unit.edge_agent.runs import setup_of

    rows = setup_of(package, BigramEngine(package), user_text(tmp_path)).prepared.test
    chosen = first_rows(rows, 100)
    counts = [int(row.target_T.sum()) for row in chosen]
    assert sum(counts) >= 100 > sum(counts[:-1])
    assert first_rows(rows, 10**9) == rows
