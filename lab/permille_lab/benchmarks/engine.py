"""All figures of the engines: steps, prefix reuse, memory, decoding; one page. `make bench-engine`.

    python -m permille_lab.benchmarks.engine --output docs/results
    sudo -E python -m permille_lab.benchmarks.engine --full --output docs/results

Without `--full`, steps have the widths of a 1.1B model and 4 of its layers, and nothing of 7B is made: some
20 minutes on two cores. With it, all layers, and the 7B shape under a memory limit, which needs root: hours.
Finished cells are kept in `--cells` and not measured again; delete the file to begin anew.
"""

import json
import os
from pathlib import Path

from permille_lab.benchmarks import decode, limits, memory, memory_limit, step_time
from permille_lab.benchmarks.cells import Cells
from permille_lab.benchmarks.engine_page import page
from permille_lab.benchmarks.settings import settings_parser

QUICK_LAYERS = 4


def quick(cells: Cells, folder: Path, threads: int) -> None:
    """What fits into 20 minutes on two cores."""
    _steps(cells, folder, threads, layers=QUICK_LAYERS, rounds=3)
    _whole_memory(cells, folder, threads)


def full(cells: Cells, folder: Path, threads: int, *, bf16: bool) -> None:
    """Everything at full depth."""
    _steps(cells, folder, threads, layers=None, rounds=3, bf16=bf16)
    _whole_memory(cells, folder, threads)
    for contender in ("permille torch float32", "permille light float32"):
        memory_limit.run(
            cells,
            folder,
            shape="7B",
            layers=None,
            contender=contender,
            sequences=4,
            tokens=128,
            threads=threads,
            steps=2,
            limits=list(memory_limit.LIMITS_GIB),
        )


def _steps(
    cells: Cells, folder: Path, threads: int, *, layers: int | None, rounds: int, bf16: bool = False
) -> None:
    for shape, depth, tokens, query_rounds in (("30M", None, [64], 0), ("1.1B", layers, [64, 128], 1)):
        step_time.run(
            cells,
            folder,
            shape=shape,
            layers=depth,
            sequences=16,
            tokens=tokens,
            threads=threads,
            rounds=rounds,
            bf16=bf16,
            query_rounds=query_rounds,
        )
    limits.run(cells, shape="1.1B", layers=layers, sequences=16, tokens=64, rounds=3)
    decode.run(
        cells, folder, shape="1.1B", layers=layers, prompt=16, tokens=16, threads=threads, rounds=rounds
    )


def _whole_memory(cells: Cells, folder: Path, threads: int) -> None:
    memory.run(
        cells,
        folder,
        shape="1.1B",
        layers=None,
        sequences=16,
        tokens=64,
        threads=threads,
        contenders=memory.usual_contenders(),
    )


def main() -> None:
    """Measure what is missing and write the page."""
    parser = settings_parser(__doc__)
    parser.add_argument("--full", action="store_true", help="all layers, and 7B under a memory limit")
    parser.add_argument("--bf16", action="store_true", help="bf16 rows without bf16 instructions too")
    parser.add_argument("--output", type=Path, help="folder for engine.json and engine.md")
    parser.add_argument("--page-only", action="store_true", help="measure nothing")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    cells = Cells(arguments.cells)
    if not arguments.page_only:
        if arguments.full:
            full(cells, arguments.folder, arguments.threads, bf16=arguments.bf16)
        else:
            quick(cells, arguments.folder, arguments.threads)
    if arguments.output is None:
        print(page(cells))
        return
    document = [
        {"figure": figure, "settings": settings, "result": result} for figure, settings, result in cells
    ]
    (arguments.output / "engine.json").write_text(json.dumps(document, indent=1) + "\n")
    (arguments.output / "engine.md").write_text(page(cells))


if __name__ == "__main__":
    main()
