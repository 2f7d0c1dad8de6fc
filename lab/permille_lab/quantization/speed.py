"""Compare packages of a model in every scheme: bytes, and the times of a gradient and of a token.

All contenders run in interleaved rounds of one process with one thread. Times are processor seconds.
`float32` is the reference engine with the decoded weights of the NF4 package. Its bytes are computed as if
the linears were stored in float32. For int4 by auto-round, int4 in groups of 128 is measured, since the
values of codes do not change bytes and time.
"""

import statistics
import time
from functools import partial
from math import prod
from pathlib import Path

import torch

from permille.engines.interface import GradientEngine
from permille.engines.light.engine import LightEngine
from permille.package.limits import Role
from permille.package.reader import Package
from permille.quantization.types import Scheme
from permille_lab.engine.decode import token_seconds
from permille_lab.engine.sizes import Sizes
from permille_lab.evaluate.specification import Base
from permille_lab.measuring.cells import Result
from permille_lab.measuring.machine import Step, interleaved, machine
from permille_lab.measuring.model_packages import Sources, model_package
from permille_lab.measuring.reference_engine import ReferenceEngine

FIGURE = "speed"
SEQUENCES, TOKENS = 8, 64
"""Sequences of a batch, and tokens of a sequence."""
ROUNDS = 7
_PACKAGES = {
    Base.INT8: (Scheme.INT8, None),
    Base.INT4_G32: (Scheme.INT4, 32),
    Base.AUTO_ROUND_INT4: (Scheme.INT4, 128),
    Base.NF4: (Scheme.NF4, None),
}


def measure(sources: Sources, model: str, folder: Path) -> Result:
    """Measure all schemes of one model."""
    before = machine()
    torch.set_num_threads(1)
    packages = {
        base: model_package(sources, model, folder, scheme=scheme, group_size=group_size)
        for base, (scheme, group_size) in _PACKAGES.items()
    }
    engines: dict[str, tuple[GradientEngine, Package]] = {
        base: (LightEngine(found, threads=1), found) for base, found in packages.items()
    }
    engines[Base.FLOAT32] = (ReferenceEngine(packages[Base.NF4]), packages[Base.NF4])
    steps = {base: _step(engine, found) for base, (engine, found) in engines.items()}
    seconds: dict[str, list[float]] = {base: [] for base in engines}
    for _ in range(ROUNDS):
        for base, (engine, found) in engines.items():
            seconds[base] += token_seconds(engine, found, time.process_time)
    sizes = {base: found.size_bytes for base, found in packages.items()}
    return {
        "package_bytes": sizes | {Base.FLOAT32: _float32_bytes(packages[Base.NF4])},
        "gradient_s": {name: found["cpu_s"] for name, found in interleaved(steps, rounds=ROUNDS).items()},
        "tokens_per_s": {base: round(1 / statistics.median(found), 1) for base, found in seconds.items()},
        "machine": {"before": before, "after": machine()},
    }


def _step(engine: GradientEngine, package: Package) -> Step:
    batch = Sizes(shape="", layers=None, sequences=SEQUENCES, tokens=TOKENS).batch(package)
    return partial(engine.gradient, package.values(), batch)


def _float32_bytes(package: Package) -> int:
    weights = sum(prod(tensor.shape) for tensor in package.manifest.tensors)
    return package.size_bytes - package.manifest.layer(Role.DENSE).size_bytes + 4 * weights
