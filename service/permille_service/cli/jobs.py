"""Commands of jobs: what runs, how far it is, and what to do about it."""

from typing import Annotated, Any

import typer

from permille.schemas.jobs import JobKind, JobState
from permille_service.cli.commands import Rows, add_action, add_show, command
from permille_service.cli.output import watch
from permille_service.cli.session import Session

jobs = typer.Typer(no_args_is_help=True, help="Long work: state, progress, events, cancel, retry.")

_COLUMNS = ("id", "kind", "state", "progress.fraction", "progress.message", "created_at")


@command(jobs, "list")
def list_jobs(
    session: Session,
    state: Annotated[JobState | None, typer.Option(help="Only those in this state.")] = None,
    kind: Annotated[JobKind | None, typer.Option(help="Only those of this kind.")] = None,
    limit: Rows = 50,
) -> None:
    """List jobs, newest first."""
    session.output.show(session.client.pages("/v1/jobs", limit=limit, state=state, kind=kind), _COLUMNS)


add_show(jobs, "jobs")


@command(jobs, "watch")
def watch_job(session: Session, job: str) -> Any:
    """Follow a job to its end with a progress bar. Exit code 1 when it does not succeed."""
    return watch(session.client, session.output, session.id_of("jobs", job))


@command(jobs, "events")
def list_job_events(session: Session, job: str) -> None:
    """List a job's events."""
    path, found = f"/v1/jobs/{session.id_of('jobs', job)}/events", list[Any]()
    while page := session.client.get(path, after=found[-1]["seq"] if found else 0, limit=200):
        found += page
    session.output.show(found, ("seq", "created_at", "kind", "data"))


add_action(jobs, "jobs", "cancel", "Ask a job to stop.")
add_action(jobs, "jobs", "retry", "Queue a job again that failed, died or was cancelled.")
