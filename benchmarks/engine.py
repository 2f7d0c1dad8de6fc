"""Step time and memory of our engine beside plain transformers and bitsandbytes, on one model in one run.

    python -m benchmarks.engine
    python -m benchmarks.engine --layers 22 --hidden 2048 --inner 5632 --output docs/results

A random Llama is packaged as NF4. A step is what one SPSA query needs: the losses of two variants of the
sparse values on one batch, or its equivalent, two forward passes with loss, where an engine has no variants
(plain transformers and bitsandbytes, which compute the same loss for all tokens and have no sparse values to
set). Rounds are interleaved, and seconds are processor time of one thread, so that a busy machine is busy for
all; the median counts, of bfloat16 one round. Each memory figure is a fresh process.

Writes `engine.json` and `engine.md` where `--output` says, else prints the JSON.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from permille.engines.export import export_transformers
from permille.engines.torch_engine import TorchEngine
from permille.models.families import expected_tensors, scoped_tensors
from permille.package.blobs import BlobFolder
from permille.package.reader import Package
from permille.package.writer import link_transformers_folder
from permille.zo.estimators import Batch
from tests.packages import write_package

Step = Callable[[], object]

DENSITY = 0.001
# Engine -> what one step of it is. Each name is also what a child process is asked to measure.
ENGINES = {
    "permille float32": "2 variants, nothing kept dequantized",
    "permille float32, cached": "2 variants, all weights kept dequantized",
    "permille bfloat16": "2 variants, nothing kept dequantized",
    "transformers float32": "2 forward passes, dense weights",
    "transformers bfloat16": "2 forward passes, dense weights",
    "bitsandbytes NF4, float32": "2 forward passes, no sparse values",
}
MORE = {
    "permille float32, 8 variants": "4 SPSA queries",
    "permille float32, 1 derivative": "forward-mode, 1 direction",
    "permille float32, 4 derivatives": "forward-mode, 4 directions, one primal pass",
}


class Bench:
    """The package, the folders that other libraries open, and the batch."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.folder = folder
        self.threads: int = arguments.threads
        blobs = BlobFolder(folder / "blobs")
        if not (folder / "digest").exists():
            package = _write(arguments, folder)
            (folder / "digest").write_text(package.digest)
        self.package = Package.open(blobs, (folder / "digest").read_text())
        shape = (arguments.sequences, arguments.tokens)
        rng = np.random.default_rng(0)
        target_BT = np.ones(shape, bool)
        target_BT[:, 0] = False
        self.batch = Batch(
            input_ids_BT=rng.integers(0, arguments.vocabulary, shape),
            attention_BT=np.ones(shape, bool),
            target_BT=target_BT,
        )
        self.z_QK = rng.choice(np.array([-1, 1], np.float32), (4, self.package.k))

    def step(self, name: str) -> Step:
        """Load an engine; the function that makes one step of it."""
        torch.set_num_threads(self.threads)
        library, _, rest = name.partition(" ")
        dtype = "bfloat16" if "bfloat16" in name else "float32"
        if library == "permille":
            return self._permille(rest, dtype)
        path = self.folder / ("linked" if library == "bitsandbytes" else "plain")
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
        return self._forward_pair(model)

    def _permille(self, what: str, dtype: str) -> Step:
        cache_bytes = 1 << 40 if "cached" in what else 0
        engine = TorchEngine(self.package, compute_dtype=dtype, cache_bytes=cache_bytes)
        values_K = self.package.values()
        if "derivative" in what:
            z_QK = self.z_QK[: 4 if "4" in what else 1]
            return lambda: engine.directional_derivatives(values_K, z_QK, self.batch)
        count = 4 if "8" in what else 1
        shift_QK = np.float32(0.5 / np.sqrt(self.package.k)) * self.z_QK[:count]
        values_VK = np.concatenate([values_K + shift_QK, values_K - shift_QK])
        return lambda: engine.losses(values_VK, self.batch)

    def _forward_pair(self, model: Any) -> Step:
        ids = torch.from_numpy(self.batch.input_ids_BT)

        def pair() -> list[float]:
            with torch.no_grad():
                return [float(model(input_ids=ids, labels=ids, use_cache=False).loss) for _ in range(2)]

        return pair

    def tokens_per_s(self, *, cached: bool, count: int = 16) -> float:
        """Greedy generation after a prompt of 16 tokens, the prompt's pass left out."""
        engine = TorchEngine(self.package, cache_bytes=1 << 40 if cached else 0)
        stream = engine.generate(
            self.package.values(), self.batch.input_ids_BT[0, :16], max_new_tokens=count + 1
        )
        next(stream)
        begin = time.process_time()
        made = sum(1 for _ in stream)
        return made / (time.process_time() - begin)

    def relative_errors(self) -> dict[str, float]:
        """Of the four scalars, against forward-mode in float32, at epsilon * sqrt(k) = 0.5."""
        epsilon = 0.5 / np.sqrt(self.package.k)
        values_K = self.package.values()
        _, exact_Q = TorchEngine(self.package).directional_derivatives(values_K, self.z_QK, self.batch)
        errors = {}
        for dtype in ("float32", "bfloat16"):
            engine = TorchEngine(self.package, compute_dtype=dtype)
            shift_QK = (epsilon * self.z_QK).astype(np.float32)
            plus_Q = engine.losses(values_K + shift_QK, self.batch).astype(np.float64)
            minus_Q = engine.losses(values_K - shift_QK, self.batch).astype(np.float64)
            spsa_Q = (plus_Q - minus_Q) / (2 * epsilon)
            _, forward_Q = engine.directional_derivatives(values_K, self.z_QK, self.batch)
            norm = float(np.linalg.norm(exact_Q))
            errors[f"spsa {dtype}"] = float(np.linalg.norm(spsa_Q - exact_Q)) / norm
            errors[f"forward-mode {dtype}"] = float(np.linalg.norm(forward_Q - exact_Q)) / norm
        return errors


