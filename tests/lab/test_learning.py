"""Tests of runs of the agent and of other methods, on a tiny random model and made-up text."""

import math
from pathlib import Path

import pytest
import torch

from permille.choices import EstimatorKind
from permille.engines.torch_engine import TorchEngine
from permille_lab.learning import compare
from permille_lab.learning.compare import STATE
from permille_lab.learning.estimators import CONTENDERS, DEFAULT, measure
from permille_lab.learning.methods import METHODS, best_rate, descend, final_loss
from permille_lab.learning.mezo import Mezo
from permille_lab.learning.page import LORA, SAME, estimator_tables, learning_tables, loss_at
from permille_lab.learning.runs import TextRun, options_for, person_run, text_run
from permille_lab.measuring.cells import Cells
from permille_lab.measuring.model_packages import sources_from_environment
from permille_lab.people.user_texts import Document
from tests.packages import sentences, tiny_package
from tests.tiny_model import write_corpus, write_model

DOCUMENTS: tuple[Document, ...] = tuple({"text": text} for text in sentences(250, seed=7))


@pytest.fixture
def run(tmp_path: Path) -> TextRun:
    package = tiny_package(tmp_path / "blobs")
    found = text_run(package, DOCUMENTS, tmp_path / "text", seed=0, threads=1)
    return TextRun(package=package, engine=TorchEngine(package), prepared=found.prepared, seed=0)


def test_mezo_moves_all_weights_along_one_direction_and_lowers_the_loss() -> None:
    weight = torch.full((64,), 3.0)
    before = weight.clone()
    optimizer = Mezo([weight], epsilon=1e-3, learning_rate=1e-3)
    for seed in range(200):
        optimizer.step(lambda: float(weight.square().sum()), seed)
    assert float(weight.square().sum()) < float(before.square().sum()) / 2
    assert bool((weight != before).all())


