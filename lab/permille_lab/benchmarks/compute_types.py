"""Which compute types are fit to train in: error of the projected gradient, and where 500 steps end.

    PERMILLE_MODELS=DIR PERMILLE_DATA=DIR python -m permille_lab.benchmarks.compute_types --output docs/results

The torch engine in each of its compute types, on one user's text and the NF4 package of a model; on its int4
package the torch and the light engine in float32, and the light one with int8 activations. Step size and
epsilon are float32's, found once a seed, so that only the forward pass differs; every final state is judged
in float32. Error:
`|g - g*| / |g*|` over 32 directions, g* being forward-mode in float32. A type is fit where its mean fall
after 500 steps is within two standard errors of float32's over the seeds. Types are ranked by what a step
takes times 1 + error^2: an error of g is variance that so many more steps must average away.
"""

import json
import math
import statistics
import tempfile
import time
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from permille.engines.factory import LIGHT, LIGHT_INT8, open_engine
from permille.engines.interface import Engine
from permille.engines.torch_engine import ComputeDtype, TorchEngine
from permille.quantization import Scheme
from permille.zo.estimators import Descent, estimate
from permille.zo.header import EstimatorKind, LogHeader, Schedule
from permille.zo.lattice import step_unit_exponent_for, values
from permille.zo.steps import apply_record, take_step
from permille_agent.text.rows import TrainingBatches
from permille_agent.training.evaluation import mean_loss
from permille_lab.benchmarks.cells import Cells, Result, Settings
from permille_lab.benchmarks.machine import BF16_INSTRUCTIONS, has_bf16, machine
from permille_lab.benchmarks.model_packages import Sources, sources_from_environment
from permille_lab.benchmarks.settings import settings_parser
from permille_lab.benchmarks.user_text import DENSITIES, UserText, user_text

SPEAKER = "GLOUCESTER"
QUERIES, BATCH_ROWS = 8, 2
EPSILON_NORM, STEP_NORM = 0.5, 0.4
PROBE_STEPS, RACE_STEPS, PACE_STEPS = 4, 20, 9
RACE_FACTORS = (1 / 3, 1.0, 3.0, 9.0)
EPSILON_FACTORS = (1 / 64, 1 / 16, 1 / 4, 1.0, 4.0)
TYPES = tuple(dtype.value for dtype in ComputeDtype)
LIGHT_TYPES = (ComputeDtype.FLOAT32.value, LIGHT, LIGHT_INT8)


class TypeBench:
    """One user, one seed: the engines and what float32 found."""

    def __init__(self, user: UserText, threads: int) -> None:
        self._user = user
        self._threads = threads
        self._batches = TrainingBatches(user.prepared.train, batch_rows=BATCH_ROWS, seed=user.seed)
        self._w_base_K = user.package.values()
        self._reference = self.engine(ComputeDtype.FLOAT32)
        self.epsilon = EPSILON_NORM / math.sqrt(len(self._w_base_K))

    def engine(self, compute_dtype: str) -> Engine:
        """The torch engine in a compute type, or a light engine by its name."""
        if compute_dtype in (LIGHT, LIGHT_INT8):
            return open_engine(self._user.package, compute_dtype, threads=self._threads)
        return TorchEngine(self._user.package, compute_dtype=compute_dtype, threads=self._threads)

    def step_size(self) -> Result:
        """The learning rate that wins a short race in float32, and the rms of g at the base."""
        g_rms = float(np.sqrt(np.mean(np.square(self._exact()))))
        start = STEP_NORM * math.sqrt(QUERIES) / (g_rms * math.sqrt(len(self._w_base_K)))
        losses = {
            start * factor: self._trained(self._reference, start * factor, g_rms, RACE_STEPS)
            for factor in RACE_FACTORS
        }
        return {"learning_rate": min(losses, key=lambda rate: losses[rate]), "g_rms": g_rms}

    def errors(self, compute_dtype: str) -> dict[str, float]:
        """Relative error of g by epsilon, in units of float32's epsilon; and of forward mode."""
        engine = self.engine(compute_dtype)
        exact_N = self._exact()
        found = {"forward": _error(self._projected(engine, self.epsilon, EstimatorKind.FORWARD), exact_N)}
        for factor in EPSILON_FACTORS:
            g_N = self._projected(engine, factor * self.epsilon, EstimatorKind.SPSA)
            found[f"{factor:g}"] = _error(g_N, exact_N)
        return found

    def final_loss(self, compute_dtype: str, step_size: Result, steps: int) -> float:
        """Held-out loss, in float32, of the state that so many steps in this type lead to."""
        engine = self.engine(compute_dtype)
        return self._trained(engine, step_size["learning_rate"], step_size["g_rms"], steps)

    def paces(self, types: list[str]) -> dict[str, float]:
        """Processor seconds of a step in each type: medians of interleaved steps, one each unmeasured."""
        engines = {dtype: self.engine(dtype) for dtype in types}
        header = self._header(self.epsilon, EstimatorKind.SPSA, PACE_STEPS + 1, 1e-9, -40)
        s_K = np.zeros(header.k, np.int64)
        spent: dict[str, list[float]] = {dtype: [] for dtype in types}
        for step in range(PACE_STEPS + 1):
            for dtype, engine in engines.items():
                begin = time.process_time()
                take_step(
                    engine,
                    self._batches(step),
                    Descent(header=header, w_base_K=self._w_base_K),
                    s_K,
                    step,
                    clip=None,
                )
                spent[dtype].append(time.process_time() - begin)
        return {dtype: round(statistics.median(seconds[1:]), 5) for dtype, seconds in spent.items()}

    def base_loss(self) -> float:
        """Held-out loss before any step."""
        return mean_loss(self._reference, self._w_base_K, self._user.prepared.select)

    def _trained(self, engine: Engine, learning_rate: float, g_rms: float, steps: int) -> float:
        exponent = step_unit_exponent_for(learning_rate, g_rms, QUERIES)
        header = self._header(self.epsilon, EstimatorKind.SPSA, steps, learning_rate, exponent)
        s_K = np.zeros(header.k, np.int64)
        for step in range(steps):
            record = take_step(
                engine,
                self._batches(step),
                Descent(header=header, w_base_K=self._w_base_K),
                s_K,
                step,
                clip=8 * g_rms,
            )
            apply_record(s_K, record, header)
        values_K = values(self._w_base_K, s_K, exponent)
        loss = mean_loss(self._reference, values_K, self._user.prepared.select)
        return loss if math.isfinite(loss) else math.inf

    def _exact(self) -> NDArray[np.float64]:
        return self._projected(self._reference, self.epsilon, EstimatorKind.FORWARD)

    def _projected(self, engine: Engine, epsilon: float, estimator: EstimatorKind) -> NDArray[np.float64]:
        header = self._header(epsilon, estimator, PROBE_STEPS, 1.0, 0)
        descent = Descent(header=header, w_base_K=self._w_base_K)
        s_K = np.zeros(header.k, np.int64)
        return np.concatenate(
            [estimate(engine, self._batches(step), descent, s_K, step)[1] for step in range(PROBE_STEPS)]
        )

    def _header(
        self, epsilon: float, estimator: EstimatorKind, steps: int, learning_rate: float, exponent: int
    ) -> LogHeader:
        return LogHeader(
            package_digest=self._user.package.digest,
            mask_digest=self._user.package.mask_digest,
            seed=self._user.seed,
            estimator=estimator,
            queries=QUERIES,
            epsilon=epsilon,
            learning_rate=learning_rate,
            schedule=Schedule.LINEAR,
            total_steps=steps,
            step_unit_exponent=exponent,
            counts=self._user.package.counts,
        )


