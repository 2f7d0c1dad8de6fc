"""How long a run has worked, across restarts, and whether its time is over.

The time limit decides how many steps a run makes, never what a step is. Where it ended is durable
(`stop.json`), so that a run that is killed after its time ends at the same step.
"""

import time
from collections.abc import Callable

from permille_agent.training.run import RunFolder


class RunClock:
    """The time of one run. A kill loses what was spent since the last `store`."""

    def __init__(self, run: RunFolder, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._monotonic = monotonic
        self._before_s = float((run.load("time") or {"seconds": 0.0})["seconds"])
        self._stop = run.load("stop")
        self._start = monotonic()

    def seconds(self) -> float:
        """Seconds that the run has worked."""
        return self._before_s + self._monotonic() - self._start

    def store(self) -> None:
        """Make the time spent durable."""
        self._run.store("time", {"seconds": self.seconds()})

    def passed(self, attempt: int, step: int, limit_s: float | None) -> bool:
        """Whether the time is over before this step; None is no limit."""
        if limit_s is None:
            return False
        if self._stop is None and self.seconds() >= limit_s:
            self._stop = self._run.once("stop", lambda: {"attempt": attempt, "step": step})
        return self._stop is not None and (self._stop["attempt"], self._stop["step"]) <= (attempt, step)
