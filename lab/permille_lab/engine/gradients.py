"""Compare a training step along the gradient with a forward pass of the same tokens, in a fresh process.

Times are processor seconds. The rest of a step (Adam and the state) is timed separately. It is too short to
show in the time of whole steps. If `rounds` is 0, one step runs and only its memory is measured.
"""

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np

from permille.engines.factory import LIGHT, open_engine
from permille.engines.light.engine import LightEngine
from permille.errors import InputError
from permille.package.blobs import BlobFolder
from permille.package.reader import Package
from permille.training.adam import Moments, adam_step, learning_rate, unit_exponent
from permille.zo.estimators import Batch
from permille.zo.lattice import values
from permille_lab.engine.sizes import Sizes
from permille_lab.measuring.cells import Result
from permille_lab.measuring.machine import AnonymousPeak, machine, resident, timed


def measure(folder: Path, sizes: Sizes) -> Result:
    """Measure in a child process.

    Raises:
        InputError: the child process failed.
    """
    package = sizes.package(folder)
    options = {"folder": folder, "digest": package.digest, "sizes": json.dumps(asdict(sizes))}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "permille_lab.engine.gradients", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(f"The gradient step failed: {done.stderr[-500:]}")
    found: Result = json.loads(done.stdout.splitlines()[-1])
    return found


class GradientStep:
    """The part of a gradient step that is not the engine's, in a run from the package's values."""

    def __init__(self, package: Package) -> None:
        self._w_base_K, self._rate = package.values(), learning_rate(package)
        self._exponent = unit_exponent(self._rate)
        self._moments = Moments.first(package.k, np.zeros(package.k, np.int64))

    def values(self) -> np.ndarray:
        """Return the values for the next gradient, float32 [k]."""
        return values(self._w_base_K, self._moments.s_K, self._exponent)

    def move(self, loss: float, gradient_K: np.ndarray) -> None:
        """Move the state along the gradient.

        Raises:
            InputError: the step was rejected.
        """
        self._moments = adam_step(
            self._moments, loss, gradient_K, rate=self._rate, step_unit_exponent=self._exponent
        )
        if self._moments.flags:
            raise InputError("The gradient step was rejected.")


def _child() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--digest", required=True)
    parser.add_argument("--sizes", type=json.loads, required=True)
    options = parser.parse_args()
    sizes = Sizes(**options.sizes)
    with AnonymousPeak() as anonymous:
        package = Package.open(BlobFolder(options.folder / "blobs"), options.digest)
        engine = open_engine(package, LIGHT, threads=sizes.threads)
        if not isinstance(engine, LightEngine):
            raise InputError(f"expected the light engine, got {engine.info()}")
        batch = sizes.batch(package)
        step = GradientStep(package)
        loss, gradient_K = engine.gradient(step.values(), batch)
        step.move(loss, gradient_K)
    peak = resident()["VmHWM"]
    found: Result = {
        "k": package.k,
        "package_bytes": package.size_bytes,
        "peak_bytes": peak,
        "above_package_bytes": peak - package.size_bytes,
        "anonymous_peak_bytes": anonymous.bytes,
    }
    if sizes.rounds:
        found |= _times(package, engine, batch, gradient_K, sizes.rounds)
    print(json.dumps(found | {"machine": machine()}))


def _times(
    package: Package, engine: LightEngine, batch: Batch, gradient_K: np.ndarray, rounds: int
) -> Result:
    """Return medians of processor seconds. Both passes ran once before, so that they are warm."""
    one_1K = package.values()[None]
    engine.losses(one_1K, batch)
    forward, reverse = [], []
    for _ in range(rounds):
        forward.append(timed(lambda: engine.losses(one_1K, batch)).cpu_s)
        reverse.append(timed(lambda: engine.gradient(one_1K[0], batch)).cpu_s)
    step = GradientStep(package)
    spent = [timed(lambda: step.move(1.0, gradient_K)).cpu_s for _ in range(5)]
    return {
        "forward_s": round(statistics.median(forward), 3),
        "gradient_s": round(statistics.median(reverse), 3),
        "rest_s": {"0": round(statistics.median(spent), 4)},
    }


if __name__ == "__main__":
    _child()
