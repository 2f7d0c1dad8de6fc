"""Measure the time of an exact replay of 20,000 steps and 1.1M values: `make bench-replay`.

The values are those of the mask of a 1.1B model. The compiled kernels, if they are built, and numpy each
replay the whole log. All states must be equal. `one_by_one_s` is the time of the simple algorithm, which
makes a direction and a multiply-add for each step. It is measured on the first 20 steps and scaled up. A
second cell has 1,000 steps of 4,096 groups. Both cells are in lab/results/replay.jsonl.
"""

import json
import os
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from permille.choices import EstimatorKind
from permille.native.library import VARIABLE, cpu_path
from permille.zo.directions import direction
from permille.zo.header import DirectionKind, LogHeader, Schedule
from permille.zo.lattice import add_scaled, state_digest
from permille.zo.log import decode_canonical, encode_canonical
from permille.zo.records import StepRecord
from permille.zo.replay import replay
from permille_lab.measuring.cells import Cells, Result, settings_parser
from permille_lab.measuring.machine import machine

T = TypeVar("T")

TENSORS = 154
SAMPLE_STEPS = 20
GROUPS, GROUP_STEPS = 4096, 1000


def make_header(steps: int, values: int, groups: int = 0) -> LogHeader:
    """Return the header of a log for 22 layers of 7 tensors, with the values spread over the tensors.

    Args:
        groups: number of groups of weights. If 0, directions consist of signs.
    """
    share, rest = divmod(values, TENSORS)
    return LogHeader(
        package_digest="sha256:" + "0" * 64,
        mask_digest="sha256:" + "1" * 64,
        seed=2026,
        estimator=EstimatorKind.GRADIENT if groups else EstimatorKind.SPSA,
        directions=DirectionKind.GROUPS if groups else DirectionKind.RADEMACHER,
        queries=groups or 1,
        epsilon=1e-3,
        learning_rate=1e-3,
        schedule=Schedule.CONSTANT,
        total_steps=steps,
        step_unit_exponent=-30,
        counts=tuple(share + (tensor < rest) for tensor in range(TENSORS)),
    )


def measure(steps: int, values: int, threads: list[int]) -> Result:
    """Measure the replay by kernels and by numpy, and the log's size and times."""
    header = make_header(steps, values)
    coefficients_T = np.rint(np.random.default_rng(0).normal(0, 1024, steps)).astype(int).tolist()
    records = [StepRecord(step=step, coefficients=(c,), loss=0.0) for step, c in enumerate(coefficients_T)]
    data, encode_s = _timed(lambda: encode_canonical(header, records))
    log, decode_s = _timed(lambda: decode_canonical(data, max_bytes=len(data), max_steps=steps))
    ways = {}
    before = os.environ.get(VARIABLE)
    for way in dict.fromkeys([cpu_path(), "numpy"]):
        if way == "numpy":
            os.environ[VARIABLE] = "off"
        ways[way] = _way(header, log.coefficients_TQ, threads)
    os.environ.pop(VARIABLE)
    if before is not None:
        os.environ[VARIABLE] = before
    digests = {str(figures["state_digest"]) for figures in ways.values()}
    return {
        "ways": ways,
        "exact": len(digests) == 1 and all(figures["exact"] for figures in ways.values()),
        "log_bytes": len(data),
        "bytes_per_step": round(len(data) / steps, 3),
        "encode_s": round(encode_s, 3),
        "decode_s": round(decode_s, 3),
        "machine": machine(),
    }


def measure_groups(steps: int, values: int, groups: int, threads: list[int]) -> Result:
    """Measure the replay of groups by the kernels. Tests compare them with numpy."""
    header = make_header(steps, values, groups)
    coefficients_TQ = np.rint(np.random.default_rng(0).normal(0, 64, (steps, groups))).astype(np.int64)
    replay_s, digests = {}, set()
    for number in threads:
        cpu = time.process_time()
        s_K, seconds = _timed(partial(replay, header, coefficients_TQ, threads=number))
        replay_s[str(number)] = round(seconds, 3)
        replay_s[f"{number}, processor"] = round(time.process_time() - cpu, 3)
        digests.add(s_K.tobytes())
    return {"replay_s": replay_s, "exact": len(digests) == 1, "machine": machine()}


def _way(header: LogHeader, coefficients_TQ: NDArray[np.int64], threads: list[int]) -> dict[str, object]:
    replay(header, coefficients_TQ[:SAMPLE_STEPS])
    digests = set()
    replay_s: dict[str, float] = {}
    for number in threads:
        s_K, seconds = _timed(partial(replay, header, coefficients_TQ, threads=number))
        replay_s[str(number)] = round(seconds, 3)
        digests.add(
            state_digest(s_K, mask_digest=header.mask_digest, step_unit_exponent=header.step_unit_exponent)
        )
    sample_TQ = coefficients_TQ[:SAMPLE_STEPS]
    sample_K, sample_s = _timed(lambda: _one_by_one(header, sample_TQ[:, 0].tolist()))
    return {
        "replay_s": replay_s,
        "one_by_one_s": round(sample_s * len(coefficients_TQ) / len(sample_TQ), 1),
        "state_digest": min(digests),
        "exact": len(digests) == 1 and np.array_equal(sample_K, replay(header, sample_TQ)),
    }


def _one_by_one(header: LogHeader, coefficients_T: list[int]) -> NDArray[np.int64]:
    """Replay step by step, as a training run moves the state."""
    s_K = np.zeros(header.k, dtype=np.int64)
    for step, c in enumerate(coefficients_T):
        add_scaled(
            s_K,
            c,
            direction(seed=header.seed, step=step, query=0, counts=header.counts),
        )
    return s_K


def _timed(function: Callable[[], T]) -> tuple[T, float]:
    begin = time.perf_counter()
    result = function()
    return result, time.perf_counter() - begin


def main() -> None:
    """Measure the missing cells and print all results."""
    parser = settings_parser(__doc__, "replay")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--values", type=int, default=1_100_000)
    options = parser.parse_args()
    cells, threads = Cells(options.cells), sorted({1, options.threads})
    settings = {"steps": options.steps, "values": options.values}
    groups = {"steps": GROUP_STEPS, "values": options.values, "groups": GROUPS}
    found = [
        cells.once("replay", settings, partial(measure, threads=threads, **settings)),
        cells.once("replay of groups", groups, partial(measure_groups, threads=threads, **groups)),
    ]
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
