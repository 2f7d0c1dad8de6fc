"""Stopping a run between two calls of the engine: what is durable stays, the same command goes on later."""

import threading
from collections.abc import Collection, Iterator

import numpy as np
from numpy.typing import NDArray

from permille.engines.interface import Engine, EngineInfo
from permille.errors import PermilleError
from permille.zo.estimators import Batch


class RunInterrupted(PermilleError):  # noqa: N818 - not a fault: the user or the policy asked for it
    """The run was asked to stop and did."""


class InterruptibleEngine:
    """An engine that raises `RunInterrupted` instead of starting a call once `stop` is set."""

    def __init__(self, engine: Engine, stop: threading.Event) -> None:
        self._engine = engine
        self._stop = stop

    @property
    def k(self) -> int:
        """As the engine."""
        return self._engine.k

    def losses(self, values_VK: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        """As the engine."""
        self._check()
        return self._engine.losses(values_VK, batch)

    def directional_derivatives(
        self, values_K: NDArray[np.float32], directions_QK: NDArray[np.float32], batch: Batch
    ) -> tuple[float, NDArray[np.float64]]:
        """As the engine."""
        self._check()
        return self._engine.directional_derivatives(values_K, directions_QK, batch)

    def token_losses(self, values_K: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        """As the engine."""
        self._check()
        return self._engine.token_losses(values_K, batch)

    def generate(
        self,
        values_K: NDArray[np.float32],
        prompt_ids: NDArray[np.int64],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        stop_ids: Collection[int] = (),
    ) -> Iterator[int]:
        """As the engine."""
        self._check()
        return self._engine.generate(
            values_K,
            prompt_ids,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            stop_ids=stop_ids,
        )

    def info(self) -> EngineInfo:
        """As the engine."""
        return self._engine.info()

    def _check(self) -> None:
        if self._stop.is_set():
            raise RunInterrupted("stopped as asked; the same command goes on where this one ended")
