"""Compare packages of each scheme with NF4: bytes, forward passes, gradients, decoding.

All contenders take turns. Times are processor seconds. Codes are random, since their values hardly change the
time.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from permille.engines.factory import LIGHT, open_engine
from permille.engines.light.engine import LightEngine
from permille.package.limits import Role
from permille.package.reader import Package
from permille.quantization.types import Scheme
from permille_lab.engine.decode import token_seconds
from permille_lab.engine.sizes import Sizes
from permille_lab.measuring.cells import Result
from permille_lab.measuring.machine import machine


def measure_schemes(folder: Path, sizes: Sizes) -> Result:
    """Measure all schemes. The first one is NF4."""
    return _measure({scheme.value: sizes.package(folder, scheme) for scheme in Scheme}, sizes)


def _measure(packages: dict[str, Package], sizes: Sizes) -> Result:
    """Return the bytes and median times of all packages, and their ratios to the first package.

    A ratio is the median over rounds of the ratios within a round.
    """
    before, first = machine(), next(iter(packages))
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in packages}
    contenders = {name: _Contender(package, sizes) for name, package in packages.items()}
    for _ in range(sizes.rounds + 1):  # the first one warms up
        for name, contender in contenders.items():
            for what, took in contender.round():
                seconds[name].setdefault(what, []).append(took)
    found = {
        name: {
            "package_bytes": packages[name].size_bytes,
            "dense_layer_bytes": packages[name].manifest.layer(Role.DENSE).size_bytes,
            "seconds": {what: round(statistics.median(took[1:]), 5) for what, took in all_took.items()},
            "against_first": {
                what: round(
                    statistics.median(
                        own / other for own, other in zip(took[1:], seconds[first][what][1:], strict=True)
                    ),
                    4,
                )
                for what, took in all_took.items()
            },
        }
        for name, all_took in seconds.items()
    }
    return {"contenders": found, "machine": {"before": before, "after": machine()}}


class _Contender:
    def __init__(self, package: Package, sizes: Sizes) -> None:
        self._package = package
        self._batch = sizes.batch(package)
        engine = open_engine(package, LIGHT, threads=sizes.threads)
        assert isinstance(engine, LightEngine)
        self._engine = engine
        self._values_K = package.values()

    def round(self) -> Iterator[tuple[str, float]]:
        """Time each kind of work once. The time of a token is the median over a text."""
        yield "forward", _took(partial(self._engine.losses, self._values_K[None], self._batch))
        yield "gradient", _took(partial(self._engine.gradient, self._values_K, self._batch))
        yield "token", statistics.median(token_seconds(self._engine, self._package, time.process_time))


def _took(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin
