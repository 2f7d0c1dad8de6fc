"""The races to a held-out loss, in their quick form: a tiny random model, made-up texts, a few steps."""

import json
import math
from pathlib import Path

import pytest

from permille.engines.torch_engine import TorchEngine
from permille_agent.training.evaluation import mean_loss
from permille_lab.benchmarks import compute_types, estimators, first_order, time_to_loss
from permille_lab.benchmarks.cells import Cells
from permille_lab.benchmarks.loss_page import FIRST_ORDER, LINEAR, OURS, page
from permille_lab.benchmarks.loss_pictures import lowest_so_far, write
from permille_lab.benchmarks.model_packages import Sources
from permille_lab.benchmarks.trajectories import descend, lowest, seconds_to, train_agent
from permille_lab.benchmarks.user_text import user_text
from tests.packages import sentences
from tests.tiny_model import write_model


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    """A model and texts where the benchmarks look for them."""
    made = Sources(models=tmp_path / "models", data=tmp_path / "data")
    write_model(made.models / "tiny")
    made.corpus.parent.mkdir(parents=True)
    texts = (" ".join(sentences(20, seed=seed)) for seed in range(64))
    made.corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    users = made.data / "users/shakespeare/tinyshakespeare_by_speaker.jsonl"
    users.parent.mkdir(parents=True)
    row = {"user": time_to_loss.SPEAKER, "text": sentences(250, seed=7)}
    users.write_text(json.dumps(row) + "\n")
    return made


def test_evaluations_are_off_the_clock_and_the_first_low_one_counts() -> None:
    losses = iter([5.0, 4.0, 2.0, 3.0])
    points = descend(lambda _: None, lambda: next(losses), steps=6, every=2)
    assert [point["step"] for point in points] == [0, 2, 4, 6]
    assert lowest(points)["step"] == 4
    assert seconds_to(points, 3.5) == points[2]["cpu_s"]
    assert seconds_to(points, 1.0) is None


def test_a_loss_that_is_not_finite_ends_a_run() -> None:
    losses = iter([5.0, float("inf"), 2.0])
    points = descend(lambda _: None, lambda: next(losses), steps=6, every=2)
    assert [point["step"] for point in points] == [0, 2]


