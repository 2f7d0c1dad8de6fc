"""How a held-out loss falls with the time that training took: evaluations are not on the clock.

Every method is judged on the same rows (the select split of one user), by the same clock: wall and processor
seconds since training began, less those spent on evaluating.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from permille.engines.factory import AUTO, open_engine
from permille.engines.interface import Batch, Engine
from permille.package.reader import Package
from permille.zo.journal import Journal
from permille.zo.lattice import values
from permille_agent.training.evaluation import mean_loss
from permille_agent.training.options import TrainOptions
from permille_agent.training.run import find_run
from permille_agent.training.setup import training_exponents
from permille_agent.training.steps import state_of
from permille_agent.training.train import run_training
from permille_lab.benchmarks.user_text import UserText

Point = dict[str, Any]

BATCH_ROWS = 16
"""Of a step of what ours is compared with, as in the papers."""

HOPELESS = 0.5
"""Nats above its base from which no run of these comes back."""


@dataclass(slots=True)
class Clock:
    """Seconds that are counted; `pause` and `resume` around what is not."""

    _wall: float = field(default_factory=time.perf_counter)
    _cpu: float = field(default_factory=time.process_time)

    def pause(self) -> tuple[float, float]:
        """Seconds so far (wall, processor)."""
        return time.perf_counter() - self._wall, time.process_time() - self._cpu

    def resume(self, seconds: tuple[float, float]) -> None:
        """Go on from what `pause` returned."""
        self._wall = time.perf_counter() - seconds[0]
        self._cpu = time.process_time() - seconds[1]


def descend(
    step: Callable[[int], object], evaluate: Callable[[], float], *, steps: int, every: int
) -> list[Point]:
    """Make steps 0, 1, ... and evaluate before the first and after every `every` of them.

    A loss that is not finite, or `HOPELESS` above the first one, is the last.
    """
    points = [_point(0, evaluate(), (0.0, 0.0))]
    clock = Clock()
    for number in range(steps):
        step(number)
        if (number + 1) % every == 0 or number + 1 == steps:
            seconds = clock.pause()
            points.append(_point(number + 1, evaluate(), seconds))
            if not points[-1]["loss"] <= points[0]["loss"] + HOPELESS:
                break
            clock.resume(seconds)
    return points


def seconds_to(points: list[Point], loss: float) -> float | None:
    """Processor seconds of the first evaluation that is as low; None where none is."""
    return next((float(point["cpu_s"]) for point in points if point["loss"] <= loss), None)


def lowest(points: list[Point]) -> Point:
    """The first evaluation with the lowest loss."""
    return min(points, key=lambda point: float(point["loss"]))


def growing(steps: int, ratio: float = 1.2) -> list[int]:
    """1, 2, 3, ... and from there on whole numbers that grow by about `ratio`, up to `steps`."""
    found = [1]
    while (following := max(found[-1] + 1, round(found[-1] * ratio))) < steps:
        found.append(following)
    return [*found, steps] if steps > 1 else found


def agent_run(
    user: UserText, *, steps: int, threads: int, options: dict[str, Any], engine: str = AUTO
) -> dict[str, Any]:
    """A run of the agent with its defaults, `options` changed: {points, search_cpu_s, engine, options}.

    The points are those of all attempts, in the order of time.

    Search is the whole time until the first step: reading text, loading the model, epsilon and step size.
    """
    return train_agent(user, steps=steps, threads=threads, options=options, engine=engine).result


def train_agent(
    user: UserText, *, steps: int, threads: int, options: dict[str, Any], engine: str = AUTO
) -> "AgentRun":
    """The same, to be evaluated at more steps."""
    told = _Told()
    engines: list[Engine] = []

    def opened(package: Package) -> Engine:
        counted = _WithoutEvaluation(open_engine(package, engine, threads=threads), told)
        engines.append(counted)
        return counted

    chosen = TrainOptions(seed=user.seed, steps=steps, **options)
    result = run_training(
        user.home,
        data_paths=[user.text],
        steps=None,
        minutes=None,
        seed=user.seed,
        share_log=False,
        progress=told,
        options=chosen,
        engine_of=opened,
    )
    found = {
        "points": told.points,
        "search_cpu_s": round(told.search_cpu_s, 3),
        "outcome": result.outcome.value,
        "engine": dict(engines[0].info()),
        "options": chosen.definition(),
    }
    return AgentRun(
        user=user, name=result.run or "", options=chosen, result=found, told=told, engine=engines[0]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRun:
    """A finished run of the agent: what is told of it, and its log."""

    user: UserText
    name: str
    options: TrainOptions
    result: dict[str, Any]
    told: "_Told"
    engine: Engine

    def points_of_log(self) -> list[Point]:
        """The points, and between them what the logs come to at the steps of `growing`, which the agent does
        not evaluate: at the seconds at which those were made."""
        told, run = self.told, find_run(self.user.home, self.name)
        exponents = training_exponents(self.user.package, self.options)
        points = {(point["attempt"], point["step"]): point for point in told.points}
        for attempt in range(told.attempt + 1):
            with Journal.open(run.journal(attempt)) as journal:
                header, records = journal.header, list(journal.records())
            for step in growing(len(records)):
                if (attempt, step) not in points:
                    s_K = state_of(header, records[:step], exponents)
                    values_K = values(self.user.package.values(), s_K, header.step_unit_exponent)
                    loss = mean_loss(self.engine, values_K, self.user.prepared.select)
                    seconds = told.seconds[attempt, step]
                    points[attempt, step] = {"attempt": attempt} | _point(step, loss, seconds)
        return [points[key] for key in sorted(points)]


class _Told:
    """A progress that keeps the evaluations of all attempts with the clock's seconds."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.attempt = 0
        self.search_cpu_s = 0.0
        self.clock = Clock()
        self.training = False
        self.seconds: dict[tuple[int, int], tuple[float, float]] = {}
        """After each step of each attempt."""

    def phase(self, name: str) -> None:
        """Nothing is kept of it."""

    def step(self, done: int, total: int, loss: float) -> None:  # noqa: ARG002
        """Keep the time."""
        self.seconds[self.attempt, done] = self.clock.pause()

    def evaluated(self, step: int, loss: float, base_loss: float) -> None:  # noqa: ARG002
        """Keep the evaluation; the first of a run ends the search."""
        if not self.training:
            self.search_cpu_s = self.clock.pause()[1]
            self.training = True
            self.clock = Clock()
        if self.points and step <= self.points[-1]["step"]:
            self.attempt += 1
        self.points.append({"attempt": self.attempt} | _point(step, loss, self.clock.pause()))


class _WithoutEvaluation:
    """An engine that stops the clock while it evaluates, once training has begun."""

    def __init__(self, engine: Engine, told: _Told) -> None:
        self._engine = engine
        self._told = told

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def k(self) -> int:
        """Masked weights."""
        return self._engine.k

    def losses(self, values_VK: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        """As the engine."""
        return self._engine.losses(values_VK, batch)

    def token_losses(self, values_K: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        """As the engine, off the clock."""
        seconds = self._told.clock.pause()
        losses_N = self._engine.token_losses(values_K, batch)
        if self._told.training:
            self._told.clock.resume(seconds)
        return losses_N


def _point(step: int, loss: float, seconds: tuple[float, float]) -> Point:
    return {"step": step, "loss": loss, "wall_s": round(seconds[0], 3), "cpu_s": round(seconds[1], 3)}