def _error(g_N: NDArray[np.float64], exact_N: NDArray[np.float64]) -> float:
    return round(float(np.linalg.norm(g_N - exact_N) / np.linalg.norm(exact_N)), 6)


def run(
    cells: Cells,
    sources: Sources,
    packages: Path,
    *,
    model: str,
    seeds: list[int],
    steps: int,
    threads: int,
    types: list[str],
    scheme: Scheme = Scheme.NF4,
) -> None:
    """The cells that are missing."""
    label = model if scheme is Scheme.NF4 else f"{model}, {scheme.value}"
    for seed in seeds:
        common: Settings = {"model": label, "speaker": SPEAKER, "seed": seed, "threads": threads}
        with tempfile.TemporaryDirectory() as name:
            user = user_text(sources, model, SPEAKER, seed, packages, Path(name), scheme=scheme)
            bench = TypeBench(user, threads)

            def started(bench: TypeBench = bench) -> Result:
                return bench.step_size() | {"base": bench.base_loss(), "epsilon": bench.epsilon}

            size = cells.once("step size", common, started)
            if seed == seeds[0]:
                cells.once("pace", common, partial(bench.paces, types))
            for dtype in types:
                errors = partial(bench.errors, dtype)
                cells.once("error", common | {"type": dtype}, errors)

                def trained(bench: TypeBench = bench, dtype: str = dtype, size: Result = size) -> Result:
                    before = machine()
                    loss = bench.final_loss(dtype, size, steps)
                    return {"loss": loss, "machine": {"before": before, "after": machine()}}

                cells.once("convergence", common | {"type": dtype, "steps": steps}, trained)


def page(cells: Cells) -> str:
    """Markdown of what was measured."""
    lines = [_HEAD]
    models = dict.fromkeys(settings["model"] for settings, _ in cells.of("error"))
    for model in models:
        lines += [f"## {model}", "", *_error_table(cells, model), "", *_rank_table(cells, model), ""]
        lines += [*_convergence_table(cells, model), ""]
    return "\n".join(lines)


_HEAD = """# Compute types: which are fit to train in

`python -m permille_lab.benchmarks.compute_types --output docs/results` made this page; numbers are in `precision.json`.
One user's text; the torch engine, or a light engine where it is named; epsilon 1 is
`epsilon * sqrt(k) = 0.5`. Errors are medians over seeds of `|g - g*| / |g*|`, 32 directions, g* forward-mode
in float32. Falls are of the held-out loss, mean over seeds.
"""