def test_the_race_against_mezo_makes_every_run_and_a_page(
    sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(estimators.MODELS, "tiny", (0.01, 1.0))
    cells = Cells(tmp_path / "cells.jsonl")
    time_to_loss.run(
        cells,
        sources,
        tmp_path / "packages",
        model="tiny",
        seed=0,
        steps=4,
        plain_steps=4,
        our_steps=4,
        trial_steps=1,
        threads=1,
        linear=True,
    )
    found = {settings["what"]: result for settings, result in cells.of("time to loss")}
    assert set(found) == {"trial", f"trial of {LINEAR}", LINEAR, "MeZO", "plain MeZO", *OURS}
    assert [point["step"] for point in found["MeZO"]["points"]] == [0, 1, 2, 3, 4]
    # Both loops begin at the full-precision model's loss on the same rows.
    assert found["MeZO"]["points"][0]["loss"] == found["plain MeZO"]["points"][0]["loss"]
    assert [found[what]["points"][-1]["step"] for what in OURS] == [4] * len(OURS)
    assert [found[what]["options"]["basis"] for what in OURS] == [True] * len(OURS)
    # All weights and linear weights alone are the same model until the first step, and not after it.
    assert found[LINEAR]["points"][0]["loss"] == found["MeZO"]["points"][0]["loss"]
    assert found[LINEAR]["points"][-1]["loss"] != found["MeZO"]["points"][-1]["loss"]
    assert "| plain MeZO | 4 |" in page(cells) and f"| {LINEAR} | 4 |" in page(cells)


def test_plain_mezo_of_fewer_steps_lends_its_pace_to_the_losses_of_mezo(tmp_path: Path) -> None:
    cells = Cells(tmp_path / "cells.jsonl")
    common = {"model": "tiny", "speaker": "A", "seed": 0, "threads": 1}
    whole = [{"step": step, "loss": 5.0 - step, "wall_s": 1.0, "cpu_s": 2.0 * step} for step in (0, 1, 2)]
    part = [{"step": step, "loss": 5.0, "wall_s": 1.0, "cpu_s": 7.0 * step} for step in (0, 1)]
    cells.once("time to loss", common | {"what": "MeZO", "steps": 2}, lambda: {"points": whole})
    cells.once("time to loss", common | {"what": "plain MeZO", "steps": 1}, lambda: {"points": part})
    assert "| plain MeZO | 2, losses of MeZO at the pace of 1 steps | 5.0000 | 3.0000 | 14.0" in page(cells)


def test_first_order_trains_from_our_base_in_a_process_of_its_own(
    sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERMILLE_MODELS", str(sources.models))
    monkeypatch.setenv("PERMILLE_DATA", str(sources.data))
    user = user_text(sources, "tiny", time_to_loss.SPEAKER, 0, tmp_path / "packages", tmp_path / "home")
    base = mean_loss(TorchEngine(user.package), user.package.values(), user.prepared.select)
    found = first_order.measure(
        tmp_path / "packages",
        method="LoRA",
        model="tiny",
        seed=0,
        steps=4,
        every=2,
        threads=1,
        learning_rate=1e-2,
    )
    assert found["points"][0]["loss"] == pytest.approx(base, abs=1e-3)
    assert found["points"][-1]["loss"] < base
    assert found["peak_bytes"] >= found["anonymous_peak_bytes"] > 1 << 20


def test_our_runs_are_evaluated_between_the_agents_evaluations(
    sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the log: the states at the agent's own evaluations have the agent's losses."""
    user = user_text(sources, "tiny", time_to_loss.SPEAKER, 0, tmp_path / "packages", tmp_path / "home")
    run = train_agent(user, steps=30, threads=1, options={})
    points = run.points_of_log()
    last = [point for point in points if point["attempt"] == run.told.attempt]
    assert {1, 2, 3, 5, 10, 30} <= {point["step"] for point in last}
    assert [point["cpu_s"] for point in points] == sorted(point["cpu_s"] for point in points)
    own = {(point["attempt"], point["step"]): point["loss"] for point in run.result["points"]}
    monkeypatch.setattr(run.told, "points", [])
    again = {(point["attempt"], point["step"]): point["loss"] for point in run.points_of_log()}
    shared = own.keys() & again.keys()
    assert shared
    assert all(own[key] == pytest.approx(again[key], abs=1e-6) for key in shared)


def test_steps_to_a_loss_count_over_attempts(tmp_path: Path) -> None:
    cells = Cells(tmp_path / "cells.jsonl")
    common = {"model": "tiny", "speaker": "A", "seed": 0, "threads": 1, "what": "run"}

    chosen = {"options": {"estimator": "one_sided", "queries": 3, "batch_rows": 2}}

    def result(*points: tuple[int, int, float, float]) -> dict[str, object]:
        told = [
            {"attempt": attempt, "step": step, "loss": loss, "wall_s": 1.0, "cpu_s": cpu}
            for attempt, step, loss, cpu in points
        ]
        return {"points": told, "peak_bytes": 1e6, "anonymous_peak_bytes": 1e6, "search_cpu_s": 1.0} | chosen

    ours = result((0, 0, 5.0, 0.0), (0, 7, 6.0, 7.0), (1, 0, 5.0, 7.0), (1, 4, 4.4, 11.0), (1, 9, 4.0, 16.0))
    theirs = result((0, 0, 5.0, 0.0), (0, 2, 4.2, 6.0))
    cells.once(FIRST_ORDER, common | {"method": "permille"}, lambda: ours)
    cells.once(FIRST_ORDER, common | {"method": "LoRA"}, lambda: theirs)
    told = page(cells)
    assert list(lowest_so_far("permille", ours).y) == [5.0, 5.0, 4.4, 4.0]  # of the attempts in their order
    assert list(lowest_so_far("permille", ours).x) == [7.0, 7.0, 11.0, 16.0]
    assert "](" not in told
    write(tmp_path / "output", cells)
    figure = "figures/loss-over-seconds-first-order.png"
    assert f"]({figure})" in (tmp_path / "output/time_to_loss.md").read_text()
    assert [path.read_bytes()[:4] for path in (tmp_path / "output/figures").iterdir()] == [b"\x89PNG"]
    assert json.loads((tmp_path / "output/time_to_loss.json").read_text())[1]["result"] == theirs
    assert "one of ours 3 queries of 2 rows forward,\none_sided." in told
    assert "| permille | 11 steps, 11.0 (12.0) s | 16 steps, 16.0 (17.0) s | 16 steps," in told
    assert "| LoRA | 2 steps, 6.0 (7.0) s | 2 steps, 6.0 (7.0) s | not reached |" in told


@pytest.mark.parametrize(("best", "tries"), [(1e-2, 4), (0.1, 6), (10.0, 8), (1e-5, 8)])
def test_a_learning_rate_on_the_edge_of_its_grid_extends_it(best: float, tries: int) -> None:
    made: list[float] = []

    def tried(rate: float) -> float:
        made.append(rate)
        return abs(math.log(rate / best))

    found = first_order.best_rate(tried, (1e-3, 3e-3, 1e-2, 3e-2))
    assert len(made) == tries
    assert tried(found) == min(map(tried, made[:tries]))


def test_compute_types_are_judged_against_float32(
    sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute_types, "RACE_STEPS", 1)
    monkeypatch.setattr(compute_types, "PROBE_STEPS", 1)
    cells = Cells(tmp_path / "cells.jsonl")
    compute_types.run(
        cells,
        sources,
        tmp_path / "packages",
        model="tiny",
        seeds=[0, 1],
        steps=2,
        threads=1,
        types=["float32", "bfloat16"],
    )
    errors = {settings["type"]: result for settings, result in cells.of("error") if settings["seed"] == 0}
    assert errors["float32"]["forward"] == 0
    assert errors["bfloat16"]["forward"] > 1e-4
    assert errors["float32"]["1"] < errors["bfloat16"]["1"]
    text = compute_types.page(cells)
    assert "| bfloat16 | 2 | 2 |" in text
    ((_, paces),) = cells.of("pace")
    assert set(paces) == {"float32", "bfloat16"}
    assert min(paces.values()) > 0
    assert "| float32 | 1.00 |" in text
