"""Training a large package under a memory limit: the step against that without, and the smallest that holds.

    sudo python -m permille_lab.benchmarks.memory_limit --shape 7B --sequences 4 --tokens 128
    python -m permille_lab.benchmarks.memory_limit --shape 7B --layers 2 --limits 0.6 0.5

The limit counts page cache, so mapped weights count: below what a step touches, every step reads weights from
the disk again. Each child first makes one step that is not measured, then the measured ones; the package
is dropped from the page cache before each child, so that it is charged for all that it reads (libraries
that other processes run at the same time are charged to them). The limits are tried from the largest down
until one is too slow or too small.
"""

import json
import statistics
from functools import partial
from pathlib import Path

from permille_lab.benchmarks.cells import Cells, Result, Settings
from permille_lab.benchmarks.machine import machine
from permille_lab.benchmarks.memory_groups import drop_from_page_cache, limited
from permille_lab.benchmarks.one_step import CONTENDERS, child_command, run_child
from permille_lab.benchmarks.random_packages import SHAPES, random_package
from permille_lab.benchmarks.settings import settings_parser

FIGURE = "memory limit"
GIB = 1 << 30
LIMITS_GIB = (4.6, 4.4, 4.2, 4.0, 3.8, 3.6)
SLOWEST_RATIO = 1.1


def measure(
    folder: Path,
    *,
    shape: str,
    layers: int | None,
    contender: str,
    sequences: int,
    tokens: int,
    threads: int,
    steps: int,
    limit_gib: float | None,
) -> Result:
    """One child under one limit."""
    package = random_package(folder, SHAPES[shape].with_layers(layers))
    for layer in package.manifest.layers:
        drop_from_page_cache(package.blobs.path(layer.digest))
    before = machine()
    command = child_command(
        folder,
        package.digest,
        contender,
        sequences=sequences,
        tokens=tokens,
        threads=threads,
        steps=steps + 1,
    )
    with limited(None if limit_gib is None else int(limit_gib * GIB)) as group:
        child = run_child(command, before=group.before, prefix=group.prefix)
        how = group.how
    return child | {"how": how, "machine": {"before": before, "after": machine()}}


def run(
    cells: Cells,
    folder: Path,
    *,
    shape: str,
    layers: int | None,
    contender: str,
    sequences: int,
    tokens: int,
    threads: int,
    steps: int,
    limits: list[float],
) -> None:
    """Without a limit, then with smaller and smaller ones while they hold."""
    free: Result | None = None
    for limit in (None, *sorted(limits, reverse=True)):
        settings: Settings = {
            "shape": shape,
            "layers": layers,
            "contender": contender,
            "sequences": sequences,
            "tokens": tokens,
            "threads": threads,
            "steps": steps,
            "limit_gib": limit,
        }
        cell = partial(
            measure,
            folder,
            shape=shape,
            layers=layers,
            contender=contender,
            sequences=sequences,
            tokens=tokens,
            threads=threads,
            steps=steps,
            limit_gib=limit,
        )
        result = cells.once(FIGURE, settings, cell)
        free = free or result
        if not free.get("there") or ratio(result, free) is None:
            return
        if limit is not None and (ratio(result, free) or 0) > 2 * SLOWEST_RATIO:
            return


def ratio(result: Result, free: Result) -> float | None:
    """Median measured step against the run without a limit; None where the child did not live."""
    if "failed" in result or not result["there"]:
        return None
    slow, fast = (float(statistics.median(found["step_s"][1:])) for found in (result, free))
    return slow / fast


def main() -> None:
    """Measure what is missing; print a line a limit."""
    parser = settings_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="7B")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--contender", choices=CONTENDERS, default="permille torch float32")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=2, help="measured steps, after one that is not")
    parser.add_argument("--limits", type=float, nargs="+", default=list(LIMITS_GIB), help="GiB")
    arguments = parser.parse_args()
    cells = Cells(arguments.cells)
    run(
        cells,
        arguments.folder,
        shape=arguments.shape,
        layers=arguments.layers,
        contender=arguments.contender,
        sequences=arguments.sequences,
        tokens=arguments.tokens,
        threads=arguments.threads,
        steps=arguments.steps,
        limits=arguments.limits,
    )
    for settings, result in cells.of(FIGURE):
        told = {name: result.get(name) for name in ("step_s", "peak_bytes", "failed", "how")}
        print(json.dumps({"limit_gib": settings["limit_gib"], "layers": settings["layers"]} | told))


if __name__ == "__main__":
    main()
