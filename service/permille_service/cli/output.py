"""What commands print: tables and progress for people, JSON for programs (`--json`: one document on
stdout)."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from permille_service.cli.client import Client
from permille_service.cli.exits import CommandError, Exit

WIDE = 240


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Where a command's answer goes."""

    as_json: bool
    console: Console
    errors: Console

    def show(self, answer: Any, columns: Sequence[str] = ()) -> None:
        """Print one answer: a list as a table of `columns`, an object as its fields."""
        if self.as_json:
            print_json(answer)
        elif isinstance(answer, list):
            self.console.print(table_of(answer, columns))
        else:
            self.console.print(fields_of(answer))

    def say(self, text: str) -> None:
        """Print a line for people; programs do not see it."""
        if not self.as_json:
            self.console.print(text, highlight=False)


def make_output(*, as_json: bool) -> Output:
    """Tables on stdout, errors on stderr."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDE)  # a pipe has no edge: ids must not be cut
    return Output(as_json=as_json, console=console, errors=Console(stderr=True))


def print_json(answer: Any) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(json.dumps(answer, ensure_ascii=False, indent=2) + "\n")


def table_of(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> Table:
    """A table; a column `source.path` looks inside."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.rpartition(".")[2], overflow="fold")
    for row in rows:
        table.add_row(*(escape(_cell(_inside(row, column))) for column in columns))
    return table


def fields_of(answer: dict[str, Any]) -> Table:
    """An object as two columns."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in answer.items():
        table.add_row(f"[bold]{escape(name)}[/bold]", escape(_cell(value)))
    return table


def watch(client: Client, output: Output, job_id: str) -> dict[str, Any]:
    """Follow a job to its end with a progress bar; print it. Raises CommandError when it did not succeed."""
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
    with bar:
        task = bar.add_task("queued", total=1.0, left="")
        for event in client.events(job_id):
            _advance(bar, task, event)
    job: dict[str, Any] = client.get(f"/v1/jobs/{job_id}")
    output.show(job)
    if job["state"] != "succeeded":
        error = job["error"] or {}
        raise CommandError(f"job {job_id} {job['state']}: {error.get('message', 'no error')}", Exit.FAILED)
    return job


def _advance(bar: Progress, task: Any, event: dict[str, Any]) -> None:
    data = event["data"]
    if event["kind"] == "progress":
        left = data.get("eta_s")
        bar.update(
            task,
            completed=data.get("progress", 0.0),
            description=data.get("message") or "running",
            left="" if left is None else f"{left:.0f} s left",
        )
    elif event["kind"] == "state":
        bar.update(task, description=str(data.get("state")))


def _inside(row: dict[str, Any], column: str) -> Any:
    value: Any = row
    for part in column.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False)
    return str(value)
