"""A training step beside two dense forward passes, bitsandbytes and MeZO.

    python -m permille_lab.benchmarks.step_time --shape 1.1B --layers 4
    python -m permille_lab.benchmarks.step_time --shape 1.1B --tokens 64 128

A step of ours is a whole one: two variants of the sparse values (SPSA, one query), directions and update.
Dense and bitsandbytes make two forward passes of the same tokens with losses at the same positions, and no
update. MeZO moves all weights four times, with noise made again each time, and makes two forward passes.

Where the processor has no bf16 instructions, bf16 rows are left out unless `--bf16` asks for them, measured
once: they say nothing about a machine that has them.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from permille.engines.factory import LIGHT_INT8
from permille.package.reader import Package
from permille.quantization import Scheme
from permille.zo.estimators import Batch
from permille.zo.header import EstimatorKind
from permille_lab.benchmarks.cells import Cells, Result, Settings
from permille_lab.benchmarks.dense import batch_loss, bitsandbytes_model, dense_model, release
from permille_lab.benchmarks.engine_steps import EngineStep, opened, random_batch
from permille_lab.benchmarks.machine import Step, has_bf16, interleaved, machine
from permille_lab.benchmarks.mezo import Mezo
from permille_lab.benchmarks.random_packages import SHAPES, random_package
from permille_lab.benchmarks.settings import settings_parser

FIGURE = "step"
QUERIES = 8


class StepBench:
    """The contenders of one cell: the same package, the same tokens."""

    def __init__(self, package: Package, batch: Batch, folder: Path, threads: int) -> None:
        self._package = package
        self._batch = batch
        self._folder = folder
        self._threads = threads
        self.ours: dict[str, EngineStep] = {}
        self.losses: dict[str, float] = {}
        torch.set_num_threads(threads)

    def int8_step(self, package: Package) -> dict[str, Step]:
        """The same shape and tokens with int8 activations, which want a package of int4."""
        engine = opened(package, LIGHT_INT8, threads=self._threads)
        if engine is None:
            return {}
        name = "permille light-int8 on int4"
        self.ours[name] = EngineStep(package, engine, self._batch)
        return {name: self.ours[name]}

    def engine_steps(self, names: list[tuple[str, str]]) -> dict[str, Step]:
        """Steps of our engines, (engine, compute dtype); those that this build lacks are left out."""
        steps: dict[str, Step] = {}
        for name, dtype in names:
            engine = opened(self._package, name, compute_dtype=dtype, threads=self._threads)
            if engine is not None:
                self.ours[f"permille {name} {dtype}"] = EngineStep(self._package, engine, self._batch)
        steps.update(self.ours)
        return steps

    def dense_pair(self, dtype: torch.dtype) -> Step:
        """Two dense forward passes."""
        model = dense_model(self._package, dtype, prepacked=True)
        return self._pair(f"dense {_name(dtype)}", partial(batch_loss, model, self._batch))

    def bitsandbytes_pair(self, dtype: torch.dtype) -> Step:
        """Two forward passes from 4 bits."""
        model = bitsandbytes_model(self._package, self._folder / "linked" / self._package.digest[7:23], dtype)
        return self._pair(f"bitsandbytes NF4 {_name(dtype)}", partial(batch_loss, model, self._batch))

    def mezo(self, dtype: torch.dtype) -> Step:
        """One step of MeZO on all weights."""
        model = dense_model(self._package, dtype, prepacked=False)
        optimizer = Mezo(model.parameters(), epsilon=1e-3, learning_rate=1e-12)
        seeds = iter(range(1 << 30))
        return lambda: optimizer.step(partial(batch_loss, model, self._batch), next(seeds))

    def _pair(self, name: str, loss: Callable[[], float]) -> Step:
        def pair() -> None:
            loss()
            self.losses[name] = loss()

        return pair


def measure(
    package: Package,
    folder: Path,
    *,
    sequences: int,
    tokens: int,
    threads: int,
    rounds: int,
    bf16: bool,
    int4: Package | None = None,
) -> Result:
    """All contenders in interleaved rounds.

    Args:
        int4: the same shape in int4, for int8 activations.
    """
    before = machine()
    batch = random_batch(package, sequences, tokens)
    bench = StepBench(package, batch, folder, threads)
    names = [("torch", "float32"), ("light", "float32")]
    wide = torch.float32
    makers: list[tuple[str, Callable[[], Step]]] = [
        ("dense float32", partial(bench.dense_pair, wide)),
        ("bitsandbytes NF4 float32", partial(bench.bitsandbytes_pair, wide)),
        ("MeZO float32", partial(bench.mezo, wide)),
    ]
    narrow = torch.bfloat16
    if bf16 or has_bf16():
        names += [("torch", "bfloat16"), ("light", "bfloat16")]
        makers += [
            ("dense bfloat16", partial(bench.dense_pair, narrow)),
            ("bitsandbytes NF4 bfloat16", partial(bench.bitsandbytes_pair, narrow)),
            ("MeZO bfloat16", partial(bench.mezo, narrow)),
        ]
    steps = bench.engine_steps(names)
    if int4 is not None:
        steps |= bench.int8_step(int4)
    steps.update({name: make() for name, make in makers})
    slow = frozenset() if has_bf16() else frozenset(name for name in steps if "bfloat16" in name)
    found = interleaved(steps, rounds=rounds, once=slow)
    for name, step in bench.ours.items():
        found[name] |= {"not_forward": round(step.rest_share, 5)}
        bench.losses[name] = step.loss
    del steps, makers
    release()
    return {
        "k": package.k,
        "steps": found,
        "losses": bench.losses,
        "against": "dense bfloat16" if has_bf16() else "dense float32",
        "machine": {"before": before, "after": machine()},
    }


def measure_queries(package: Package, *, sequences: int, tokens: int, threads: int, rounds: int) -> Result:
    """Eight queries a step: finite differences and forward-mode, time of a query."""
    before = machine()
    batch = random_batch(package, sequences, tokens)
    steps: dict[str, Step] = {}
    for name in ("torch", "light"):
        engine = opened(package, name, threads=threads)
        if engine is None:
            continue
        for estimator in (EstimatorKind.SPSA, EstimatorKind.FORWARD):
            steps[f"permille {name} {estimator}"] = EngineStep(
                package, engine, batch, queries=QUERIES, estimator=estimator
            )
        steps[f"permille {name} spsa, 1 query"] = EngineStep(package, engine, batch)
    found = interleaved(steps, rounds=rounds)
    return {"queries": QUERIES, "steps": found, "machine": {"before": before, "after": machine()}}


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
    bf16: bool,
    query_rounds: int,
) -> None:
    """The cells of this figure that are missing; with 0 `query_rounds` none of eight queries a step."""
    for length in tokens:
        sizes = {"sequences": sequences, "tokens": length, "threads": threads, "rounds": rounds}
        settings: Settings = {"shape": shape, "layers": layers, "bf16": bf16} | sizes

        def cell(length: int = length) -> Result:
            package = random_package(folder, SHAPES[shape].with_layers(layers))
            return measure(
                package,
                folder,
                sequences=sequences,
                tokens=length,
                threads=threads,
                rounds=rounds,
                bf16=bf16,
                int4=random_package(folder, SHAPES[shape].with_layers(layers), scheme=Scheme.INT4),
            )

        cells.once(FIGURE, settings, cell)
    if query_rounds:
        settings = {"shape": shape, "layers": layers} | sizes | {"tokens": tokens[0], "rounds": query_rounds}

        def query_cell() -> Result:
            package = random_package(folder, SHAPES[shape].with_layers(layers))
            return measure_queries(
                package, sequences=sequences, tokens=tokens[0], threads=threads, rounds=query_rounds
            )

        cells.once("queries", settings, query_cell)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> None:
    """Measure what is missing; print the figure's cells."""
    parser = settings_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="1.1B")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bf16", action="store_true", help="bf16 rows without bf16 instructions too")
    parser.add_argument("--query-rounds", type=int, default=0, help="rounds of eight queries a step")
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
        bf16=arguments.bf16,
        query_rounds=arguments.query_rounds,
    )
    for settings, result in cells.of(FIGURE) + cells.of("queries"):
        seconds = {name: found["wall_s"] for name, found in result["steps"].items()}
        print(json.dumps({"settings": settings, "wall_s": seconds, "losses": result.get("losses")}, indent=1))


if __name__ == "__main__":
    main()
