"""The quick forms of the engine benchmarks: what they measure is what they say, and a kill loses no cell."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from permille.engines.torch_engine import TorchEngine
from permille.errors import InputError
from permille.models.families import layer_of
from permille.quantization import Scheme
from permille_lab.benchmarks import decode, memory, packed_training, step_time
from permille_lab.benchmarks.cells import Cells
from permille_lab.benchmarks.dense import batch_loss, dense_model
from permille_lab.benchmarks.engine_page import page
from permille_lab.benchmarks.engine_steps import EngineStep, opened, random_batch
from permille_lab.benchmarks.machine import interleaved
from permille_lab.benchmarks.memory_limit import ratio
from permille_lab.benchmarks.mezo import Mezo
from permille_lab.benchmarks.packed_training import bind_values, packed_model
from permille_lab.benchmarks.random_packages import SHAPES, random_package

TINY = SHAPES["tiny"]


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
    package.verify(deep=True)
    masked = {layer_of(info.name) for info in package.manifest.tensors if info.count}
    assert masked == {1}
    before = sorted(package.blobs.iterate())
    assert random_package(tmp_path, TINY, scheme=scheme, first_layer=1).digest == package.digest
    assert sorted(package.blobs.iterate()) == before


@pytest.mark.parametrize("prepacked", [False, True])
def test_the_dense_contender_computes_what_the_engine_computes(tmp_path: Path, prepacked: bool) -> None:
    package = random_package(tmp_path, TINY, density=0.05)
    batch = random_batch(package, 3, 9)
    expected = TorchEngine(package).losses(package.values()[None], batch)[0]
    model = dense_model(package, torch.float32, prepacked=prepacked)
    assert batch_loss(model, batch) == pytest.approx(float(expected), abs=1e-5)


def test_first_order_training_starts_at_the_engines_loss_with_its_derivative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_training, "_BLOCK_TOKENS", 100)  # 256 tokens: two whole blocks and a part
    package = random_package(tmp_path, TINY, density=0.05)
    batch = random_batch(package, 2, 8)
    z_K = np.random.default_rng(0).choice(np.array([-1, 1], np.float32), package.k)
    loss, expected_1 = TorchEngine(package).directional_derivatives(package.values(), z_K[None], batch)
    model, values_K = packed_model(package)
    values_K.requires_grad_(True)
    bind_values(model, values_K)
    from permille_lab.benchmarks.dense import mean_loss

    found = mean_loss(model, batch)
    found.backward()  # type: ignore[no-untyped-call]
    assert values_K.grad is not None
    assert float(found.detach()) == pytest.approx(loss, abs=1e-5)
    assert float(values_K.grad @ torch.from_numpy(z_K)) == pytest.approx(float(expected_1[0]), rel=1e-3)


def test_mezo_moves_all_weights_along_one_direction_and_lowers_the_loss() -> None:
    weight = torch.full((64,), 3.0)
    before = weight.clone()
    optimizer = Mezo([weight], epsilon=1e-3, learning_rate=1e-3)
    for seed in range(200):
        optimizer.step(lambda: float(weight.square().sum()), seed)
    assert float(weight.square().sum()) < float(before.square().sum()) / 2
    assert bool((weight != before).all())


def test_the_share_that_is_not_forward_is_a_share(tmp_path: Path) -> None:
    package = random_package(tmp_path, TINY, density=0.05)
    engine = opened(package, "torch", threads=1)
    assert engine is not None
    step = EngineStep(package, engine, random_batch(package, 2, 8))
    step()
    assert 0 < step.rest_share < 1
    assert step.loss == pytest.approx(
        float(engine.losses(package.values()[None], random_batch(package, 2, 8))[0]), rel=0.1
    )


def test_rounds_are_interleaved_and_slow_ones_run_once() -> None:
    order: list[str] = []
    steps = {name: (lambda name=name: order.append(name)) for name in ("a", "b", "slow")}
    found = interleaved(steps, rounds=2, once=frozenset({"slow"}))
    assert order == ["a", "b", "a", "b", "slow", "a", "b"]
    assert len(found["a"]["walls"]) == 2
    assert len(found["slow"]["walls"]) == 1


def test_all_figures_of_a_tiny_shape_make_a_page(tmp_path: Path) -> None:
    cells = Cells(tmp_path / "cells.jsonl")
    sizes: dict[str, Any] = {"shape": "tiny", "layers": None, "threads": 1}
    step_time.run(cells, tmp_path, **sizes, sequences=2, tokens=[8], rounds=1, bf16=False, query_rounds=1)
    decode.run(cells, tmp_path, **sizes, prompt=4, tokens=3, rounds=1)
    memory.run(cells, tmp_path, **sizes, sequences=2, tokens=8, contenders=("permille torch float32",))
    ((_, step),) = cells.of("step")
    assert step["losses"]["permille torch float32"] == pytest.approx(
        step["losses"]["dense float32"], abs=1e-3
    )
    ((_, resident),) = cells.of("memory")
    child = resident["contenders"]["permille torch float32"]
    assert child["peak_bytes"] > child["imports_bytes"] > 1 << 20
    text = page(cells)
    for title in ("## Steps", "## Eight queries", "## Memory of one step", "## Decoding"):
        assert title in text
    assert json.loads((tmp_path / "cells.jsonl").read_text().splitlines()[0])["figure"] == "step"


def test_the_page_names_the_smallest_limit_that_holds(tmp_path: Path) -> None:
    cells = Cells(tmp_path / "cells.jsonl")
    machine = {"load_1m": 0.0, "cores": 2, "processor": "x", "instructions": [], "memory_bytes": 1}
    around = {"machine": {"before": machine, "after": machine | {"versions": {}}}}
    common = {"shape": "7B", "layers": None, "sequences": 4, "tokens": 128, "contender": "permille light"}
    # Above the peak a limit binds nothing, and wall time is noise; processor seconds are not.
    for limit, seconds, spent in ((None, 10.0, 9.0), (4.6, 15.0, 9.9), (4.2, 10.9, 9.0), (4.0, 11.5, 9.0)):
        result = {
            "there": True,
            "step_s": [30.0, seconds, seconds],
            "step_cpu_s": [20.0, spent, spent],
            "peak_bytes": (4 << 30) + (1 << 28),
        } | around
        cells.once("memory limit", common | {"limit_gib": limit}, result.copy)
    assert "7B, 4x128, permille light | at most 4.6 GiB | 4.2 GiB |" in page(cells)
    assert "| 4.6 | 4.25 | 15.0, 15.0 | 1.50 | 1.10 |" in page(cells)
    assert "| 4.0 | 4.25 | 11.5, 11.5 | 1.15 | 1.00 |" in page(cells)


def test_a_child_that_did_not_live_has_no_ratio() -> None:
    free = {"there": True, "step_s": [9.0, 2.0, 2.0]}
    assert ratio({"there": True, "step_s": [9.0, 3.0, 3.0]}, free) == 1.5
    assert ratio({"failed": -9}, free) is None
