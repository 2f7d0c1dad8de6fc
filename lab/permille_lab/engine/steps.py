"""Compare a training step with two dense forward passes, bitsandbytes and MeZO, in interleaved rounds.

Our steps are complete: two variants of the sparse values (SPSA, one query), directions and update. Dense and
bitsandbytes make two forward passes of the same tokens, with losses at the same positions, and no update.
MeZO makes two forward passes and moves all weights four times, with newly generated noise each time.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from permille.choices import EstimatorKind
from permille.engines.factory import LIGHT, LIGHT_INT8, open_engine
from permille.engines.interface import Engine
from permille.package.reader import Package
from permille.quantization.types import Scheme
from permille.zo.estimators import Batch
from permille_lab.engine.own_steps import EngineStep
from permille_lab.engine.sizes import Sizes
from permille_lab.learning.mezo import Mezo
from permille_lab.measuring.cells import Result
from permille_lab.measuring.dense import batch_loss, bitsandbytes_model, dense_model
from permille_lab.measuring.machine import Step, interleaved, machine

QUERIES = 8
_LOOP_QUERIES = 4
_LOOP_BATCHES = ((1, 32), (1, 128), (4, 32))
_LOOP_ENGINES = (
    ("NF4", Scheme.NF4, LIGHT),
    ("int4", Scheme.INT4, LIGHT),
    ("int4, inputs of 8 bits", Scheme.INT4, LIGHT_INT8),
)


def measure_steps(folder: Path, sizes: Sizes) -> Result:
    """Measure all contenders in float32, and our engine with 8-bit activations on int4."""
    before = machine()
    torch.set_num_threads(sizes.threads)
    package = sizes.package(folder)
    batch = sizes.batch(package)
    ours = {
        "permille light float32": _ours(package, sizes, LIGHT),
        "permille light-int8 on int4": _ours(sizes.package(folder, Scheme.INT4), sizes, LIGHT_INT8),
    }
    losses: dict[str, float] = {}
    models = {
        "dense float32": dense_model(package, prepacked=True),
        "bitsandbytes NF4 float32": bitsandbytes_model(package, folder / "linked" / package.digest[7:23]),
    }

    def pair(name: str) -> None:
        for _ in range(2):
            losses[name] = batch_loss(models[name], batch)

    moved = dense_model(package, prepacked=False)
    optimizer = Mezo(moved.parameters(), epsilon=1e-3, learning_rate=1e-12)
    steps: dict[str, Step] = {
        **ours,
        **{name: partial(pair, name) for name in models},
        "MeZO float32": lambda: optimizer.step(partial(batch_loss, moved, batch), 0),
    }
    found = interleaved(steps, rounds=sizes.rounds)
    for name, step in ours.items():
        found[name] |= {"not_forward": round(step.rest_share, 5)}
        losses[name] = step.loss
    return {
        "k": package.k,
        "steps": found,
        "losses": losses,
        "against": "dense float32",
        "machine": {"before": before, "after": machine()},
    }


def measure_queries(folder: Path, sizes: Sizes) -> Result:
    """Measure steps of eight queries, by finite differences and by exact derivatives, and of one query."""
    before = machine()
    package = sizes.package(folder)
    steps: dict[str, Step] = {"spsa, 1 query": _ours(package, sizes, LIGHT)}
    for estimator in (EstimatorKind.SPSA, EstimatorKind.ONE_SIDED, EstimatorKind.FORWARD):
        engine = open_engine(package, LIGHT, threads=sizes.threads)
        steps[f"{estimator}, {QUERIES} queries"] = EngineStep(
            package, engine, sizes.batch(package), queries=QUERIES, estimator=estimator
        )
    found = interleaved(steps, rounds=sizes.rounds)
    return {"steps": found, "machine": {"before": before, "after": machine()}}


def measure_loops(folder: Path, sizes: Sizes) -> Result:
    """Measure variants in one call and one after the other: both signs of a query, or four queries.

    Only losses are computed, for several packages, engines and batches.
    """
    before = machine()
    found = {}
    for name, scheme, engine_name in _LOOP_ENGINES:
        package = sizes.package(folder, scheme)
        engine = open_engine(package, engine_name, threads=sizes.threads)
        signs_V1 = np.array([[1], [-1]] * _LOOP_QUERIES, np.float32)
        values_VK = package.values() + np.float32(1e-4) * signs_V1
        for sequences, tokens in _LOOP_BATCHES:
            batch = replace(sizes, sequences=sequences, tokens=tokens).batch(package)

            def losses(stop: int, each: int, engine: Engine = engine, batch: Batch = batch) -> None:
                for first in range(0, stop, each):
                    engine.losses(values_VK[first : first + each], batch)  # noqa: B023

            every = len(values_VK)
            timings = interleaved(
                {
                    "both signs": partial(losses, 2, 2),
                    "sign by sign": partial(losses, 2, 1),
                    "all queries": partial(losses, every, every),
                    "query by query": partial(losses, every, 2),
                },
                rounds=sizes.rounds,
            )
            cpu_s = {way: timing["cpu_s"] for way, timing in timings.items()}
            found[f"{name}, {sequences}x{tokens}"] = cpu_s | {
                "inner": round(cpu_s["sign by sign"] / cpu_s["both signs"], 3),
                "outer": round(cpu_s["query by query"] / cpu_s["all queries"], 3),
            }
    return {"loops": found, "machine": {"before": before, "after": machine()}}


def measure_lower_layers(folder: Path, sizes: Sizes) -> Result:
    """Measure steps of a package with masked weights only in the upper half of its layers.

    The outputs of the lower half do not change between steps.
    """
    before = machine()
    torch.set_num_threads(sizes.threads)
    package = sizes.package(folder, upper_half=True)
    batch = sizes.batch(package)
    dense = dense_model(package, prepacked=True)

    def pair() -> None:
        batch_loss(dense, batch)
        batch_loss(dense, batch)

    found = interleaved(
        {"dense": pair, "permille light, warm": _ours(package, sizes, LIGHT)}, rounds=sizes.rounds
    )
    return {"steps": found, "machine": {"before": before, "after": machine()}}


def _ours(package: Package, sizes: Sizes, name: str) -> EngineStep:
    return EngineStep(package, open_engine(package, name, threads=sizes.threads), sizes.batch(package))
