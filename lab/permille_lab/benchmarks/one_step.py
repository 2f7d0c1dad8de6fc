"""Training steps in a fresh process, and what they kept in memory: the child of `memory` and `memory_limit`.

    python -m permille_lab.benchmarks.one_step --folder DIR --digest sha256:... --contender "permille torch float32"

Prints one JSON line: bytes after the imports, the peak of the process, the peak of what no file backs, and
the seconds of each step.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from permille.package.blobs import BlobFolder
from permille.package.reader import Package
from permille.zo.estimators import Batch
from permille_lab.benchmarks.machine import AnonymousPeak, Step, resident, timed

CONTENDERS = (
    "permille torch float32",
    "permille torch bfloat16",
    "permille light float32",
    "permille light-int8 float32",
    "permille light bfloat16",
    "bitsandbytes NF4 float32",
    "bitsandbytes NF4 bfloat16",
    "LoRA on the package float32",
)


def child_command(
    folder: Path, digest: str, contender: str, *, sequences: int, tokens: int, threads: int, steps: int
) -> list[str]:
    """The command line of a measurement."""
    options = {
        "folder": folder,
        "digest": digest,
        "contender": contender,
        "sequences": sequences,
        "tokens": tokens,
        "threads": threads,
        "steps": steps,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "permille_lab.benchmarks.one_step", *words]


def run_child(
    command: list[str], *, before: Callable[[], None] | None = None, prefix: list[str] | None = None
) -> dict[str, Any]:
    """What the child measured, or {"failed": exit status, "said": its last words}.

    Args:
        before: called in the child before it becomes Python.
        prefix: a command that the child's is given to.
    """
    done = subprocess.run(
        [*(prefix or []), *command], capture_output=True, text=True, check=False, preexec_fn=before
    )
    if done.returncode:
        return {"failed": done.returncode, "said": done.stderr[-500:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _ours(package: Package, contender: str, batch: Batch, threads: int) -> Step | None:
    from permille_lab.benchmarks.engine_steps import EngineStep, opened

    _, name, dtype = contender.split()
    engine = opened(package, name, compute_dtype=dtype, threads=threads)
    return None if engine is None else EngineStep(package, engine, batch)


def _imports(contender: str) -> None:
    """Load the libraries that the contender needs, so that their bytes can be told from the rest."""
    if "light" in contender:
        import permille_lab.benchmarks.engine_steps  # noqa: F401
    else:
        import transformers.models.llama.modeling_llama  # noqa: F401

        import permille.engines.torch_engine  # noqa: F401
    if "bitsandbytes" in contender:
        import bitsandbytes  # noqa: F401
    if "LoRA" in contender:
        import peft  # noqa: F401


def _theirs(package: Package, contender: str, batch: Batch, threads: int, linked: Path) -> Step:
    import torch

    from permille_lab.benchmarks.dense import batch_loss, bitsandbytes_model

    torch.set_num_threads(threads)
    dtype = torch.bfloat16 if "bfloat16" in contender else torch.float32
    if "LoRA" in contender:
        from permille_lab.benchmarks.lora import LoraStep
        from permille_lab.benchmarks.packed_training import packed_model

        model, _ = packed_model(package)
        return LoraStep(model, batch, micro_rows=1, learning_rate=1e-4)
    model = bitsandbytes_model(package, linked, dtype)

    def pair() -> None:
        batch_loss(model, batch)
        batch_loss(model, batch)

    return pair


def main() -> None:
    """Measure in this process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--digest", required=True)
    parser.add_argument("--contender", choices=CONTENDERS, required=True)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--steps", type=int, default=1)
    arguments = parser.parse_args()
    contender: str = arguments.contender
    _imports(contender)
    from permille_lab.benchmarks.engine_steps import random_batch

    imported = resident()
    with AnonymousPeak() as anonymous:
        package = Package.open(BlobFolder(arguments.folder / "blobs"), arguments.digest)
        batch = random_batch(package, arguments.sequences, arguments.tokens)
        if contender.startswith("permille"):
            step = _ours(package, contender, batch, arguments.threads)
        else:
            linked = arguments.folder / "linked" / package.digest[7:23]
            step = _theirs(package, contender, batch, arguments.threads, linked)
        opened_bytes = resident()
        timings = [timed(step) for _ in range(arguments.steps)] if step is not None else []
    found = {
        "there": step is not None,
        "imports_bytes": imported["VmRSS"],
        "imports_anonymous_bytes": imported["RssAnon"],
        "opened_bytes": opened_bytes["VmRSS"],
        "peak_bytes": resident()["VmHWM"],
        "anonymous_peak_bytes": anonymous.bytes,
        "step_s": [round(timing.wall_s, 3) for timing in timings],
        "step_cpu_s": [round(timing.cpu_s, 3) for timing in timings],
        "package_bytes": package.size_bytes,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
