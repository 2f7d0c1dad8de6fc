"""Peak resident memory of training steps, each contender in a fresh process.

    python -m permille_lab.benchmarks.memory --shape 1.1B --sequences 16 --tokens 64

Above the package: the peak less the bytes of the package, whose pages are mapped and resident once touched,
though a machine short of memory may drop them and read them again. Above imports: less what the
process held when its libraries were loaded as well. bitsandbytes loads a copy, not a map: for it the package
is part of the anonymous peak. LoRA is the thriftiest form that we know: packed weights mapped, activations
recomputed, one row at a time.
"""

import json
from pathlib import Path

from permille.engines.factory import LIGHT_INT8
from permille.quantization import Scheme
from permille_lab.benchmarks.cells import Cells, Result, Settings
from permille_lab.benchmarks.machine import has_bf16, machine
from permille_lab.benchmarks.one_step import CONTENDERS, child_command, run_child
from permille_lab.benchmarks.random_packages import SHAPES, random_package
from permille_lab.benchmarks.settings import settings_parser

FIGURE = "memory"


def measure(
    folder: Path,
    *,
    shape: str,
    layers: int | None,
    sequences: int,
    tokens: int,
    threads: int,
    contenders: tuple[str, ...],
) -> Result:
    """One child process after the other."""
    before = machine()
    found = {}
    package_bytes = 0
    for contender in contenders:
        # int8 activations want int4; measured alone, that is the package which the page names.
        scheme = Scheme.INT4 if LIGHT_INT8 in contender else Scheme.NF4
        package = random_package(folder, SHAPES[shape].with_layers(layers), scheme=scheme)
        if scheme is Scheme.NF4 or not package_bytes:
            package_bytes = package.size_bytes
        command = child_command(
            folder,
            package.digest,
            contender,
            sequences=sequences,
            tokens=tokens,
            threads=threads,
            steps=1,
        )
        child = run_child(command)
        if child.get("there", True):
            found[contender] = child | _above(child)
    return {
        "package_bytes": package_bytes,
        "contenders": found,
        "machine": {"before": before, "after": machine()},
    }


def usual_contenders() -> tuple[str, ...]:
    """All of them, in bf16 only where the processor has instructions for it."""
    return tuple(name for name in CONTENDERS if has_bf16() or "bfloat16" not in name)


def run(
    cells: Cells,
    folder: Path,
    *,
    shape: str,
    layers: int | None,
    sequences: int,
    tokens: int,
    threads: int,
    contenders: tuple[str, ...],
) -> None:
    """The cell, if it is missing."""
    settings: Settings = {
        "shape": shape,
        "layers": layers,
        "sequences": sequences,
        "tokens": tokens,
        "threads": threads,
        "contenders": list(contenders),
    }
    cells.once(
        FIGURE,
        settings,
        lambda: measure(
            folder,
            shape=shape,
            layers=layers,
            sequences=sequences,
            tokens=tokens,
            threads=threads,
            contenders=contenders,
        ),
    )


def _above(child: Result) -> Result:
    if "failed" in child:
        return {}
    above = child["peak_bytes"] - child["package_bytes"]
    return {"above_package_bytes": above, "above_imports_bytes": above - child["imports_bytes"]}


def main() -> None:
    """Measure what is missing; print the figure's cells."""
    parser = settings_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="1.1B")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--contender", choices=CONTENDERS, action="append", help="only these")
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
        contenders=tuple(arguments.contender or usual_contenders()),
    )
    for settings, result in cells.of(FIGURE):
        print(json.dumps({"settings": settings, **result}, indent=1))


if __name__ == "__main__":
    main()
