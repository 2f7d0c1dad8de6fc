"""Peak resident memory of a training step, each contender in a fresh process.

Above the package: the peak less the bytes of the package, whose pages are mapped and resident once touched,
though a machine short of memory may drop them and read them again. bitsandbytes loads a copy, not a map: for
it the package is part of the anonymous peak.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from permille.engines.factory import LIGHT, LIGHT_INT8
from permille.errors import InputError
from permille.package.blobs import BlobFolder
from permille.package.reader import Package
from permille.quantization.types import Scheme
from permille_lab.engine.sizes import Sizes
from permille_lab.measuring.cells import Result
from permille_lab.measuring.machine import AnonymousPeak, machine, resident, timed

_BITSANDBYTES = "bitsandbytes NF4 float32"
_ENGINES = {"permille light float32": LIGHT, "permille light-int8 on int4": LIGHT_INT8}


def measure(folder: Path, sizes: Sizes) -> Result:
    """One child process after the other.

    Raises:
        InputError: one failed.
    """
    before = machine()
    found = {}
    for contender in (*_ENGINES, _BITSANDBYTES):
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
            raise InputError(f"expected a step of {contender}, got {done.stderr[-500:]}")
        found[contender] = json.loads(done.stdout.splitlines()[-1])
    return {"contenders": found, "machine": {"before": before, "after": machine()}}


def _child() -> None:
    """A step of a contender; prints bytes and seconds. What it does not need is not imported."""
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

        from permille_lab.measuring.dense import batch_loss, bitsandbytes_model
    else:
        from permille.engines.factory import open_engine
        from permille_lab.engine.own_steps import EngineStep
    imported = resident()
    sizes = Sizes(shape="", layers=None, sequences=options.sequences, tokens=options.tokens)
    with AnonymousPeak() as anonymous:
        package = Package.open(BlobFolder(options.folder / "blobs"), options.digest)
        batch = sizes.batch(package)
        if engine_name is None:
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


if __name__ == "__main__":
    _child()
