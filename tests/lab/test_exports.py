"""Tests of the measurement of exports: arithmetic, table, and a whole run on a tiny package in llama.cpp."""

from pathlib import Path

import numpy as np
import pytest

from permille.quantization.types import Scheme
from permille_agent.embed import Row
from permille_lab.exports.__main__ import Personal, divergence, log_probs, mean_loss, measure
from permille_lab.exports.page import tables
from permille_lab.measuring.cells import Cells
from tests.unit.engines.gguf_packages import exported_package
from tests.unit.engines.tiny import variants


def row(ids: list[int], target: list[bool]) -> Row:
    nothing_T = np.zeros(len(ids), np.int64)
    return Row(np.array(ids), np.array(target), nothing_T, nothing_T)


def test_losses_are_of_targets_and_divergence_of_all_tokens() -> None:
    logit_TD = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8], [1, 1, 1]], np.float32)) + 7
    ours = log_probs(logit_TD)
    np.testing.assert_allclose(np.exp(ours).sum(axis=1), 1)
    assert mean_loss([ours], [row([0, 0, 2], [False, True, True])]) == pytest.approx(
        -(np.log(0.5) + np.log(0.8)) / 2, rel=1e-6
    )
    even = np.full((1, 3), -np.log(3.0))
    assert divergence([ours[:1]], [ours[:1]]) == 0
    assert divergence([ours[:1]], [even]) == pytest.approx(np.log(3) - 1.5 * np.log(2), rel=1e-6)


def test_a_cell_becomes_rows_of_the_table(tmp_path: Path) -> None:
    found = {"bytes": 2_500_000, "kept": 0.9985, "divergence": 0.02, "base": 5.0, "personal": 4.5}
    kinds = {"q4_0": found | {"share": 0.994, "same_texts": "3 of 8"}}
    settings = {"model": "tiny", "scheme": "int4", "steps": 1, "rows": 1}
    Cells(tmp_path / "exports.jsonl").keep(
        "exports", settings, {"k": 3, "base": 5.1, "personal": 4.4, "kinds": kinds}
    )
    page = tables(tmp_path)
    assert "99.4 %" in page["kinds"] and "3 of 8" in page["kinds"] and "2.50" in page["kinds"]
    assert page["ours"] == "tiny, int4: 5.1000 and 4.4000"


@pytest.mark.slow
def test_all_types_of_a_package_are_measured(tmp_path: Path) -> None:
    package = exported_package(tmp_path / "blobs", "llama", Scheme.INT4, changes={"intermediate_size": 96})
    values_K = variants(package, 2, scale=0.2)[1]
    rng = np.random.default_rng(0)
    rows = [row(rng.integers(3, 320, 20).tolist(), [False] + [True] * 19) for _ in range(2)]
    found = measure(Personal(package=package, values_K=values_K, rows=rows), tmp_path)
    assert list(found["kinds"]) == ["f32", "f16", "q8_0", "q4_0"]
    assert found["kinds"]["f32"]["divergence"] < 1e-10 < found["kinds"]["q4_0"]["divergence"]
    assert found["kinds"]["f32"]["same_texts"] == "2 of 2"
    assert found["kinds"]["f32"]["personal"] == pytest.approx(found["personal"], abs=1e-5)
