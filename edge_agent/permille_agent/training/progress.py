"""What a run tells while it works: an interface, one that is silent, and a bar for a terminal."""

import time
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class RunProgress(Protocol):
    """Told by the trainer; it never influences a run."""

    def phase(self, name: str) -> None:
        """A new phase begins."""
        ...

    def step(self, done: int, total: int, loss: float) -> None:
        """A training step is durable: `done` of `total`, with the batch's loss."""
        ...

    def evaluated(self, step: int, loss: float, base_loss: float) -> None:
        """The select split was evaluated before step `step`."""
        ...


class SilentProgress:
    """Says nothing."""

    def phase(self, name: str) -> None:
        """Nothing."""

    def step(self, done: int, total: int, loss: float) -> None:
        """Nothing."""

    def evaluated(self, step: int, loss: float, base_loss: float) -> None:
        """Nothing."""


SILENT = SilentProgress()


class BarProgress:
    """A bar with the batch's smoothed loss, the last held-out loss, steps a second and the time left."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("held out {task.fields[held_out]}"),
            TextColumn("{task.fields[rate]} steps/s"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task: TaskID | None = None
        self._loss: float | None = None
        self._began: tuple[float, int] | None = None

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def phase(self, name: str) -> None:
        """Show what happens now, above the bar."""
        self._bar.console.print(f"[bold]{name}[/bold]")

    def step(self, done: int, total: int, loss: float) -> None:
        """Move the bar."""
        now = time.monotonic()
        if self._task is None or self._began is None:
            self._task = self._bar.add_task("training", total=total, loss="-", held_out="-", rate="-")
            self._began = (now, done)
        self._loss = loss if self._loss is None else 0.95 * self._loss + 0.05 * loss
        since, first = self._began
        rate = f"{(done - first) / (now - since):.2f}" if now > since and done > first else "-"
        self._bar.update(self._task, completed=done, total=total, loss=f"{self._loss:.3f}", rate=rate)

    def evaluated(self, step: int, loss: float, base_loss: float) -> None:
        """Show the held-out loss beside the base's."""
        if self._task is not None:
            self._bar.update(self._task, held_out=f"{loss:.3f} at {step} (base {base_loss:.3f})")
