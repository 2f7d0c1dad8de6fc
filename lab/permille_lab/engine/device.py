"""Check and time the torch engine on a device: `make gpu`, or small shapes on a CPU: `make gpu DEVICE=cpu`.

    python -m permille_lab.engine.device --device cuda

These are the cells, in this order:

1. Run the tests that have the device in their name.
2. Compare NF4 codes of bitsandbytes with ours.
3. Compare Fisher scores with those of a CPU.
4. Time steps in the shapes of real models, with one row of 128 or 32 tokens. A step computes one gradient, or
   the losses of 2q variants, in one call or one by one.

Packages have random codes, so a float copy of the weights never exists. Embedding and head have 8 bits.

A CPU measures the shape of SmolLM2-135M, and one and two layers of a 7B model. From these the page computes
the memory of all 32 layers: all layers have equal sizes, and a forward pass holds the activations of only one
layer at a time.

Finished cells are not measured again. The exit status is 1 if anything failed or disagreed.
"""

import ctypes
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from transformers import AutoConfig, AutoModelForCausalLM

from permille.choices import Embeddings, MaskMethod
from permille.engines.torch_engine import ComputeDtype, TorchEngine
from permille.quantization import dequantize, quantize
from permille.quantization.nf4 import BLOCK_SIZE
from permille.quantization.types import Scheme
from permille.sensitivity.fisher import fisher_scores
from permille.sensitivity.masks import select_mask
from permille.zo.estimators import Batch
from permille_lab.engine.sizes import Sizes
from permille_lab.measuring.cells import Cells, Result, Settings, settings_parser
from permille_lab.measuring.machine import AnonymousPeak, Step, interleaved, machine, resident
from permille_lab.measuring.random_packages import SHAPES

TESTS = (
    "tests/unit/engines/test_torch_conformance.py",
    "tests/unit/engines/test_coded_layers.py",
    "tests/unit/sensitivity/test_fisher.py",
)
Cell = tuple[str, Settings, Callable[[], Result]]
_DENSITY = 0.001
_SEQUENCES = 8
_MATRICES = ((576, 1536), (4096, 4096), (11008, 4096))


