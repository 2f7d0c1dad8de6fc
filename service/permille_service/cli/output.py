"""Output of commands: tables and progress bars for people, and JSON for programs.

With `--json`, a command prints exactly one JSON document on stdout.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from permille.exits import CommandError, Exit
from permille.plain_console import PlainConsole
from permille.time_left import LINE_EVERY_S, TimeLeft, left, progress_line
from permille_service.cli.tables import fields_of, flat, records_in, table_of

if TYPE_CHECKING:
    from permille_service.cli.client import Client

WIDE = 240


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Output of a command's answer."""

    as_json: bool
    console: Console
    errors: Console

    def show(self, answer: Any, columns: Sequence[str] = ()) -> None:
        """Print an answer: a list as a table of `columns`, an object as a table of its fields."""
        if self.as_json:
            print_json(answer)
        elif isinstance(answer, list):
            self.console.print(table_of(answer, columns) if answer else "none yet")
        else:
            self.console.print(fields_of(answer))
            for name, rows in records_in(answer).items():
                self.console.print(f"\n[bold]{name}[/bold]")
                lines = [flat(row) for row in rows]
                # Leave out the media type of a package's layer, because the layer's role implies it.
                columns = [column for column in lines[0] if column != "media_type"]
                self.console.print(table_of(lines, columns))

    def say(self, text: str) -> None:
        """Print a line for people. With `--json`, print nothing."""
        if not self.as_json:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def say_next(self, command: str) -> None:
        """Print the command that usually comes next."""
        self.say(f"next: {command}")


def make_output(*, as_json: bool) -> Output:
    """Make an output with tables on stdout and errors on stderr."""
    console = PlainConsole()
    if not console.is_terminal:
        console = PlainConsole(width=WIDE)  # a pipe has no width, and full ids fit into `WIDE`
    return Output(as_json=as_json, console=console, errors=PlainConsole(stderr=True))


def print_json(answer: Any) -> None:
    """Print one JSON document on stdout, in ASCII, because some other characters control terminals."""
    sys.stdout.write(json.dumps(answer, indent=2) + "\n")


def watch(client: "Client", output: Output, job_id: str) -> dict[str, Any]:
    """Follow a job to its end and return it. A terminal shows a bar, and a pipe gets a line twice a minute.

    Raises:
        CommandError: the job did not succeed, or the user pressed Ctrl-C. After Ctrl-C, the job continues.
    """
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        console=output.errors,
        transient=True,
        disable=output.as_json or not output.errors.is_terminal,
    )
    follower = Follower(output, time.monotonic)
    try:
        with bar:
            task = bar.add_task("queued", total=1.0, left="")
            for event in client.events(job_id):
                follower.follow(event, bar, task)
    except KeyboardInterrupt:
        raise CommandError(
            f"This command no longer waits, but job {job_id} goes on. Follow it with "
            f"`permille jobs watch {job_id}`, or stop it with `permille jobs cancel {job_id}`.",
            Exit.INTERRUPTED,
        ) from None
    job: dict[str, Any] = client.get(f"/v1/jobs/{job_id}")
    if job["state"] != "succeeded":
        error = job["error"] or {}
        message = f"job {job_id} {job['state']}: {error.get('message', 'no error')}"
        if error.get("retryable"):
            # A part is retried with its job.
            again = f"permille jobs retry {job['parent_id'] or job_id}"
            message = f"{message.rstrip('.')}. To try again, keeping what is done: `{again}`."
        raise CommandError(message, Exit.FAILED, {"job": job})
    return job


class Follower:
    """Display of a job's progress: a bar in a terminal, and lines in a pipe.

    Example of a line:
        mask: fisher 9/32: 29 % done, 3 min left
    """

    def __init__(self, output: Output, clock: Callable[[], float]) -> None:
        self._console, self._clock = output.errors, clock
        self._has_lines = not (output.as_json or output.errors.is_terminal)
        self._left = TimeLeft()
        self._due_s = 0.0

    def follow(self, event: dict[str, Any], bar: Progress, task: Any) -> None:
        """Show an event. In a pipe, print a line only if the last line is half a minute old."""
        data = event["data"]
        if event["kind"] == "state":
            bar.update(task, description=str(data.get("state")))
        if event["kind"] != "progress":
            return
        at, done, what = self._clock(), float(data.get("progress") or 0.0), data.get("message") or "running"
        left_s = self._left.seen(at, done)  # for builds, which do not report the time that is left
        left_s = left_s if data.get("eta_s") is None else data["eta_s"]
        bar.update(task, completed=done, description=what, left=left(left_s))
        if self._has_lines and at >= self._due_s:
            self._due_s = at + LINE_EVERY_S
            self._console.print(progress_line(what, done, left_s), markup=False, highlight=False)
