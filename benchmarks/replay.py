"""How long an exact replay takes and how large a log is: 20,000 steps of a 1.1B model's mask (1.1M values).

    python -m benchmarks.replay
    python -m benchmarks.replay --steps 200 --distribution binomial4

Prints one JSON object. `one_by_one_s` is the obvious way, a direction and a multiply-add a step, measured
on the first 20 steps and scaled up. The `..._cpu_s` are processor time of one thread: what the
others would be on a machine that does nothing else.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from permille.zo.directions import direction
from permille.zo.lattice import state_digest
from permille.zo.log import (
    Distribution,
    EstimatorKind,
    LogHeader,
    Schedule,
    StepRecord,
    decode_canonical,
    encode_canonical,
)
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
        distribution=Distribution(arguments.distribution),
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
        z_K = direction(
            seed=header.seed, step=step, query=0, counts=header.counts, distribution=header.distribution
        )
        s_K += np.int64(c) * z_K
    return s_K


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
    parser.add_argument("--distribution", choices=[d.value for d in Distribution], default="rademacher")
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, os.cpu_count() or 1}))
    arguments = parser.parse_args()
    header = make_header(arguments)
    coefficients_T = np.rint(np.random.default_rng(0).normal(0, 1024, arguments.steps)).astype(int).tolist()
    records = [StepRecord(step=step, coefficients=(c,), loss=0.0) for step, c in enumerate(coefficients_T)]
    data, encode_s = timed(lambda: encode_canonical(header, records))
    log, decode_s = timed(lambda: decode_canonical(data, max_bytes=len(data), max_steps=arguments.steps))
    begin_cpu = time.process_time()
    replay(header, log.coefficients_TQ)
    replay_cpu_s = time.process_time() - begin_cpu
    replay_s: dict[str, float] = {}
    digests = set()
    for threads in arguments.threads:
        s_K, seconds = timed(partial(replay, header, log.coefficients_TQ, threads=threads))
        replay_s[str(threads)] = round(seconds, 3)
        digests.add(state_digest(s_K, mask_digest=header.mask_digest, step_unit_exponent=-30))
    sample = min(SAMPLE_STEPS, arguments.steps)
    begin_cpu = time.process_time()
    sample_K, sample_s = timed(lambda: one_by_one(header, coefficients_T[:sample]))
    sample_cpu_s = time.process_time() - begin_cpu
    exact = len(digests) == 1 and np.array_equal(sample_K, replay(header, log.coefficients_TQ[:sample]))
    report = {
        "steps": arguments.steps,
        "values": arguments.values,
        "distribution": arguments.distribution,
        "replay_s": replay_s,
        "replay_cpu_s": round(replay_cpu_s, 3),
        "values_per_s": round(arguments.steps * arguments.values / min(replay_s.values())),
        "one_by_one_s": round(sample_s / sample * arguments.steps, 1),
        "one_by_one_cpu_s": round(sample_cpu_s / sample * arguments.steps, 1),
        "log_bytes": len(data),
        "bytes_per_step": round(len(data) / arguments.steps, 3),
        "encode_s": round(encode_s, 3),
        "decode_s": round(decode_s, 3),
        "state_digest": min(digests),
        "exact": exact,
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
