"""How long a run has worked, across restarts, and whether its time is over.

The time limit decides how many steps a run makes, never what a step is. Where it ended is durable
(`stop.json`), so that a run that is killed after its time ends at the same step.
"""

import time
from collections.abc import Callable

from edge_agent.run_folder import RunFolder

# Of the time of a run with a limit: kept for judging the result, and spent at most on the search.
JUDGEMENT_SHARE = 0.10
SEARCH_SHARE = 0.25


class RunClock:
    """The time of one run. A kill loses what was spent since the last `store`."""

    def __init__(
        self, run: RunFolder, *, minutes: float | None, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._run = run
        self._monotonic = monotonic
        self._limit_s = None if minutes is None else 60.0 * minutes * (1.0 - JUDGEMENT_SHARE)
        self._before_s = float((run.load("time") or {"seconds": 0.0})["seconds"])
        self._stop = run.load("stop")
        self._start = monotonic()

    def seconds(self) -> float:
        """Seconds that the run has worked."""
        return self._before_s + self._monotonic() - self._start

    def store(self) -> None:
        """Make the time spent durable."""
        self._run.store("time", {"seconds": self.seconds()})

    def passed(self, attempt: int, step: int) -> bool:
        """Whether the time is over before this step."""
        if self._limit_s is None:
            return False
        if self._stop is None and self.seconds() >= self._limit_s:
            self._stop = self._run.once("stop", lambda: {"attempt": attempt, "step": step})
        return self._stop is not None and (self._stop["attempt"], self._stop["step"]) <= (attempt, step)
