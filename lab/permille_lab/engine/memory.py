"""Peak resident memory of a training step. Each contender runs in a fresh process.

`above_package_bytes` is the peak minus the bytes of the package. The package is mapped: a page is resident
after its first use, and a machine that is short of memory can drop it and read it again. bitsandbytes does
not map the package but loads a copy, so its anonymous peak contains the package.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from permille.engines.factory import LIGHT, LIGHT_INT8
from permille.errors import InputError
from permille.package.blobs import BlobFolder
from permille.package.reader import Package
from permille.quantization.types import Scheme
from permille.zo.estimators import Batch
from permille_lab.engine.sizes import Sizes
from permille_lab.measuring.cells import Result
from permille_lab.measuring.machine import AnonymousPeak, Step, machine, resident, timed

_BITSANDBYTES = "bitsandbytes NF4 float32"
_FIRST_ORDER = {
    "first order, all weights": None,
    "first order, LoRA of rank 16": False,
    "first order, LoRA-FA of rank 16": True,
}
"""First-order contenders. The value says whether LoRA's A is frozen; None means no adapter."""
_ENGINES = {"permille light float32": LIGHT, "permille light-int8 on int4": LIGHT_INT8}


def measure(folder: Path, sizes: Sizes) -> Result:
    """Measure steps by losses, of our engines and of bitsandbytes."""
    return _measured(folder, sizes, (*_ENGINES, _BITSANDBYTES))


def measure_first_order(folder: Path, sizes: Sizes) -> Result:
    """Measure our step, and steps of gradient descent in float32 by backpropagation, without moments."""
    return _measured(folder, sizes, ("permille light float32", *_FIRST_ORDER))


def _measured(folder: Path, sizes: Sizes, contenders: Sequence[str]) -> Result:
    """Measure each contender in a child process.

    Raises:
        InputError: a child process failed.
    """
    before = machine()
    found = {}
    for contender in contenders:
        scheme = Scheme.INT4 if "int4" in contender else Scheme.NF4
        options = {
            "folder": folder,
            "digest": sizes.package(folder, scheme).digest,
            "contender": contender,
            "sequences": sizes.sequences,
            "tokens": sizes.tokens,
            "threads": sizes.threads,
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "permille_lab.engine.memory", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise InputError(f"The step of {contender} failed: {done.stderr[-500:]}")
        found[contender] = json.loads(done.stdout.splitlines()[-1])
    return {"contenders": found, "machine": {"before": before, "after": machine()}}


def _child() -> None:
    """Run a step of a contender, and print bytes and seconds. Import only what the contender needs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--digest", required=True)
    parser.add_argument("--contender", required=True)
    for name in ("sequences", "tokens", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    engine_name = _ENGINES.get(options.contender)
    if engine_name is None:
        import bitsandbytes  # noqa: F401
        import torch
        import transformers.models.llama.modeling_llama  # noqa: F401

        from permille_lab.measuring.dense import batch_loss, bitsandbytes_model, dense_model
    else:
        from permille.engines.factory import open_engine
        from permille_lab.engine.own_steps import EngineStep
    imported = resident()
    sizes = Sizes(shape="", layers=None, sequences=options.sequences, tokens=options.tokens)
    with AnonymousPeak() as anonymous:
        package = Package.open(BlobFolder(options.folder / "blobs"), options.digest)
        batch = sizes.batch(package)
        if options.contender in _FIRST_ORDER:
            torch.set_num_threads(options.threads)
            model = dense_model(package, prepacked=False)
            timing = timed(_descent(model, batch, frozen_a=_FIRST_ORDER[options.contender]))
        elif engine_name is None:
            torch.set_num_threads(options.threads)
            model = bitsandbytes_model(package, options.folder / "linked" / package.digest[7:23])
            timing = timed(lambda: (batch_loss(model, batch), batch_loss(model, batch)))
        else:
            engine = open_engine(package, engine_name, threads=options.threads)
            timing = timed(EngineStep(package, engine, batch))
    peak = resident()["VmHWM"]
    found = {
        "package_bytes": package.size_bytes,
        "imports_bytes": imported["VmRSS"],
        "peak_bytes": peak,
        "above_package_bytes": peak - package.size_bytes,
        "anonymous_peak_bytes": anonymous.bytes,
        "step_s": [round(timing.wall_s, 3)],
    }
    print(json.dumps(found))


def _descent(model: Any, batch: Batch, *, frozen_a: bool | None) -> Step:
    """Return a step that trains all weights, or adapters on all linear layers."""
    import torch

    from permille_lab.measuring.dense import mean_loss

    if frozen_a is None:
        model.requires_grad_(True)
    else:
        from peft import LoraConfig, inject_adapter_in_model

        inject_adapter_in_model(LoraConfig(r=16, lora_alpha=16, target_modules="all-linear"), model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_B" in name or ("lora_A" in name and not frozen_a))

    def step() -> None:
        mean_loss(model, batch).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 1e-6 * parameter.grad
                    parameter.grad = None

    return step


if __name__ == "__main__":
    _child()