def test_the_agent_is_timed_without_its_evaluations(run: TextRun, tmp_path: Path) -> None:
    found = run.train(options_for(run.package, seed=0, steps=20), tmp_path / "run")
    points = found["points"]
    assert (points[0]["step"], points[0]["seconds"]) == (0, 0.0)
    assert points[0]["loss"] == pytest.approx(run.loss(), abs=1e-4)
    assert points[-1]["step"] <= found["steps"] <= 20
    assert [point["seconds"] for point in points] == sorted(point["seconds"] for point in points)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_begins_at_its_base_and_ends_lower(method: str, run: TextRun, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    contender = METHODS[method]
    rate = 1e-4 if method == "MeZO" else 1e-2
    points = descend(contender.make(run, model, rate), run, steps=6, every=1, rows=contender.rows)
    assert [point["step"] for point in points] == list(range(7))
    assert final_loss(contender, run, model, rate, steps=6) == points[-1]["loss"]
    assert final_loss(contender, run, model, math.inf, steps=6) == math.inf
    if method != "MeZO":  # MeZO's base is the full-precision model, not that of the package
        assert points[0]["loss"] == pytest.approx(run.loss(), abs=1e-3)
        assert points[-1]["loss"] < points[0]["loss"]


@pytest.mark.slow
def test_a_run_is_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models, data = tmp_path / "models", tmp_path / "data"
    write_model(models / "tiny")
    write_corpus(data / "text/c4_en/c4_sample.jsonl")
    for name, folder in (("PERMILLE_MODELS", models), ("PERMILLE_DATA", data)):
        monkeypatch.setenv(name, str(folder))
    common = {"model": "tiny", "text": compare.SPEAKER, "seed": 0}
    folder = tmp_path / "packages"
    ours = compare.measure(folder, common | {"method": compare.FORWARD_ONLY, "steps": 4}, DOCUMENTS)
    assert ours["peak_bytes"] > 1 << 20
    settings = common | {"method": "the same values, AdamW", "steps": 2}
    theirs = compare.measured(sources_from_environment(), folder, settings, DOCUMENTS, tmp_path / "run")
    assert theirs["points"][0]["loss"] == pytest.approx(ours["points"][0]["loss"], abs=1e-4)
    assert theirs["k"] == ours["k"] > 0


def test_a_loss_that_is_not_finite_ends_a_run(run: TextRun) -> None:
    class Diverging:
        losses = iter([5.0, math.inf, 2.0])

        def step(self, *_: object) -> None:
            pass

        def loss(self) -> float:
            return next(self.losses)

    assert [point["step"] for point in descend(Diverging(), run, steps=6, every=2, rows=2)] == [0, 2]


@pytest.mark.parametrize(("best", "tries"), [(1e-2, 4), (0.1, 6), (10.0, 8), (1e-5, 8)])
def test_a_learning_rate_on_the_edge_of_its_grid_extends_it(best: float, tries: int) -> None:
    made: list[float] = []

    def tried(rate: float) -> float:
        made.append(rate)
        return abs(math.log(rate / best))

    found = best_rate(tried, (1e-3, 3e-3, 1e-2, 3e-2))
    assert len(made) == tries
    assert tried(found) == min(map(tried, made[:tries]))


def test_contenders_have_the_same_row_passes(tmp_path: Path) -> None:
    package = tiny_package(tmp_path / "blobs")
    options = options_for(package, seed=0, steps=9)
    assert {contender.row_passes() for contender in CONTENDERS} <= {30, 32, 6}
    assert DEFAULT.estimator is EstimatorKind.ONE_SIDED
    for contender in CONTENDERS[1:3]:
        found = measure(package, DOCUMENTS, contender, options, threads=1)
        assert found["steps"] == 9 * 32 // contender.row_passes()


def test_between_points_losses_are_on_a_line() -> None:
    curve = [{"seconds": 10.0 * n, "loss": loss} for n, loss in enumerate((5.0, 4.0, 4.5, 3.0))]
    assert loss_at(curve, "seconds", 5.0) == 4.5
    assert loss_at(curve, "seconds", 25) == 3.75
    assert math.isnan(loss_at([*curve, {"seconds": 40.0, "loss": None}], "seconds", 40))


def test_contenders_are_compared_in_the_runs_that_both_have(tmp_path: Path) -> None:
    cells = Cells(tmp_path / "estimators.jsonl")
    common = {"batch_rows": 2, "model": "m"}
    for text, estimator, queries, last, seconds in (
        ("a", "spsa", 8, 4.0, 10.0),
        ("a", "one_sided", 16, 3.0, 20.0),
        ("b", "one_sided", 16, 1.0, 10.0),
    ):
        points = [{"loss": 5.0, "seconds": 0.0}, {"loss": last, "seconds": seconds}]
        settings = {**common, "text": text, "seed": 0, "estimator": estimator, "queries": queries}
        cells.keep("estimators", settings, {"points": points})
    # `one_sided` falls by 1, as `spsa` does in all, after 10 of its 20 seconds. Text b has no baseline.
    rows = [line.split("|") for line in estimator_tables(tmp_path)["paired"].splitlines()]
    (row,) = [row for row in rows if "one_sided" in row[1]]
    assert [cell.strip() for cell in row[2:4]] == ["1", "+0.000"]


def test_methods_are_timed_to_shares_of_our_fall(tmp_path: Path) -> None:
    cells = Cells(tmp_path / "learning.jsonl")
    for method, losses in ((STATE, (5.0, 4.4, 4.0)), (LORA, (5.0, 4.2, 4.1)), (SAME, (5.0, 4.2, 4.02))):
        points = [{"step": n, "loss": loss, "seconds": 7.0 * n} for n, loss in enumerate(losses)]
        settings = {"model": "m", "text": "t", "seed": 0, "method": method, "steps": 2}
        result = {"points": points, "search_s": 3.0, "peak_bytes": 1 << 20, "restarts": 0}
        cells.keep("learning", settings, result)
    tables = learning_tables(tmp_path)
    ours, theirs, _ = tables["times"].splitlines()[2:]
    assert [cell.strip() for cell in ours.split("|")[3:9]] == ["5.8", "9.6", "12.3", "13.1", "5.000", "4.000"]
    assert [cell.strip() for cell in theirs.split("|")[3:7]] == ["4.4", "6.6", "14.0", "not reached"]
    assert "-0.020" in tables["targets"]
    assert "0 of 1" in tables["targets"]


def test_who_wrote_little_is_divided_as_in_the_study_of_people(tmp_path: Path) -> None:
    package = tiny_package(tmp_path / "blobs")
    found = person_run(package, DOCUMENTS[:60], tmp_path / "text", seed=0, threads=1)
    again = person_run(package, DOCUMENTS[:60], tmp_path / "text", seed=1, threads=1)
    assert found.prepared.digest == again.prepared.digest
    assert len(found.prepared.train) > 1
    assert found.loss() > 0
