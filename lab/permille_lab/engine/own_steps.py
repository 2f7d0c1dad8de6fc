"""Whole training steps of our engines: directions, passes and update. The engine's time is also measured."""

import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from permille.choices import EstimatorKind
from permille.engines.interface import Engine
from permille.errors import InputError
from permille.package.reader import Package
from permille.zo.estimators import Batch, Descent, differentiable
from permille.zo.header import LogHeader, Schedule
from permille.zo.steps import apply_record, take_step

EPSILON_NORM = 0.5


@dataclass(slots=True)
class Metered:
    """An engine that measures the seconds spent in it, and keeps the last losses."""

    engine: Engine
    seconds: float = 0.0
    losses_seen: list[float] = field(default_factory=list)

    @property
    def k(self) -> int:
        """Number of masked weights."""
        return self.engine.k

    def losses(self, values_VK: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        """Return the losses of the engine."""
        begin = time.perf_counter()
        losses_V = self.engine.losses(values_VK, batch)
        self.seconds += time.perf_counter() - begin
        self.losses_seen = losses_V.tolist()
        return losses_V

    def gradient(self, values_K: NDArray[np.float32], batch: Batch) -> tuple[float, NDArray[np.float32]]:
        """Return loss and gradient of the engine."""
        begin = time.perf_counter()
        loss, gradient_K = differentiable(self.engine).gradient(values_K, batch)
        self.seconds += time.perf_counter() - begin
        self.losses_seen = [loss]
        return loss, gradient_K


class EngineStep:
    """Training steps of a run from the package's values. Each call is the next step."""

    def __init__(
        self,
        package: Package,
        engine: Engine,
        batch: Batch,
        *,
        queries: int = 1,
        estimator: EstimatorKind = EstimatorKind.SPSA,
    ) -> None:
        self._meter = Metered(engine)
        self._batch = batch
        self._w_base_K = package.values()
        self._s_K = np.zeros(package.k, np.int64)
        self._step = 0
        self._total_s = 0.0
        self._header = LogHeader(
            package_digest=package.digest,
            mask_digest=package.mask_digest,
            seed=1,
            estimator=estimator,
            queries=queries,
            epsilon=EPSILON_NORM / float(np.sqrt(package.k)),
            learning_rate=1e-6,
            schedule=Schedule.CONSTANT,
            total_steps=1 << 20,
            step_unit_exponent=-30,
            counts=package.counts,
        )

    def __call__(self) -> None:
        """Make the next step.

        Raises:
            InputError: the step was rejected, so its time is not that of a usual step.
        """
        begin = time.perf_counter()
        record = take_step(
            self._meter,
            self._batch,
            Descent(header=self._header, w_base_K=self._w_base_K),
            self._s_K,
            self._step,
            normalised=False,
        )
        if record.flags:
            raise InputError(f"The step was rejected: {record}")
        apply_record(self._s_K, record, self._header)
        self._step += 1
        self._total_s += time.perf_counter() - begin

    @property
    def rest_share(self) -> float:
        """Share of the time of all steps that was not spent in the engine."""
        return 1 - self._meter.seconds / self._total_s

    @property
    def loss(self) -> float:
        """Mean of the last step's losses."""
        return float(np.mean(self._meter.losses_seen))
