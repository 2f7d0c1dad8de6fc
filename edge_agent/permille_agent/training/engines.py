"""Choice of the engine of a run, and engines that can be stopped."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from permille.choices import EngineName
from permille.errors import PermilleError

if TYPE_CHECKING:
    from permille.engines.interface import Engine
    from permille.package.reader import Package

AUTO, LIGHT_INT8, EXECUTORCH = EngineName.AUTO, EngineName.LIGHT_INT8, EngineName.EXECUTORCH


class RunInterrupted(PermilleError):  # noqa: N818 - it is not a fault
    """The run has stopped because the user or the policy asked for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUsed:
    """Contents of `engine.json`: the fields of `permille.engines.interface.EngineInfo`."""

    name: str
    version: str
    compute_dtype: str
    threads: int
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """Choice of an engine. Calling the choice opens the engine on a package.

    For example:

        engine = EngineChoice(name="light", threads=4)(package)

    Attributes:
        name: "auto", "light", "light-int8", "torch" or "executorch".
        device: "cpu", or "cuda" with torch.
        dtype: "float32", or "bfloat16" with torch.
        threads: number of threads. None uses the engine's default.
    """

    name: str = AUTO
    device: str = "cpu"
    dtype: str = "float32"
    threads: int | None = None

    def __call__(self, package: "Package") -> "Engine":
        """Open the engine on a package.

        Raises:
            InputError: the name is unknown, or the engine's extra is not installed.
        """
        from permille.engines.factory import open_engine

        return open_engine(
            package,
            name=self.name,
            device=self.device,
            compute_dtype=self.dtype,
            threads=self.threads,
        )

    def begun_with(self, name: str) -> "EngineChoice":
        """Return the choice for a resumed run that began with the engine `name`. Only "auto" is replaced."""
        return replace(self, name=name) if self.name == AUTO else self

    def for_any_package(self) -> "EngineChoice":
        """Return a choice that opens every package.

        "auto" replaces "light-int8", which needs int4 weights, and "executorch", which needs a program.
        """
        return replace(self, name=AUTO) if self.name in (LIGHT_INT8, EXECUTORCH) else self


OpenEngine = Callable[["Package"], "Engine"]
ANY_ENGINE = EngineChoice()


class _InterruptibleEngine:
    """An engine that raises `RunInterrupted` instead of starting a call once `stop` is set."""

    def __init__(self, engine: "Engine", stop: threading.Event) -> None:
        self._engine = engine
        self._stop = stop

    def __getattr__(self, name: str) -> Any:
        # `info` and `k` compute nothing, so they may still be read.
        if self._stop.is_set() and name not in ("info", "k"):
            raise RunInterrupted("The training was stopped. The same command resumes it.")
        found = getattr(self._engine, name)
        if name != "after":
            return found
        return lambda *known: _InterruptibleEngine(found(*known), self._stop)


def interruptible(engine: "Engine", stop: threading.Event | None) -> "Engine":
    """Return an engine whose next call raises `RunInterrupted` once `stop` is set."""
    return engine if stop is None else cast("Engine", _InterruptibleEngine(engine, stop))
