"""Machine, time and memory of a measurement, as the operating system reports them."""

import importlib.metadata
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

Step = Callable[[], object]

_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "bf16")
_PACKAGES = ("numpy", "torch", "transformers", "bitsandbytes", "peft")


def machine() -> dict[str, Any]:
    """Return processor, instruction sets, cores, memory, current load and versions."""
    return {
        "processor": _named("model name") or platform.machine(),
        "instructions": sorted(instructions()),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_1m": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
    }


def instructions() -> set[str]:
    """Return the names of the processor's instruction sets that decide which kernels run."""
    found = (_named("flags") or _named("Features") or "").split()
    return set(_FLAGS) & set(found)


@dataclass(frozen=True, slots=True)
class Timing:
    """Wall-clock seconds of a call, and processor seconds of all threads of this process."""

    wall_s: float
    cpu_s: float


def timed(step: Step) -> Timing:
    """Call the step once and return its timing."""
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    return Timing(time.perf_counter() - wall, time.process_time() - cpu)


def interleaved(steps: Mapping[str, Step], *, rounds: int) -> dict[str, dict[str, Any]]:
    """Run each step once to warm up, then time all steps in turns. Other load thus disturbs all alike.

    Args:
        rounds: number of timings of each step.

    Returns:
        For each step: the medians `wall_s` and `cpu_s`, the fastest time `least_s`, and all times `walls`.
    """
    for step in steps.values():
        step()
    timings: dict[str, list[Timing]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            timings[name].append(timed(step))
            sys.stderr.write(f"  {name}: {timings[name][-1].wall_s:.2f} s\n")
    return {name: summary(found) for name, found in timings.items()}


def summary(timings: list[Timing]) -> dict[str, Any]:
    """Return the medians, the fastest time and all times of several calls."""
    walls = [timing.wall_s for timing in timings]
    return {
        "wall_s": round(statistics.median(walls), 4),
        "cpu_s": round(statistics.median(timing.cpu_s for timing in timings), 4),
        "least_s": round(min(walls), 4),
        "walls": [round(wall, 4) for wall in walls],
    }


def resident() -> dict[str, int]:
    """Return the resident bytes of this process, as /proc names them.

    `VmRSS` are those now, `VmHWM` is their peak, `RssAnon` are those without a file, and `RssFile` those of
    mapped files.
    """
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("VmRSS", "VmHWM", "RssAnon", "RssFile"):
            found[name] = int(rest.split()[0]) << 10
    return found


class AnonymousPeak:
    """The largest `RssAnon` while the `with` block runs.

    It is sampled every 10 ms, because the kernel stores only the peak of the total.
    """

    def __init__(self) -> None:
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.bytes = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        self.bytes = max(self.bytes, resident()["RssAnon"])

    def _sample(self) -> None:
        while not self._done.wait(0.01):
            self.bytes = max(self.bytes, resident()["RssAnon"])


def _named(field: str) -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    named = (line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == field)
    return next(named, None)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
