"""Commands of evaluations: the sweep of `permille evaluate` as a job of the service, and what it found."""

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from permille.files import write_atomic
from permille_service.cli.collections import add_show
from permille_service.cli.exits import CommandError, Exit
from permille_service.cli.session import AsJson, Key, Rows, Wait, connect
from permille_service.cli.work import follow

evaluations = typer.Typer(no_args_is_help=True, help="Methods compared on tasks, by the service's workers.")

COLUMNS = (
    *("id", "options.bases", "options.methods", "options.seeds"),
    *("cells", "failed_cells", "bad_rows", "created_at"),
)
_RENAMED = {"models": "model_ids", "corpus": "corpus_id"}

Sweep = Annotated[
    Path,
    typer.Argument(help="TOML as `permille evaluate` takes it, with ids of the service.", dir_okay=False),
]
Save = Annotated[Path | None, typer.Option("--output", help="Save to this file. Default: printed.")]


@evaluations.command("create")
def create_evaluation(
    context: typer.Context, sweep: Sweep, wait: Wait = True, key: Key = None, as_json: AsJson = False
) -> None:
    """Compare methods on tasks. In the file, `models` and `corpus` are ids of the service, and task files are
    below its corpus root. A worker that dies is replaced, and what was done stays done.

    Example:

      permille evaluations create sweep.toml
    """
    body = request_of(sweep)
    with connect(context, as_json=as_json) as session:
        done = follow(session, session.client.post("/v1/evaluations", body, key=key), wait=wait)
        lacking = session.client.get(done["result"])["failed_cells"] if done else 0
        if lacking:
            session.output.say(f"warning: {lacking} cells could not be measured; the report says why")


@evaluations.command("list")
def list_evaluations(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(help="Only those that compare this model.")] = None,
    limit: Rows = 100,
    as_json: AsJson = False,
) -> None:
    """List finished evaluations."""
    with connect(context, as_json=as_json) as session:
        session.output.show(session.client.pages("/v1/evaluations", limit=limit, model_id=model), COLUMNS)


add_show(evaluations, "/v1/evaluations", "evaluation_id", "Show one evaluation.")


@evaluations.command("results")
def save_results(context: typer.Context, evaluation_id: str, output: Save = None) -> None:
    """Fetch all that was measured, as JSON lines: the same file that `permille evaluate` leaves."""
    _fetch(context, f"/v1/evaluations/{evaluation_id}/results", output)


@evaluations.command("report")
def show_report(context: typer.Context, evaluation_id: str, output: Save = None) -> None:
    """Fetch the tables, as Markdown."""
    _fetch(context, f"/v1/evaluations/{evaluation_id}/report", output)


def request_of(path: Path) -> dict[str, Any]:
    """The request that a sweep file makes. Raises CommandError for one that is no TOML."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
        json.dumps(found, allow_nan=False)  # TOML has dates and infinities, JSON has not
    except (OSError, ValueError, TypeError) as exc:
        raise CommandError(f"expected a sweep as TOML in {path}, got {exc}", Exit.USAGE) from exc
    return {_RENAMED.get(name, name): value for name, value in found.items()}


def _fetch(context: typer.Context, path: str, output: Path | None) -> None:
    with connect(context, as_json=False) as session:
        content = session.client.get_bytes(path)
    if output is None:
        typer.echo(content.decode(), nl=False)
    else:
        write_atomic(output, content)
