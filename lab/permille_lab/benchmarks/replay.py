"""How long an exact replay takes and how large a log is: 20,000 steps of a 1.1B model's mask (1.1M values).

    python -m permille_lab.benchmarks.replay

Prints one JSON object. Each way of computing (the compiled kernels where they are built, numpy) replays the
whole log; all must give the same state. `one_by_one_s` is the obvious way, a direction and a multiply-add a
step, measured on the first 20 steps and scaled up. `step_ms` is what a step of 8 queries costs beside its
forward passes: directions, all perturbed values, update. The `..._cpu_s` are processor time: what the wall
clock would show with one thread on a machine that does nothing else.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from permille.native.library import VARIABLE, cpu_path
from permille.zo.directions import direction
from permille.zo.header import EstimatorKind, LogHeader, Schedule
from permille.zo.lattice import add_scaled, perturbed_pairs, state_digest
from permille.zo.log import decode_canonical, encode_canonical
from permille.zo.records import StepRecord
from permille.zo.replay import replay

Result = TypeVar("Result")

TENSORS = 154
SAMPLE_STEPS = 20


def make_header(arguments: argparse.Namespace) -> LogHeader:
    """A log as a phone would keep it: 22 layers of 7 tensors, k spread over them."""
    share, rest = divmod(arguments.values, TENSORS)
    return LogHeader(
        package_digest="sha256:" + "0" * 64,
        mask_digest="sha256:" + "1" * 64,
        seed=2026,
        estimator=EstimatorKind.SPSA,
        queries=1,
        epsilon=1e-3,
        learning_rate=1e-3,
        schedule=Schedule.CONSTANT,
        total_steps=arguments.steps,
        step_unit_exponent=-30,
        counts=tuple(share + (tensor < rest) for tensor in range(TENSORS)),
    )


def one_by_one(header: LogHeader, coefficients_T: list[int]) -> NDArray[np.int64]:
    """Replay as a device's trainer would do it."""
    s_K = np.zeros(header.k, dtype=np.int64)
    for step, c in enumerate(coefficients_T):
        z_K = direction(seed=header.seed, step=step, query=0, counts=header.counts)
        add_scaled(s_K, c, z_K)
    return s_K


def measure(header: LogHeader, coefficients_TQ: NDArray[np.int64], threads: list[int]) -> dict[str, object]:
    """Times and results of one way of computing."""
    replay(header, coefficients_TQ[:SAMPLE_STEPS])
    begin_cpu = time.process_time()
    s_K = replay(header, coefficients_TQ)
    replay_cpu_s = time.process_time() - begin_cpu
    digests = {digest(header, s_K)}
    replay_s: dict[str, float] = {}
    for number in threads:
        s_K, seconds = timed(partial(replay, header, coefficients_TQ, threads=number))
        replay_s[str(number)] = round(seconds, 3)
        digests.add(digest(header, s_K))
    sample = coefficients_TQ[:SAMPLE_STEPS]
    begin_cpu = time.process_time()
    sample_K, sample_s = timed(lambda: one_by_one(header, sample[:, 0].tolist()))
    scale = len(coefficients_TQ) / len(sample)
    return {
        "replay_s": replay_s,
        "replay_cpu_s": round(replay_cpu_s, 3),
        "values_per_cpu_s": round(coefficients_TQ.size * header.k / replay_cpu_s),
        "one_by_one_s": round(sample_s * scale, 1),
        "one_by_one_cpu_s": round((time.process_time() - begin_cpu) * scale, 1),
        "step_ms": step_ms(header),
        "state_digest": min(digests),
        "exact": len(digests) == 1 and np.array_equal(sample_K, replay(header, sample)),
    }


def step_ms(header: LogHeader, queries: int = 8, repeats: int = 5) -> dict[str, float]:
    """Median milliseconds of the parts of a step that are no forward pass."""
    w_K, s_K = np.ones(header.k, dtype=np.float32), np.zeros(header.k, dtype=np.int64)
    z_QK = np.empty((queries, header.k), dtype=np.int8)

    def directions() -> None:
        for query in range(queries):
            z_QK[query] = direction(seed=header.seed, step=0, query=query, counts=header.counts)

    def update() -> None:
        for z_K in z_QK:
            add_scaled(s_K, 1024, z_K)

    parts: dict[str, Callable[[], object]] = {
        "directions": directions,
        "perturbed": lambda: perturbed_pairs(w_K, s_K, -30, z_QK, 1e-3),
        "update": update,
    }
    return {
        name: round(1000 * statistics.median(timed(part)[1] for _ in range(repeats)), 2)
        for name, part in parts.items()
    }


def digest(header: LogHeader, s_K: NDArray[np.int64]) -> str:
    """Name of a state."""
    return state_digest(s_K, mask_digest=header.mask_digest, step_unit_exponent=header.step_unit_exponent)


def timed(function: Callable[[], Result]) -> tuple[Result, float]:
    """What a function returns and the seconds it took."""
    begin = time.perf_counter()
    result = function()
    return result, time.perf_counter() - begin


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--values", type=int, default=1_100_000)
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, os.cpu_count() or 1}))
    arguments = parser.parse_args()
    header = make_header(arguments)
    coefficients_T = np.rint(np.random.default_rng(0).normal(0, 1024, arguments.steps)).astype(int).tolist()
    records = [StepRecord(step=step, coefficients=(c,), loss=0.0) for step, c in enumerate(coefficients_T)]
    data, encode_s = timed(lambda: encode_canonical(header, records))
    log, decode_s = timed(lambda: decode_canonical(data, max_bytes=len(data), max_steps=arguments.steps))
    ways = {}
    for way in dict.fromkeys([cpu_path(), "numpy"]):
        if way == "numpy":
            os.environ[VARIABLE] = "off"
        ways[way] = measure(header, log.coefficients_TQ, arguments.threads)
    digests = {str(figures["state_digest"]) for figures in ways.values()}
    report = {
        "steps": arguments.steps,
        "values": arguments.values,
        "ways": ways,
        "exact": len(digests) == 1 and all(figures["exact"] for figures in ways.values()),
        "log_bytes": len(data),
        "bytes_per_step": round(len(data) / arguments.steps, 3),
        "encode_s": round(encode_s, 3),
        "decode_s": round(decode_s, 3),
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cpus": os.cpu_count(),
            "load_1m": round(os.getloadavg()[0], 2),
            "numpy": np.__version__,
        },
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
