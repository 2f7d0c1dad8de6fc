"""Where a step's time goes: forward, perturbation, update; and peak memory of first order against ZO.

Figure 6 of the sensitive-sparse paper (all weights against sensitive ones) and figure 4 of the P-RGE paper.
A step is one query: two forward passes. "All weights" is MeZO in place on the dense float32 model;
"sensitive" is the product's engine on the package of the corpus' mask.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from permille.errors import InputError
from permille.package.reader import Package
from permille.zo.estimators import Batch, Descent
from permille.zo.header import EstimatorKind, LogHeader, Schedule
from permille.zo.steps import apply_record, take_step
from permille_lab.benchmarks.cells import Cells, Result
from permille_lab.benchmarks.dense import batch_loss, dense_model, release
from permille_lab.benchmarks.engine_steps import EPSILON_NORM, Metered, opened
from permille_lab.benchmarks.machine import machine
from permille_lab.benchmarks.memory import run as run_memory
from permille_lab.benchmarks.mezo import Mezo
from permille_lab.benchmarks.model_packages import package_of_model
from permille_lab.benchmarks.random_packages import SHAPES

MEMORY_CONTENDERS = ("permille light float32", "permille torch float32", "LoRA on the package float32")
MEMORY_SEQUENCES, MEMORY_TOKENS = (1, 8, 16), (64, 128, 256)

Split = dict[str, float]
"""Seconds by part of a step: forward, perturbation, update."""


def measure_steps(
    model: Path,
    corpus: Path,
    batch: Batch,
    folder: Path,
    *,
    density: float,
    sequences: int,
    length: int,
    rounds: int,
    threads: int,
) -> Result:
    """Interleaved steps, each contender once unmeasured; medians by part.

    Args:
        sequences, length: of the corpus, for the package's mask.
    """
    before = machine()
    torch.set_num_threads(threads)
    package = package_of_model(
        model, folder / "blobs", corpus, density=density, sequences=sequences, length=length
    )
    contenders: dict[str, Callable[[], Split]] = {"all weights": _mezo(package, batch)}
    for name in ("light", "torch"):
        if (step := _sensitive(package, batch, name, threads)) is not None:
            contenders[f"sensitive, {name} engine"] = step
    found: dict[str, list[Split]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, step in contenders.items():
            split = step()
            if number:
                found[name].append(split)
    contenders.clear()
    release()
    return {
        "k": package.k,
        "tokens": int(batch.attention_BT.sum()),
        "sequences": len(batch.input_ids_BT),
        "seconds": {
            name: {part: statistics.median(split[part] for split in splits) for part in splits[0]}
            for name, splits in found.items()
        },
        "machine": {"before": before, "after": machine()},
    }


def measure_memory(
    cells: Cells,
    folder: Path,
    *,
    shape: str,
    layers: int | None,
    threads: int,
    check_time: Callable[[], None],
    sequences: tuple[int, ...] = MEMORY_SEQUENCES,
    tokens: tuple[int, ...] = MEMORY_TOKENS,
) -> None:
    """The cells of the figure that are missing; each contender is a process of its own."""
    if shape not in SHAPES:
        raise InputError(f"expected a shape of {', '.join(SHAPES)}; got {shape!r}")
    for number in sequences:
        for length in tokens:
            check_time()
            run_memory(
                cells,
                folder,
                shape=shape,
                layers=layers,
                sequences=number,
                tokens=length,
                threads=threads,
                contenders=MEMORY_CONTENDERS,
            )


class _SplitMezo(Mezo):
    """MeZO that tells how long its parts took."""

    def split_step(self, loss: Callable[[], float], seed: int) -> Split:
        spent = {"forward": 0.0}

        def timed_loss() -> float:
            begin = time.perf_counter()
            value = loss()
            spent["forward"] += time.perf_counter() - begin
            return value

        moves: list[float] = []
        self._spent = moves
        self.step(timed_loss, seed)
        return spent | {"perturbation": sum(moves[:-1]), "update": moves[-1]}

    def _move(self, seed: int, scale: float) -> None:
        begin = time.perf_counter()
        super()._move(seed, scale)
        self._spent.append(time.perf_counter() - begin)


def _mezo(package: Package, batch: Batch) -> Callable[[], Split]:
    model = dense_model(package, torch.float32, prepacked=False)
    optimizer = _SplitMezo(model.parameters(), epsilon=1e-3, learning_rate=1e-12)
    seeds = iter(range(1 << 30))
    return lambda: optimizer.split_step(partial(batch_loss, model, batch), next(seeds))


def _sensitive(package: Package, batch: Batch, name: str, threads: int) -> Callable[[], Split] | None:
    engine = opened(package, name, threads=threads)
    if engine is None:
        return None
    meter = Metered(engine)
    w_base_K, s_K = package.values(), np.zeros(package.k, np.int64)
    steps = iter(range(1 << 30))
    header = LogHeader(
        package_digest=package.digest,
        mask_digest=package.mask_digest,
        seed=1,
        estimator=EstimatorKind.SPSA,
        queries=1,
        epsilon=EPSILON_NORM / float(np.sqrt(package.k)),
        learning_rate=1e-6,
        schedule=Schedule.CONSTANT,
        total_steps=1 << 20,
        step_unit_exponent=-30,
        counts=package.counts,
    )

    def step() -> Split:
        forward, begin = meter.seconds, time.perf_counter()
        record = take_step(
            meter, batch, Descent(header=header, w_base_K=w_base_K), s_K, next(steps), clip=None
        )
        taken = time.perf_counter()
        apply_record(s_K, record, header)
        end = time.perf_counter()
        if record.flags:
            raise InputError(f"expected a step that counts, got {record}")
        forward = meter.seconds - forward
        return {"forward": forward, "perturbation": taken - begin - forward, "update": end - taken}

    return step
