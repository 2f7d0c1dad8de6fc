"""Progress of a running training, for its caller and for `permille-agent status`.

The progress is one record, `progress.json` in the home folder, replaced about once a second. A killed run
leaves its record. So the record is valid only while the process that wrote it holds the writers' lock.
"""

import math
import os
import time
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console

from permille.errors import OperatorError
from permille_agent.state.home import Home, read_record, write_record
from permille_agent.state.lock import lock_holder

LINE_COLUMNS = 79
WRITE_EVERY_S = 1.0
PRINT_EVERY_S = 30.0  # for output that is not a terminal


class RunProgress(Protocol):
    """Receiver of progress. It never influences a run."""

    def phase(self, name: str) -> None:
        """Report that a new phase begins."""

    def step(self, done: int, total: int, loss: float) -> None:
        """Report that step `done` of `total` of a descent is made, with the loss of its batch."""

    def evaluated(self, step: int, loss: float, first_loss: float) -> None:
        """Report the loss on the select split before step `step`, with the loss of the start."""


class SilentProgress:
    """Ignores all progress."""

    def phase(self, name: str) -> None:
        """See `RunProgress`."""

    def step(self, done: int, total: int, loss: float) -> None:
        """See `RunProgress`."""

    def evaluated(self, step: int, loss: float, first_loss: float) -> None:
        """See `RunProgress`."""


SILENT = SilentProgress()


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Contents of `progress.json`.

    Attributes:
        loss: smoothed loss of the batches.
        held_out: newest loss on the select split.
        first: loss of the start on the select split.
    """

    pid: int
    phase: str = ""
    step: int = 0
    total: int = 0
    loss: float | None = None
    held_out: float | None = None
    first: float | None = None
    seconds_left: float | None = None

    def line(self) -> str:
        """Describe the progress in one line of at most 79 columns.

        Example:
            >>> Progress(pid=1, step=3, total=10, loss=2.5).line()
            'step 3 of 10, loss 2.500'
        """
        if not self.total:
            return self.phase[:LINE_COLUMNS]
        parts = [f"step {self.step} of {self.total}"]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.3f}")
        if self.held_out is not None and self.first is not None:
            parts.append(f"held out {self.held_out:.3f} (first {self.first:.3f})")
        if self.seconds_left is not None:
            parts.append(f"{duration(self.seconds_left)} left")
        return ", ".join(parts)[:LINE_COLUMNS]


def read_progress(home: Home) -> Progress | None:
    """Read the progress of the running training. Return None if no training is running."""
    try:
        standing = read_record(home.progress, Progress)
    except OperatorError:
        return None
    # A killed run leaves its record. So the lock must be held by the process that wrote the record.
    holder = lock_holder(home)
    return standing if standing and holder and holder.pid == standing.pid else None


class LiveProgress:
    """Writes progress to `progress.json` and to a console.

    A terminal shows one line that is replaced. Other output gets a new line every 30 seconds. The caller
    holds the writers' lock.
    """

    def __init__(self, home: Home, console: Console | None = None) -> None:
        self._home = home
        self._console = console
        self._standing = Progress(pid=os.getpid())
        self._began: tuple[float, int] | None = None
        self._written_s = self._printed_s = -float("inf")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clear()
        self._home.progress.unlink(missing_ok=True)

    def phase(self, name: str) -> None:
        """Print the name of the phase on a line that stays."""
        self._standing, self._began = Progress(pid=os.getpid(), phase=name), None
        if self._console is not None:
            self._clear()
            self._console.print(name, markup=False, highlight=False, soft_wrap=True)
        self._write()

    def step(self, done: int, total: int, loss: float) -> None:
        """Count a step. The time left is estimated from the steps and evaluations so far."""
        now, before = time.monotonic(), self._standing
        # A lower number of steps means that another descent has begun.
        if self._began is None or done <= before.step:
            self._began = (now, done)
        since, first = self._began
        smoothed = loss if before.loss is None else 0.9 * before.loss + 0.1 * loss
        left = (now - since) / (done - first) * (total - done) if done > first else None
        self._standing = replace(before, step=done, total=total, seconds_left=left)
        self._standing = replace(self._standing, loss=smoothed if math.isfinite(smoothed) else None)
        if now - self._written_s >= WRITE_EVERY_S or done == total:
            self._write()
        self._print(now)

    def evaluated(self, step: int, loss: float, first_loss: float) -> None:  # noqa: ARG002 - as the interface
        """Keep the held-out loss and the first loss for the next line."""
        self._standing = replace(self._standing, held_out=loss, first=first_loss)

    def _write(self) -> None:
        self._written_s = time.monotonic()
        try:
            write_record(self._home.progress, self._standing)
        except OperatorError:
            return  # a full disk must not end a run because of its progress

    def _print(self, now: float) -> None:
        if self._console is None:
            return
        line = self._standing.line()
        if self._console.is_terminal:
            # Erase the line, and write one that is shorter than the terminal, so that it is not wrapped.
            self._console.file.write("\r\x1b[K" + line[: max(1, self._console.width - 1)])
            self._console.file.flush()
        elif now - self._printed_s >= PRINT_EVERY_S:
            self._printed_s = now
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _clear(self) -> None:
        if self._console is not None and self._console.is_terminal:
            self._console.file.write("\r\x1b[K")
            self._console.file.flush()


def duration(seconds: float) -> str:
    """Describe a length of time in its largest unit.

    Example:
        >>> duration(0.318), duration(70), duration(600)
        ('0.32 s', '70 s', '10 min')
    """
    whole = round(seconds)
    if seconds < 9.5:
        return f"{seconds:.2g} s"
    if whole < 90:
        return f"{whole} s"
    return f"{round(whole / 60)} min" if whole < 5400 else f"{whole / 3600:.1f} h"
