"""The hardware's limit of a step: its matrix products at the best rate of each engine's library, one thread.

    python -m permille_lab.benchmarks.limits --cells FILE --threads 1

A step of two variants cannot take fewer processor seconds than the products of two forward passes do. Their
rate is measured on the shapes of the step, in float32, with random numbers: for the torch engine and dense
passes `torch.mm`, for the light engine numpy's OpenBLAS as it calls it; the fastest of several rounds. A
thread's rate is compared with processor seconds, so there is one thread.
"""

import json
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from permille.engines.light.blas import Blas
from permille_lab.benchmarks.cells import Cells, Result, Settings
from permille_lab.benchmarks.machine import machine
from permille_lab.benchmarks.random_packages import SHAPES, Shape
from permille_lab.benchmarks.settings import settings_parser

FIGURE = "limits"
PASSES = 2
# Columns of the head that are multiplied at a time: engines never have all logits.
_HEAD_BLOCK = 1024

Product = Callable[[], object]


def products(shape: Shape) -> dict[str, tuple[int, int, int]]:
    """The products of one forward pass: name to (out features, in features, how many of them)."""
    kv = shape.hidden // shape.heads * shape.kv_heads
    return {
        "query, output": (shape.hidden, shape.hidden, 2 * shape.layers),
        "key, value": (kv, shape.hidden, 2 * shape.layers),
        "gate, up": (shape.inner, shape.hidden, 2 * shape.layers),
        "down": (shape.hidden, shape.inner, shape.layers),
        "head": (_HEAD_BLOCK, shape.hidden, -(-shape.vocabulary // _HEAD_BLOCK)),
    }


def measure(shape: Shape, *, sequences: int, tokens: int, rounds: int) -> Result:
    """Rates of both libraries, interleaved, and the seconds of a step at them."""
    before = machine()
    rows = sequences * (tokens - 1)  # the last token of a sequence predicts nothing
    torch.set_num_threads(1)
    gflops: dict[str, dict[str, float]] = {"torch": {}, "light": {}}
    seconds = dict.fromkeys(gflops, 0.0)
    for name, (out, inside, count) in products(shape).items():
        flops = 2 * rows * out * inside
        for library, fastest_s in _fastest(rows, out, inside, rounds).items():
            gflops[library][name] = round(flops / fastest_s / 1e9, 1)
            seconds[library] += PASSES * count * fastest_s
    return {
        "gflops": gflops,
        "products_s": {library: round(value, 3) for library, value in seconds.items()},
        "machine": {"before": before, "after": machine()},
    }


def _fastest(rows: int, out: int, inside: int, rounds: int) -> dict[str, float]:
    """Processor seconds of one product in each library."""
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal((size, inside), np.float32) for size in (rows, out))
    y = np.empty((rows, out), np.float32)
    x_t, w_t, y_t = (torch.from_numpy(array) for array in (x, w, y))
    calls: dict[str, Product] = {
        "torch": partial(torch.mm, x_t, w_t.T, out=y_t),
        "light": partial(Blas().product, x, w, y),
    }
    found = dict.fromkeys(calls, float("inf"))
    for number in range(rounds + 1):
        for library, call in calls.items():
            begin = time.process_time()
            call()
            if number:
                found[library] = min(found[library], time.process_time() - begin)
    return found


def run(cells: Cells, *, shape: str, layers: int | None, sequences: int, tokens: int, rounds: int) -> Result:
    """The cell, if it is missing."""
    settings: Settings = {
        "shape": shape,
        "layers": layers,
        "sequences": sequences,
        "tokens": tokens,
        "threads": 1,
        "rounds": rounds,
    }
    chosen = SHAPES[shape].with_layers(layers)
    return cells.once(
        FIGURE, settings, partial(measure, chosen, sequences=sequences, tokens=tokens, rounds=rounds)
    )


def main() -> None:
    """Measure what is missing; print the figure's cells."""
    parser = settings_parser(__doc__)
    parser.set_defaults(threads=1)
    parser.add_argument("--shape", choices=SHAPES, default="1.1B")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.threads != 1:
        parser.error(f"expected --threads 1, got {arguments.threads}: the rate is that of one thread")
    cells = Cells(arguments.cells)
    run(
        cells,
        shape=arguments.shape,
        layers=arguments.layers,
        sequences=arguments.sequences,
        tokens=arguments.tokens,
        rounds=arguments.rounds,
    )
    for settings, result in cells.of(FIGURE):
        print(json.dumps({"settings": settings, **result}, indent=1))


if __name__ == "__main__":
    main()
