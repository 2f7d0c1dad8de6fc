"""Output of commands: tables and progress for people, JSON for programs (`--json`: one document on
stdout)."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from permille.plain_console import PlainConsole
from permille_service.cli.exits import CommandError, Exit
from permille_service.cli.tables import fields_of, flat, records_in, span, table_of

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
        """Print one answer: a list as a table of `columns`, an object as its fields."""
        if self.as_json:
            print_json(answer)
        elif isinstance(answer, list):
            self.console.print(table_of(answer, columns) if answer else "none yet")
        else:
            self.console.print(fields_of(answer))
            for name, rows in records_in(answer).items():
                self.console.print(f"\n[bold]{name}[/bold]")
                lines = [flat(row) for row in rows]
                columns = [column for column in lines[0] if column != "media_type"]  # the role says it
                self.console.print(table_of(lines, columns))

    def say(self, text: str) -> None:
        """Print a line for people; programs do not see it."""
        if not self.as_json:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def say_next(self, command: str) -> None:
        """Print the command that usually comes next."""
        self.say(f"next: {command}")


def make_output(*, as_json: bool) -> Output:
    """Tables on stdout, errors on stderr."""
    console = PlainConsole()
    if not console.is_terminal:
        console = PlainConsole(width=WIDE)  # a pipe has no edge: ids must not be cut
    return Output(as_json=as_json, console=console, errors=PlainConsole(stderr=True))


def print_json(answer: Any) -> None:
    """Print one JSON document on stdout, in ASCII: a terminal obeys some of the other characters."""
    sys.stdout.write(json.dumps(answer, indent=2) + "\n")


def watch(client: "Client", output: Output, job_id: str) -> dict[str, Any]:
    """Follow a job to its end with a progress bar; the ended job.

    Raises:
        CommandError: it did not succeed, or Ctrl-C ended the waiting; the job runs on then.
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
    try:
        with bar:
            task = bar.add_task("queued", total=1.0, left="")
            for event in client.events(job_id):
                _advance(bar, task, event)
    except KeyboardInterrupt:
        raise CommandError(
            f"Stopped waiting; job {job_id} goes on. Follow it with `permille jobs watch {job_id}`, or "
            f"stop it with `permille jobs cancel {job_id}`.",
            Exit.INTERRUPTED,
        ) from None
    job: dict[str, Any] = client.get(f"/v1/jobs/{job_id}")
    if job["state"] != "succeeded":
        error = job["error"] or {}
        message = f"job {job_id} {job['state']}: {error.get('message', 'no error')}"
        raise CommandError(message, Exit.FAILED, {"job": job})
    return job


def _advance(bar: Progress, task: Any, event: dict[str, Any]) -> None:
    data = event["data"]
    if event["kind"] == "progress":
        left = data.get("eta_s")
        bar.update(
            task,
            completed=data.get("progress", 0.0),
            description=data.get("message") or "running",
            left="" if left is None else f"{span(left)} left",
        )
    elif event["kind"] == "state":
        bar.update(task, description=str(data.get("state")))
