"""Steps of a package whose upper half of the layers is masked, hidden states below kept from step to step.

    python -m permille_lab.benchmarks.prefix_time --shape 1.1B --layers 4

Beside two dense forward passes and the same engine on the same package without a cache. A warm cache holds
the rows of the batch, as from the second epoch on; what the first step of an epoch costs is the fill.
"""

import json
from pathlib import Path

import torch

from permille.engines.prefix_cache import PrefixCache
from permille_lab.benchmarks.cells import Cells, Result, Settings
from permille_lab.benchmarks.engine_steps import EngineStep, opened, random_batch
from permille_lab.benchmarks.machine import Step, has_bf16, interleaved, machine, timed
from permille_lab.benchmarks.random_packages import SHAPES, random_package
from permille_lab.benchmarks.settings import settings_parser
from permille_lab.benchmarks.step_time import StepBench

FIGURE = "prefix"
CACHE_BYTES = 1 << 30
ENGINES = ("torch", "light")


def measure(
    folder: Path, *, shape: str, layers: int | None, sequences: int, tokens: int, threads: int, rounds: int
) -> Result:
    """All contenders in interleaved rounds."""
    before = machine()
    sizes = SHAPES[shape].with_layers(layers)
    package = random_package(folder, sizes, first_layer=sizes.layers // 2)
    batch = random_batch(package, sequences, tokens)
    dtype = torch.bfloat16 if has_bf16() else torch.float32
    steps: dict[str, Step] = {"dense": StepBench(package, batch, folder, threads).dense_pair(dtype)}
    caches, fill_s = {}, {}
    for name in ENGINES:
        bare = opened(package, name, threads=threads)
        if bare is not None:
            steps[f"permille {name}, no cache"] = EngineStep(package, bare, batch)
        cache = PrefixCache(CACHE_BYTES)
        warm = opened(package, name, threads=threads, prefix_cache=cache)
        if warm is not None:
            step = EngineStep(package, warm, batch)
            fill_s[name] = round(timed(step).wall_s, 4)
            steps[f"permille {name}, warm"] = step
            caches[name] = cache
    found = interleaved(steps, rounds=rounds)
    return {
        "masked_from": sizes.layers // 2,
        "steps": found,
        "first_step_s": fill_s,
        "caches": {name: _counters(cache) for name, cache in caches.items()},
        "machine": {"before": before, "after": machine()},
    }


def _counters(cache: PrefixCache) -> Result:
    counters = cache.counters()
    return {
        name: getattr(counters, name) for name in ("hits", "misses", "memory_bytes", "disk_bytes", "fill_s")
    }


def run(
    cells: Cells,
    folder: Path,
    *,
    shape: str,
    layers: int | None,
    sequences: int,
    tokens: list[int],
    threads: int,
    rounds: int,
) -> None:
    """The cells that are missing."""
    for length in tokens:
        settings: Settings = {
            "shape": shape,
            "layers": layers,
            "sequences": sequences,
            "tokens": length,
            "threads": threads,
            "rounds": rounds,
        }

        def cell(length: int = length) -> Result:
            return measure(
                folder,
                shape=shape,
                layers=layers,
                sequences=sequences,
                tokens=length,
                threads=threads,
                rounds=rounds,
            )

        cells.once(FIGURE, settings, cell)


def main() -> None:
    """Measure what is missing; print the figure's cells."""
    parser = settings_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="1.1B")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    cells = Cells(arguments.cells)
    run(
        cells,
        arguments.folder,
        shape=arguments.shape,
        layers=arguments.layers,
        sequences=arguments.sequences,
        tokens=arguments.tokens,
        threads=arguments.threads,
        rounds=arguments.rounds,
    )
    for settings, result in cells.of(FIGURE):
        print(json.dumps({"settings": settings, **result}, indent=1))


if __name__ == "__main__":
    main()