def conformance(device: str) -> Result:
    """Run the tests of engine, layers and scores that have the device in their name."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-n0", "-q", "-k", device, f"--junitxml={report}"]
        subprocess.run([*command, *TESTS], check=False)
        suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    return counts | {"seconds": round(float(suite.get("time", 0)), 1), "machine": machine()}


def quantization(device: str) -> Result:
    """Quantize random matrices by bitsandbytes on the device and by us. Compare the bits of the results."""
    found: dict[str, Any] = {}
    for rows, columns in _MATRICES:
        w_NK = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
        ours, begin = quantize(w_NK, Scheme.NF4, BLOCK_SIZE), time.perf_counter()
        w = torch.from_numpy(w_NK).to(device)
        packed, state = quantize_4bit(w, blocksize=BLOCK_SIZE, compress_statistics=False, quant_type="nf4")
        codes = packed.cpu().numpy().reshape(-1)
        seconds = time.perf_counter() - begin
        decoded = dequantize_4bit(packed, state).cpu().numpy()
        found[f"{rows}x{columns}"] = {
            "codes": bool((codes == ours.packed).all()),
            "scales": bool((state.absmax.cpu().numpy() == ours.scales).all()),
            "decoded": bool((decoded == dequantize(ours)).all()),
            "seconds": round(seconds, 4),
        }
    return {"matrices": found, "machine": machine()}


def fisher(device: str, shape: str) -> Result:
    """Compare scores and mask of a model with random weights between the device and a CPU."""
    config = dict(SHAPES[shape].config())
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    tokens_NT = np.random.default_rng(0).integers(0, config["vocab_size"], (_SEQUENCES, 128))
    scores, seconds = {}, {}
    for each in ("cpu", device):
        model = model.to(each)
        begin = time.perf_counter()
        scores[each] = fisher_scores(model, tokens_NT)
        seconds[each] = round(time.perf_counter() - begin, 2)
    exact, found = scores["cpu"].flat, scores[device].flat
    masks = [select_mask(each, MaskMethod.FISHER, _DENSITY) for each in (scores["cpu"], scores[device])]
    common = sum(len(np.intersect1d(masks[0][name], masks[1][name])) for name in masks[0])
    return {
        "difference": float(np.linalg.norm(found - exact) / np.linalg.norm(exact)),
        "mask_in_common": common / sum(map(len, masks[0].values())),
        "seconds": seconds,
        "machine": machine(),
    }


def steps(folder: Path, sizes: Sizes, device: str, dtype: str, queries: tuple[int, ...]) -> Result:
    """Measure times and memory of the steps of one shape."""
    before = machine()
    package = sizes.package(folder)
    engine = TorchEngine(package, device=device, compute_dtype=dtype, threads=sizes.threads)
    batch, values_K = sizes.batch(package), package.values()
    contenders: dict[str, Step] = {"gradient": partial(engine.gradient, values_K, batch)}
    for each in queries:
        signs_V1 = np.array([[1], [-1]] * each, np.float32)
        values_VK = values_K + np.float32(1e-3) * signs_V1
        contenders[f"{2 * each} variants"] = partial(engine.losses, values_VK, batch)
        contenders[f"{2 * each} variants, one by one"] = partial(_one_by_one, engine, values_VK, batch)
    found = interleaved(contenders, rounds=sizes.rounds)
    for name, step in contenders.items():
        found[name]["above_bytes"] = _above_bytes(device, step)
    loss, gradient_K = engine.gradient(values_K, batch)
    return {
        "resident_bytes": engine.resident_bytes,
        "package_bytes": package.size_bytes,
        "k": package.k,
        "steps": found,
        "finite": bool(np.isfinite(loss) and np.isfinite(gradient_K).all()),
        "machine": {"before": before, "after": machine(), "device": _named(device)},
    }


def _one_by_one(engine: TorchEngine, values_VK: np.ndarray[Any, np.dtype[np.float32]], batch: Batch) -> None:
    for values_K in values_VK:
        engine.losses(values_K[None], batch)


def _above_bytes(device: str, step: Step) -> int:
    """Return the peak bytes of a step above the model."""
    if device == "cpu":
        ctypes.CDLL(None).malloc_trim(0)  # else memory that an earlier step freed is reused and not counted
        held = resident()["RssAnon"]
        with AnonymousPeak() as peak:
            step()
        return peak.bytes - held
    torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device)
    step()
    return torch.cuda.max_memory_allocated(device) - held


def _named(device: str) -> str:
    return "cpu" if device == "cpu" else torch.cuda.get_device_name(device)


def agrees(figure: str, result: Result) -> bool:
    """Return True if the result of a cell is as required."""
    match figure:
        case "conformance":
            return bool(result["tests"]) and not result["failures"] + result["errors"]
        case "quantization":
            return all(
                all(found[what] for what in ("codes", "scales", "decoded"))
                for found in result["matrices"].values()
            )
        case "fisher":
            return bool(result["difference"] < 1e-3 and result["mask_in_common"] > 0.99)
        case _:
            return bool(result["finite"])


def plan(folder: Path, device: str, threads: int, rounds: int) -> list[Cell]:
    """Return all cells of a device."""
    is_cpu = device == "cpu"
    shape = "tiny" if is_cpu else "135M"
    cells: list[Cell] = [
        ("conformance", {"device": device}, partial(conformance, device)),
        ("quantization", {"device": device}, partial(quantization, device)),
        ("fisher", {"device": device, "shape": shape}, partial(fisher, device, shape)),
    ]
    base = Sizes(shape="135M", layers=None, sequences=1, tokens=128, threads=threads, rounds=rounds)
    base = replace(base, tables=Embeddings.Q8_0)
    sizes = [base, replace(base, tokens=32)]
    if is_cpu:
        sizes += [replace(base, shape="7B", layers=layers, rounds=1) for layers in (1, 2)]
    else:
        sizes += [replace(base, shape=each) for each in ("1.1B", "7B")]
    for each in sizes:
        queries = (1,) if is_cpu and each.layers else (1, 4)
        for dtype in (ComputeDtype.FLOAT32,) if is_cpu else ComputeDtype:
            settings = each.settings() | {"device": device, "dtype": dtype.value}
            cells.append(("step", settings, partial(steps, folder, each, device, dtype, queries)))
    return cells


def main() -> int:
    """Measure the missing cells."""
    parser = settings_parser(__doc__, "device")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    cells, failed = Cells(options.cells), []
    for figure, settings, measure in plan(options.folder, options.device, options.threads, options.rounds):
        if not agrees(figure, cells.once(figure, settings, measure)):
            failed.append(figure)
    if failed:
        sys.stderr.write(f"Failed on {options.device}: {', '.join(failed)}. See {options.cells}.\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
