"""Tokens a second with the overlay and without it, one after the other.

Without: a package of the same shape in which each matrix has a single masked weight, since none at all is no
package. Greedy, with a key-value cache, after a prompt that is not timed.
"""

import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from permille.engines.factory import LIGHT, open_engine
from permille.engines.interface import Engine
from permille.engines.sampling import TokenSampling
from permille.package.reader import Package
from permille_lab.engine.sizes import Sizes
from permille_lab.measuring.cells import Result
from permille_lab.measuring.machine import machine

_BARE_DENSITY = 1e-9
_PROMPT, _TOKENS = 16, 16


def measure(folder: Path, sizes: Sizes) -> Result:
    """Both packages in interleaved rounds."""
    before = machine()
    packages = {
        "overlay": sizes.package(folder),
        "bare": sizes.package(folder, density=_BARE_DENSITY),
    }
    engines = {
        which: open_engine(package, LIGHT, threads=sizes.threads) for which, package in packages.items()
    }
    seconds: dict[str, list[float]] = {which: [] for which in engines}
    for _ in range(sizes.rounds):
        for which, engine in engines.items():
            seconds[which] += _token_seconds(engine, packages[which])
    rates = {which: round(1 / statistics.median(found), 3) for which, found in seconds.items()}
    return {
        "tokens_per_s": rates,
        "ratio": round(rates["overlay"] / rates["bare"], 4),
        "machine": {"before": before, "after": machine()},
    }


def _token_seconds(engine: Engine, package: Package) -> Iterator[float]:
    ids = np.random.default_rng(0).integers(0, package.config["vocab_size"], _PROMPT)
    stream = engine.generate(package.values(), ids, TokenSampling(max_new_tokens=_TOKENS + 1))
    next(stream)
    begin = time.perf_counter()
    for _ in stream:
        now = time.perf_counter()
        yield now - begin
        begin = now
