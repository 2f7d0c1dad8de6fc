"""Tokens a second with the overlay and without it, one after the other on the same engine.

    python -m permille_lab.benchmarks.decode --shape 1.1B --layers 4

Without: a package of the same shape in which each matrix has a single masked weight, since none at all is no
package. Greedy, with a key-value cache, after a prompt that is not timed.
"""

import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from permille.engines.interface import Engine
from permille.package.reader import Package
from permille_lab.benchmarks.cells import Cells, Result, Settings
from permille_lab.benchmarks.engine_steps import describe, opened
from permille_lab.benchmarks.machine import machine
from permille_lab.benchmarks.random_packages import SHAPES, random_package
from permille_lab.benchmarks.settings import settings_parser

FIGURE = "decode"
ENGINES = ("torch", "light")
BARE_DENSITY = 1e-9


def measure(
    folder: Path, *, shape: str, layers: int | None, prompt: int, tokens: int, threads: int, rounds: int
) -> Result:
    """All engines, with and without, in interleaved rounds of `tokens` tokens."""
    before = machine()
    sizes = SHAPES[shape].with_layers(layers)
    packages = {
        "overlay": random_package(folder, sizes),
        "bare": random_package(folder, sizes, density=BARE_DENSITY),
    }
    found = {}
    for name in ENGINES:
        engines = {which: opened(package, name, threads=threads) for which, package in packages.items()}
        if None not in engines.values():
            there = {which: engine for which, engine in engines.items() if engine is not None}
            found[name] = _rates(there, packages, prompt=prompt, tokens=tokens, rounds=rounds)
    return {"engines": found, "machine": {"before": before, "after": machine()}}


def _rates(
    engines: dict[str, Engine], packages: dict[str, Package], *, prompt: int, tokens: int, rounds: int
) -> Result:
    seconds: dict[str, list[float]] = {which: [] for which in engines}
    for _ in range(rounds):
        for which, engine in engines.items():
            seconds[which] += _token_seconds(engine, packages[which], prompt, tokens)
    rates = {which: round(1 / statistics.median(found), 3) for which, found in seconds.items()}
    return {
        "tokens_per_s": rates,
        "ratio": round(rates["overlay"] / rates["bare"], 4),
        "engine": describe(engines["overlay"]),
    }


def _token_seconds(engine: Engine, package: Package, prompt: int, tokens: int) -> Iterator[float]:
    ids = np.random.default_rng(0).integers(0, package.config["vocab_size"], prompt)
    stream = engine.generate(package.values(), ids, max_new_tokens=tokens + 1)
    next(stream)
    begin = time.perf_counter()
    for _ in stream:
        now = time.perf_counter()
        yield now - begin
        begin = now


def run(
    cells: Cells,
    folder: Path,
    *,
    shape: str,
    layers: int | None,
    prompt: int,
    tokens: int,
    threads: int,
    rounds: int,
) -> None:
    """The cell, if it is missing."""
    settings: Settings = {
        "shape": shape,
        "layers": layers,
        "prompt": prompt,
        "tokens": tokens,
        "threads": threads,
        "rounds": rounds,
    }
    cells.once(
        FIGURE,
        settings,
        lambda: measure(
            folder, shape=shape, layers=layers, prompt=prompt, tokens=tokens, threads=threads, rounds=rounds
        ),
    )


def main() -> None:
    """Measure what is missing; print the figure's cells."""
    parser = settings_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="1.1B")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    cells = Cells(arguments.cells)
    run(
        cells,
        arguments.folder,
        shape=arguments.shape,
        layers=arguments.layers,
        prompt=arguments.prompt,
        tokens=arguments.tokens,
        threads=arguments.threads,
        rounds=arguments.rounds,
    )
    for settings, result in cells.of(FIGURE):
        print(json.dumps({"settings": settings, "engines": result["engines"]}, indent=1))


if __name__ == "__main__":
    main()
