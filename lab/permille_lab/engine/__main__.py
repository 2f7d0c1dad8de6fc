"""Compare a training step with dense passes, bitsandbytes and MeZO in time and memory: `make bench-engine`.

    python -m permille_lab.engine                           all figures: 20 minutes on two cores
    python -m permille_lab.engine --layers 22 --figure step
    python -m permille_lab.engine --figure gradient --with-7B    needs 4 GB of disk

Packages have random codes and the shapes of real models. Without `--layers`, the 1.1B model has 4 of its 22
layers. Finished cells are not measured again. To repeat a cell, delete its line in the results file. On
another machine, delete all lines.
"""

import sys
from functools import partial

from permille_lab.engine import decode, gradients, memory, packages, steps
from permille_lab.engine.sizes import Sizes
from permille_lab.measuring.cells import Cells, settings_parser

_FIGURES = {
    "step": steps.measure_steps,
    "queries": steps.measure_queries,
    "loops": steps.measure_loops,
    "lower layers": steps.measure_lower_layers,
    "memory": memory.measure,
    "first order": memory.measure_first_order,
    "decode": decode.measure,
    "schemes": packages.measure_schemes,
}
_GRADIENT = "gradient"


def main() -> int:
    """Measure the missing cells."""
    parser = settings_parser(__doc__, "engine")
    parser.add_argument(
        "--figure", choices=[*_FIGURES, _GRADIENT], action="append", help="measure only these"
    )
    parser.add_argument("--layers", type=int, default=4, help="layers of the 1.1B shape, which has 22")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each of the 16 sequences")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of each measurement")
    parser.add_argument("--with-7B", action="store_true", help="also the memory of a gradient step at 7B")
    options = parser.parse_args()
    cells = Cells(options.cells)
    for shape, layers in (("30M", None), ("1.1B", options.layers)):
        sizes = Sizes(
            shape=shape,
            layers=layers,
            tokens=options.tokens,
            threads=options.threads,
            rounds=options.rounds,
        )
        for figure in options.figure or _FIGURES:
            if figure in _FIGURES and (shape == "1.1B" or figure in ("step", "loops", "schemes")):
                cells.once(figure, sizes.settings(), partial(_FIGURES[figure], options.folder, sizes))
    if _GRADIENT in (options.figure or [_GRADIENT]):
        shapes = {"1.1B": options.rounds} | ({"7B": 0} if options.with_7B else {})
        for shape, rounds in shapes.items():
            sizes = Sizes(shape=shape, layers=None, sequences=8, threads=options.threads, rounds=rounds)
            cells.once(_GRADIENT, sizes.settings(), partial(gradients.measure, options.folder, sizes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
