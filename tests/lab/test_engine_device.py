"""Tests of the torch engine's measurement on a device, with tiny shapes on a CPU."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from permille_lab.engine import device
from permille_lab.engine.page import device_tables
from permille_lab.engine.sizes import Sizes
from permille_lab.measuring.cells import Cells, Result, Settings

SIZES = Sizes(shape="tiny", layers=None, sequences=1, tokens=8, rounds=1)
STEP: Result = {"finite": True}


@pytest.mark.slow
def test_a_device_is_measured_and_its_page_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_MATRICES", ((8, 128), (9, 64)))
    monkeypatch.setattr(device, "TESTS", ("tests/unit/engines/test_coded_layers.py",))
    cells = Cells(tmp_path / "device.jsonl")
    on_cpu: Settings = {"device": "cpu"}
    found = {
        "conformance": cells.once("conformance", on_cpu, partial(device.conformance, "cpu")),
        "quantization": cells.once("quantization", on_cpu, partial(device.quantization, "cpu")),
        "fisher": cells.once("fisher", on_cpu | {"shape": "tiny"}, partial(device.fisher, "cpu", "tiny")),
    }
    for layers in (1, 2):
        sizes = replace(SIZES, layers=layers)
        settings = sizes.settings() | on_cpu | {"dtype": "float32"}
        measure = partial(device.steps, tmp_path, sizes, "cpu", "float32", (1, 2))
        found[f"step {layers}"] = cells.once("step", settings, measure)
    assert all(device.agrees(figure.split()[0], result) for figure, result in found.items())
    assert found["conformance"]["tests"] > 10
    step = found["step 2"]
    assert set(step["steps"]) == {
        "gradient",
        *(f"{number} variants{how}" for number in (2, 4) for how in ("", ", one by one")),
    }
    packed = [found[f"step {layers}"]["resident_bytes"]["packed"] for layers in (1, 2)]
    assert packed[1] == 2 * packed[0] > 0
    tables = device_tables(tmp_path)
    assert "the same bits" in tables["checks"] and "4 variants" in tables["steps"]
    assert "tiny, 2 layers, 1x8" in tables["whole"] and "tiny/1, 1x8" in tables["memory"]


@pytest.mark.parametrize(
    ("figure", "result"),
    [
        ("conformance", {"tests": 3, "failures": 1, "errors": 0}),
        ("conformance", {"tests": 0, "failures": 0, "errors": 0}),
        ("quantization", {"matrices": {"8x64": {"codes": True, "scales": False, "decoded": True}}}),
        ("fisher", {"difference": 0.1, "mask_in_common": 1.0}),
        ("step", {"finite": False}),
    ],
)
def test_a_device_that_disagrees_fails(
    figure: str, result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(*_: Any) -> list[device.Cell]:
        return [("step", {}, lambda: STEP), (figure, {"device": "cpu"}, lambda: result)]

    monkeypatch.setattr(device, "plan", plan)
    monkeypatch.setattr("sys.argv", ["device", "--device", "cpu", "--cells", str(tmp_path / "cells.jsonl")])
    assert device.main() == 1


def test_a_gpu_gets_the_whole_shapes_in_both_dtypes_and_a_cpu_the_smallest() -> None:
    def steps(name: str) -> set[tuple[str, int | None, str]]:
        cells = device.plan(Path(), name, 1, 3)
        assert {figure for figure, _, _ in cells} == {"conformance", "quantization", "fisher", "step"}
        return {(of["shape"], of["layers"], of["dtype"]) for figure, of, _ in cells if figure == "step"}

    shapes = ("135M", "1.1B", "7B")
    assert steps("cuda") == {(shape, None, dtype) for shape in shapes for dtype in ("float32", "bfloat16")}
    assert steps("cpu") == {("135M", None, "float32"), ("7B", 1, "float32"), ("7B", 2, "float32")}
