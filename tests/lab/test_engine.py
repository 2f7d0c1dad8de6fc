"""Tests of the engine benchmarks: their results, and restarts after a kill."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from permille.engines.torch_engine import TorchEngine
from permille.errors import InputError
from permille.models.families import layer_of
from permille.package.reader import verify_package
from permille.quantization.types import Scheme
from permille_lab.engine import decode, gradients, memory, packages, steps
from permille_lab.engine.page import tables
from permille_lab.engine.replay import measure as measure_replay
from permille_lab.engine.replay import measure_groups
from permille_lab.engine.sizes import Sizes
from permille_lab.measuring.cells import Cells
from permille_lab.measuring.dense import batch_loss, dense_model
from permille_lab.measuring.machine import interleaved
from permille_lab.measuring.random_packages import SHAPES, random_package

TINY = SHAPES["tiny"]
SIZES = Sizes(shape="tiny", layers=None, sequences=2, tokens=8, rounds=1)


def test_a_finished_cell_is_not_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    calls: list[int] = []

    def measure() -> dict[str, int]:
        calls.append(1)
        return {"seconds": 3}

    assert Cells(path).once("step", {"tokens": 64}, measure) == {"seconds": 3}
    assert Cells(path).once("step", {"tokens": 64}, measure) == {"seconds": 3}
    assert len(calls) == 1
    Cells(path).once("step", {"tokens": 128}, measure)
    assert len(calls) == 2


def test_half_a_line_is_cut_off_and_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    Cells(path).once("step", {"tokens": 64}, lambda: {"seconds": 3})
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"figure": "step", "sett')
    again = Cells(path)
    assert [settings for settings, _ in again.of("step")] == [{"tokens": 64}]
    assert path.read_bytes() == whole


def test_a_line_that_is_no_cell_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    path.write_text('["step"]\n')
    with pytest.raises(InputError, match="line 1"):
        Cells(path)


@pytest.mark.parametrize("scheme", Scheme)
def test_a_random_package_is_sound_and_made_once(tmp_path: Path, scheme: Scheme) -> None:
    package = random_package(tmp_path, TINY, scheme=scheme, first_layer=1)
    verify_package(package.blobs, package.digest)
    masked = {layer_of(info.name) for info in package.manifest.tensors if info.count}
    assert masked == {1}
    before = list(package.blobs.entries())
    assert random_package(tmp_path, TINY, scheme=scheme, first_layer=1).digest == package.digest
    assert list(package.blobs.entries()) == before


@pytest.mark.parametrize("prepacked", [False, True])
def test_the_dense_contender_computes_what_the_engine_computes(tmp_path: Path, prepacked: bool) -> None:
    package = random_package(tmp_path, TINY, density=0.05)
    batch = SIZES.batch(package)
    expected = TorchEngine(package).losses(package.values()[None], batch)[0]
    assert batch_loss(dense_model(package, prepacked=prepacked), batch) == pytest.approx(
        float(expected), abs=1e-5
    )


def test_rounds_are_interleaved() -> None:
    order: list[str] = []
    found = interleaved({name: partial(order.append, name) for name in "ab"}, rounds=2)
    assert order == ["a", "b"] * 3
    assert len(found["a"]["walls"]) == 2


@pytest.mark.slow
def test_all_figures_of_a_tiny_shape_make_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_FIRST_ORDER", {"first order, LoRA-FA of rank 16": True})
    cells = Cells(tmp_path / "engine.jsonl")
    for figure, measure in (
        ("step", steps.measure_steps),
        ("loops", steps.measure_loops),
        ("lower layers", steps.measure_lower_layers),
        ("memory", memory.measure),
        ("first order", memory.measure_first_order),
        ("decode", decode.measure),
        ("schemes", packages.measure_schemes),
        ("gradient", gradients.measure),
    ):
        cells.once(figure, SIZES.settings(), partial(measure, tmp_path, SIZES))
    ((_, step),) = cells.of("step")
    losses, ours = step["losses"], step["steps"]["permille light float32"]
    assert losses["permille light float32"] == pytest.approx(losses["dense float32"], abs=1e-3)
    assert 0 < ours["not_forward"] < 1
    ((_, resident),) = cells.of("memory")
    child = resident["contenders"]["permille light float32"]
    assert child["peak_bytes"] > child["imports_bytes"] > 1 << 20
    assert steps.measure_queries(tmp_path, SIZES)["steps"].keys() >= {"spsa, 1 query", "forward, 8 queries"}
    ((_, gradient),) = cells.of("gradient")
    assert gradient["gradient_s"] >= gradient["forward_s"] >= 0
    assert gradient["rest_s"].keys() == {"0"}
    assert gradient["peak_bytes"] > gradient["anonymous_peak_bytes"] > 1 << 20
    memory_alone = gradients.measure(tmp_path, replace(SIZES, rounds=0))
    cells.keep("gradient", replace(SIZES, rounds=0).settings(), memory_alone)
    text = "\n".join(tables(tmp_path).values())
    assert "first order, LoRA-FA of rank 16" in text and "int4, inputs of 8 bits, 4x32" in text
    assert "tiny, 2x8, upper half masked" in text and "bitsandbytes" in text


def test_replays_of_all_ways_agree() -> None:
    found = measure_replay(40, 2000, [1, 2])
    assert found["exact"]
    of_groups = measure_groups(20, 2000, 64, [1, 2])
    assert of_groups["exact"]
    assert of_groups["replay_s"].keys() == {"1", "2", "1, processor", "2, processor"}
    assert len({way["state_digest"] for way in found["ways"].values()}) == 1
    assert np.isfinite(found["bytes_per_step"])