def _write(arguments: argparse.Namespace, folder: Path) -> Package:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": arguments.hidden,
        "intermediate_size": arguments.inner,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": arguments.hidden // 64,
        "num_key_value_heads": max(1, arguments.hidden // 256),
        "vocab_size": arguments.vocabulary,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    rng = np.random.default_rng(0)
    weights = {name: _random(rng, shape) for name, shape in expected_tensors(config).items()}
    mask = {name: _random_mask(rng, rows * columns) for name, (rows, columns) in scoped_tensors(config)}
    package = write_package(folder / "blobs", config, weights, mask, {})
    link_transformers_folder(package, folder / "linked")
    export_transformers(package, None, folder / "plain")
    return package


def _random(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Norms are ones; rows of matrices have norm 1."""
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    return rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[-1]))


def _random_mask(rng: np.random.Generator, weights: int) -> NDArray[np.uint32]:
    return np.sort(rng.choice(weights, round(DENSITY * weights), replace=False)).astype(np.uint32)


def _resident(field: str) -> int:
    """MiB of this process, from the kernel's own account."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":")) >> 10


def _measure_memory(arguments: argparse.Namespace, name: str, folder: Path) -> dict[str, int]:
    """Peak of a fresh process that makes two steps, and what of it no file backs, in MiB."""
    sizes = [
        f"--{key}={getattr(arguments, key)}"
        for key in ("layers", "hidden", "inner", "vocabulary", "sequences", "tokens", "threads")
    ]
    command = [sys.executable, "-m", "benchmarks.engine", *sizes, "--child", name, "--folder", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    measured: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return measured


def _child(bench: Bench, name: str) -> None:
    step = bench.step(name)
    step()
    step()
    print(json.dumps({"peak_mib": _resident("VmHWM"), "anonymous_mib": _resident("RssAnon")}))


def _measure_steps(bench: Bench, rounds: int) -> dict[str, float]:
    steps = {name: bench.step(name) for name in ENGINES | MORE}
    for step in steps.values():
        step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        for name, step in steps.items():
            if number and "bfloat16" in name:
                continue
            begin = time.process_time()
            step()
            seconds[name].append(time.process_time() - begin)
    return {name: statistics.median(times) for name, times in seconds.items()}


def _report(arguments: argparse.Namespace, bench: Bench) -> dict[str, Any]:
    step_s = _measure_steps(bench, arguments.rounds)
    return {
        "model": {key: getattr(arguments, key) for key in ("layers", "hidden", "inner", "vocabulary")}
        | {"k": bench.package.k, "package_bytes": bench.package.size_bytes},
        "batch": {"sequences": arguments.sequences, "tokens": arguments.tokens},
        "rounds": arguments.rounds,
        "step_s": {name: round(seconds, 3) for name, seconds in step_s.items()},
        "memory": {name: _measure_memory(arguments, name, bench.folder) for name in ENGINES},
        "generation_tokens_per_s": {
            "cached": round(bench.tokens_per_s(cached=True), 2),
            "not cached": round(bench.tokens_per_s(cached=False), 2),
        },
        "relative_error": {name: float(f"{error:.2g}") for name, error in bench.relative_errors().items()},
        "machine": {
            "processor": _processor(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "bfloat16": _bfloat16(),
            "threads": arguments.threads,
            "load_1m": round(os.getloadavg()[0], 2),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _bfloat16() -> str:
    flags = Path("/proc/cpuinfo").read_text()
    if "avx512_bf16" in flags or "amx_bf16" in flags:
        return "It computes in bf16 by instruction."
    return "It has no bf16 instructions: bf16 rows say nothing about a machine that has."


def _markdown(report: dict[str, Any]) -> str:
    model, batch, machine = report["model"], report["batch"], report["machine"]
    dense = report["step_s"]["transformers float32"]
    rows = "\n".join(
        f"| {name} | {what} | {report['step_s'][name]:.2f} | {report['step_s'][name] / dense:.2f} | "
        + (
            f"{report['memory'][name]['peak_mib']} | {report['memory'][name]['anonymous_mib']} |"
            if name in report["memory"]
            else "| |"
        )
        for name, what in (ENGINES | MORE).items()
    )
    errors = "\n".join(f"| {name} | {error:.2g} |" for name, error in report["relative_error"].items())
    made = report["generation_tokens_per_s"]
    return f"""# The torch engine beside transformers and bitsandbytes

`python -m benchmarks.engine --output docs/results` made this page and `engine.json`. A random Llama of
{model["layers"]} layers, hidden size {model["hidden"]}, inner size {model["inner"]} and {model["vocabulary"]}
tokens; NF4, {model["k"]} sparse values, {model["package_bytes"] / 1e6:.0f} MB of package. Batch of
{batch["sequences"]} x {batch["tokens"]} tokens; seconds of processor time, median of {report["rounds"]}
interleaved rounds (bfloat16: one).

Machine: {machine["processor"]}, {machine["cpu_capability"]}, {machine["threads"]} thread, load
{machine["load_1m"]}; torch {machine["torch"]}, transformers {machine["transformers"]}. {machine["bfloat16"]}
Ratios travel, absolute times do not.

| engine | a step is | seconds | against dense float32 | peak MiB | anonymous MiB |
|---|---|---|---|---|---|
{rows}

Peak is what the process ever held, mapped files included, two steps after loading. Anonymous is what no
file backs: what a machine short of memory cannot drop and read again. Libraries are some 250 MiB of it.

Generation: {made["cached"]} tokens a second with weights kept dequantized, {made["not cached"]} if not.

Error of the estimated scalars against forward-mode in float32 (4 directions, epsilon * sqrt(k) = 0.5):

| estimate | relative error |
|---|---|
{errors}
"""


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--inner", type=int, default=2816)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="folder for engine.json and engine.md")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    transformers.logging.disable_progress_bar()
    if arguments.child:
        _child(Bench(arguments, arguments.folder), arguments.child)
        return
    with tempfile.TemporaryDirectory() as folder:
        report = _report(arguments, Bench(arguments, Path(folder)))
    if arguments.output is None:
        print(json.dumps(report, indent=1))
        return
    (arguments.output / "engine.json").write_text(json.dumps(report, indent=1) + "\n")
    (arguments.output / "engine.md").write_text(_markdown(report))


if __name__ == "__main__":
    main()
