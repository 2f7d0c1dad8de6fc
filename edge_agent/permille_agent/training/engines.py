"""The engine of a run: the user's choice, opened on a package when it is needed, and stopped when asked."""

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


class RunInterrupted(PermilleError):  # noqa: N818 - not a fault: the user or the policy asked for it
    """The run was asked to stop and did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUsed:
    """The engine that a run computes with, to its end: `permille.engines.interface.EngineInfo`."""

    name: str
    version: str
    compute_dtype: str
    threads: int
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """An engine that is not open yet.

    Attributes:
        name: "auto", "light", "light-int8", "torch" or "executorch".
        device: cpu, or cuda with torch.
        dtype: what it computes in: float32, or bfloat16 with torch.
        threads: None leaves it to the engine.
    """

    name: str = AUTO
    device: str = "cpu"
    dtype: str = "float32"
    threads: int | None = None

    def __call__(self, package: "Package") -> "Engine":
        """Open it.

        Raises:
            InputError: an unknown name, or one whose extra is not installed.
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
        """Return this choice for a run that began with the engine `name`: "auto" stays with it."""
        return replace(self, name=name) if self.name == AUTO else self

    def for_any_package(self) -> "EngineChoice":
        """Return this choice where it opens any package: not all are int4, nor have a program."""
        return replace(self, name=AUTO) if self.name in (LIGHT_INT8, EXECUTORCH) else self


OpenEngine = Callable[["Package"], "Engine"]
ANY_ENGINE = EngineChoice()


class _InterruptibleEngine:
    """An engine that raises `RunInterrupted` instead of starting a call once `stop` is set."""

    def __init__(self, engine: "Engine", stop: threading.Event) -> None:
        self._engine = engine
        self._stop = stop

    def __getattr__(self, name: str) -> Any:
        if self._stop.is_set() and name not in ("info", "k"):
            raise RunInterrupted("stopped as asked; the same command goes on where this one ended")
        return getattr(self._engine, name)


def interruptible(engine: "Engine", stop: threading.Event | None) -> "Engine":
    """Let `stop` end a run between two calls of its engine: what is durable stays."""
    return engine if stop is None else cast("Engine", _InterruptibleEngine(engine, stop))