def _errors(cells: Cells, model: str) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for settings, result in cells.of("error"):
        if settings["model"] == model:
            found.setdefault(settings["type"], []).append(result)
    return found


def _rank_table(cells: Cells, model: str) -> list[str]:
    """Types by a step's time against float32's, times 1 + error^2, at each type's best epsilon."""
    paces = next((result for settings, result in cells.of("pace") if settings["model"] == model), None)
    if paces is None or ComputeDtype.FLOAT32.value not in paces:
        return []
    rows = []
    for dtype, results in _errors(cells, model).items():
        if dtype not in paces:
            continue
        medians = {f: statistics.median(result[f"{f:g}"] for result in results) for f in EPSILON_FACTORS}
        best = min(medians, key=lambda factor: medians[factor])
        share = paces[dtype] / paces[ComputeDtype.FLOAT32.value]
        rows.append((share * (1 + medians[best] ** 2), dtype, share, best, medians[best]))
    machines = [result["machine"]["before"] for _, result in cells.of("convergence")]
    known = {name for found in machines for name in found["instructions"]}
    without = [
        "This machine has no bf16 instructions: bfloat16 is computed by conversions, and its time says",
        "nothing of processors that have them. The type int8-activations is simulated in float32;",
        "the engine light-int8 multiplies integers.",
        "",
    ]
    return [
        *([] if known & BF16_INSTRUCTIONS else without),
        "| type | step, of float32's | best epsilon | error there | time x (1 + error^2) |",
        "|---|---|---|---|---|",
        *(f"| {dtype} | {share:.2f} | {best:g} | {error:.2g} | {score:.2f} |"
          for score, dtype, share, best, error in sorted(rows)),
    ]  # fmt: skip


def _error_table(cells: Cells, model: str) -> list[str]:
    names = ["forward", *(f"{factor:g}" for factor in EPSILON_FACTORS)]
    found = _errors(cells, model)
    lines = [
        f"| type | forward mode | {' | '.join(f'epsilon {name}' for name in names[1:])} |",
        "|---" * (len(names) + 1) + "|",
    ]
    for dtype, results in found.items():
        errors = [statistics.median(result[name] for result in results) for name in names]
        lines.append(f"| {dtype} | {' | '.join(f'{error:.2g}' for error in errors)} |")
    return lines


def _convergence_table(cells: Cells, model: str) -> list[str]:
    bases = {
        settings["seed"]: result["base"]
        for settings, result in cells.of("step size")
        if settings["model"] == model
    }
    falls: dict[tuple[str, int], dict[int, float]] = {}
    for settings, result in cells.of("convergence"):
        if settings["model"] == model:
            key = (settings["type"], settings["steps"])
            falls.setdefault(key, {})[settings["seed"]] = bases[settings["seed"]] - result["loss"]
    lines = [
        "| type | steps | seeds | fall | less than float32's | two standard errors | fit |",
        "|---|---|---|---|---|---|---|",
    ]
    for (dtype, steps), found in falls.items():
        reference = falls.get((ComputeDtype.FLOAT32.value, steps), {})
        seeds = sorted(found.keys() & reference.keys())
        mine, theirs = [found[seed] for seed in seeds], [reference[seed] for seed in seeds]
        if len(seeds) < 2:
            continue
        lost = statistics.mean(theirs) - statistics.mean(mine)
        allowed = 2 * math.sqrt((statistics.variance(mine) + statistics.variance(theirs)) / len(seeds))
        fit = "yes" if lost <= allowed else "no"
        lines.append(
            f"| {dtype} | {steps} | {len(seeds)} | {statistics.mean(mine):.4f} | {lost:+.4f} | {allowed:.4f} "
            f"| {'' if dtype == ComputeDtype.FLOAT32 else fit} |"
        )
    return lines


def main() -> None:
    """Measure what is missing and write the page."""
    parser = settings_parser(__doc__)
    parser.add_argument("--model", choices=DENSITIES, action="append", help="only these")
    parser.add_argument("--scheme", choices=list(Scheme), type=Scheme, action="append", help="only these")
    parser.add_argument("--type", choices={*TYPES, *LIGHT_TYPES}, action="append", help="only these")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--output", type=Path, help="folder for precision.json and precision.md")
    arguments = parser.parse_args()
    cells = Cells(arguments.cells)
    sources = sources_from_environment()
    for model, scheme in product(arguments.model or ["stories260K-hf"], arguments.scheme or list(Scheme)):
        run(
            cells,
            sources,
            arguments.folder / "models",
            model=model,
            seeds=arguments.seeds,
            steps=arguments.steps,
            threads=arguments.threads,
            types=list(arguments.type or (TYPES if scheme is Scheme.NF4 else LIGHT_TYPES)),
            scheme=scheme,
        )
    if arguments.output is None:
        print(page(cells))
        return
    document = {
        "bf16_instructions": has_bf16(),
        "cells": [
            {"figure": figure, "settings": settings, "result": result} for figure, settings, result in cells
        ],
    }
    (arguments.output / "precision.json").write_text(json.dumps(document, indent=1) + "\n")
    (arguments.output / "precision.md").write_text(page(cells))


if __name__ == "__main__":
    main()
