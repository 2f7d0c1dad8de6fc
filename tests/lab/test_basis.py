"""Tests of the basis that is learned from public text, and of the steps in it."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.engines.light.engine import LightEngine
from permille_agent.embed import batch_of, package_tokenizer, prepare, read_documents
from permille_lab.learning.runs import TextRun
from permille_lab.measuring.cells import Cells
from permille_lab.real.basis import (
    Basis,
    Curve,
    General,
    Lessons,
    Steps,
    basis_of,
    clusters,
    displacement,
    measure,
)
from permille_lab.real.page import basis_tables
from tests.packages import tiny_package
from tests.unit.edge_agent.runs import user_text

LESSONS = Lessons(users=3, steps=4, rows=2)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TextRun:
    folder = tmp_path_factory.mktemp("basis")
    package = tiny_package(folder / "blobs")
    documents, _ = read_documents([user_text(folder)])
    prepared = prepare(documents, package_tokenizer(package), row_tokens=32)
    return TextRun(package=package, engine=LightEngine(package), prepared=prepared, seed=0)


@pytest.fixture(scope="module")
def basis(run: TextRun) -> Basis:
    """Return the basis of three pseudo-users, whose text is the person's own."""
    rows_NT = np.stack([row.ids_T for row in run.prepared.train if len(row.ids_T) == 32])
    users = [rows_NT[user :: LESSONS.users][:8] for user in range(LESSONS.users)]
    return basis_of(
        np.stack([displacement(LightEngine(run.package), run.package, u, LESSONS) for u in users])
    )


def test_clusters_separate_windows_of_different_words() -> None:
    rng = np.random.default_rng(0)
    windows_NT = np.concatenate([rng.integers(first, first + 20, (30, 16)) for first in (0, 100, 200)])
    found = list(clusters(windows_NT, 3, 8))
    assert [len(rows_NT) for rows_NT in found] == [8, 8, 8]
    assert all(len(np.unique(rows_NT // 100)) == 1 for rows_NT in found)


def test_columns_span_the_displacements_with_equal_norms() -> None:
    moved_UK = np.random.default_rng(0).normal(size=(4, 3000)) + 2
    found = basis_of(moved_UK)
    assert found.columns_RK.dtype == np.int8
    assert np.abs(found.columns_RK).max() == 127
    norms_R = np.linalg.norm(found.columns_RK.astype(float), axis=1)
    assert norms_R.max() < 1.01 * norms_R.min()
    units_RK = found.units()
    rest_UK = moved_UK - moved_UK @ units_RK.T @ units_RK
    assert np.linalg.norm(rest_UK) < 0.05 * np.linalg.norm(moved_UK), "int8 loses little"
    assert np.linalg.norm(moved_UK @ units_RK[0]) > 2 * np.linalg.norm(moved_UK @ units_RK[1])


def losses_of(result: dict[str, Sequence[Sequence[float]]]) -> list[float]:
    return [loss for _, loss in result["curve"]]


def test_steps_in_the_basis_reduce_the_loss_in_few_passes(run: TextRun, basis: Basis) -> None:
    general = General(run.package, [batch_of(run.prepared.select)], 1)
    how = Steps(person="one", method="basis", steps=(4,), users=3)
    result = measure(run, basis, how, general)
    assert [passes for passes, _ in result["curve"]] == [0, 2 * 2 * 3, 4 * 2 * 3]
    assert losses_of(result)[-1] < losses_of(result)[0]
    then = measure(run, basis, Steps(person="one", method="then", steps=(4, 3), users=3), general)
    assert then["curve"][:3] == result["curve"]
    assert then["curve"][-1][0] == 4 * 2 * 3 + 3 * 2 * 16


def test_the_better_base_takes_no_device_step(run: TextRun, basis: Basis) -> None:
    general = General(run.package, [batch_of(run.prepared.select)], 1)
    how = Steps(person="one", method="better", steps=(0,), users=3, length=2.0)
    result = measure(run, basis, how, general)
    assert [passes for passes, _ in result["curve"]] == [0, 0]
    assert result["moved"] == pytest.approx(2 * float(np.linalg.norm(basis.mean_K)), rel=1e-3)


def test_evaluations_do_not_count_as_passes(run: TextRun) -> None:
    curve = Curve(run)
    values_K: NDArray[np.float32] = run.package.values()
    for _ in range(2):
        curve.add(values_K)
    assert [passes for passes, _ in curve.points] == [0, 0, 0]


def test_the_page_compares_passes_for_the_same_fall(tmp_path: Path) -> None:
    cells = Cells(tmp_path / "basis.jsonl")
    for method, curve in {
        "groups": [[0, 5.0], [160, 4.95], [320, 4.9]],
        "basis": [[0, 5.0], [32, 4.95], [64, 4.85]],
    }.items():
        settings = {"person": "one", "method": method, "seed": 0, "users": 8}
        cells.keep("basis", settings, {"curve": curve, "general": [4.0, 3.9], "fault": "", "cpu_s": 1.0})
    tables = basis_tables(tmp_path)
    rows = [line.split("|")[1:-1] for line in tables["passes"].splitlines()[2:]]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["one", "32", "0.050", "160", "5.0"],
        ["one", "64", "0.150", "more than 320", "more than 5.0"],
    ]
    assert "0.050 at 32, 0.150 at 64" in tables["steps"]
    assert "-0.100" in tables["steps"]
