"""Commands of jobs and of their results. They are made from the descriptions in `permille.schemas.kinds`."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from permille.choices import MaskMethod
from permille.exits import CommandError, Exit
from permille.schemas.jobs import ENDED, JobKind, JobState
from permille.schemas.kinds import WORK
from permille.schemas.masks import FisherMask
from permille.schemas.work import View, WorkKind
from permille_service.cli.commands import (
    PACKAGES,
    Key,
    NoWait,
    Rows,
    add_action,
    add_deletion,
    add_list,
    add_show,
    command,
)
from permille_service.cli.output import watch
from permille_service.cli.references import singular
from permille_service.cli.session import Session
from permille_service.cli.tables import figures_of, short
from permille_service.forms import form_of

jobs = typer.Typer(no_args_is_help=True, help="Follow, cancel and retry jobs.")


Again = Annotated[
    bool, typer.Option("--again", help="Do the work again, even if an equal request has already succeeded.")
]


_JOBS = ("id", "kind", "state", "progress.fraction", "progress.message", "created_at")
JobId = Annotated[str, typer.Argument(help="Id of the job, or its first characters.")]
FIGURES = ("name", "needed", "available", "enough", "explanation")


def add_work(app: typer.Typer) -> None:
    """Add a group of commands for each kind of job that a request starts, and the command `preflight`."""
    for work in WORK.values():
        group = typer.Typer(no_args_is_help=True, help=work.about)
        _add_create(group, work)
        add_list(group, work.collection, work.view.columns)
        add_show(group, work.collection)
        add_deletion(group, work.collection, "remove", f"Remove one of the {work.collection}.")
        if work.shows is not None:
            _add_report(group, work.collection, work.shows)
        app.add_typer(group, name=work.collection, rich_help_panel=PACKAGES)
    _add_preflight(app, WORK[JobKind.BUILD])


def _add_create(group: typer.Typer, work: WorkKind) -> None:
    text = f"{work.starts}\n\nExample:\n\n  permille {work.collection} create {work.view.example}"

    @command(group, "create", text, form=form_of(work.request))
    def create(
        session: Session, body: dict[str, Any], no_wait: NoWait = False, again: Again = False, key: Key = None
    ) -> None:
        path = f"/v1/{work.collection}{'?again=true' if again else ''}"
        _tell_default(session, body.get("mask", body))
        job = session.client.post(path, body, key=key)
        if job["state"] == JobState.SUCCEEDED:
            session.output.say("An equal request has already succeeded. Use --again to repeat the work.")
        if no_wait:
            session.output.show(job)
            session.output.say_next(f"permille jobs watch {job['id']}")
        else:
            _show_made(session, watch(session.client, session.output, job["id"]), work.view)


def _tell_default(session: Session, mask: Mapping[str, Any]) -> None:
    """Tell how much text a mask reads if the user did not choose it. The time of a mask grows with it."""
    if mask.get("method") == MaskMethod.FISHER and "sequences" not in mask:
        number, length = (FisherMask.model_fields[name].default for name in ("sequences", "length"))
        session.output.say(
            f"Gradients are measured on {number} sequences of up to {mask.get('length', length)} tokens. "
            "Fewer take less time: see --sequences."
        )


def _add_preflight(app: typer.Typer, work: WorkKind) -> None:
    text = (
        "Check whether the service's machine has the resources for a build. If not, the exit code is 3.\n\n"
        f"Example:\n\n  permille preflight {work.view.example}"
    )

    @command(app, "preflight", text, form=form_of(work.request), panel=PACKAGES)
    def preflight(session: Session, body: dict[str, Any]) -> None:
        answer = session.client.post("/v1/preflights", {"kind": work.kind, "request": body})
        if session.output.as_json:
            session.output.show(answer)
        else:
            session.output.show(figures_of(answer["figures"]), FIGURES)
        # The size of a hub model is unknown until a job has downloaded it.
        if answer["unknown"]:
            session.output.say(f"The needs are not known yet: {answer['unknown']}")
        if not answer["accepted"]:
            raise CommandError(
                "The service's machine lacks resources for the build. Request a smaller build, or use a "
                "larger machine.",
                Exit.REFUSED,
            )


def _add_report(group: typer.Typer, collection: str, shows: str) -> None:
    @command(group, "report", shows)
    def report(
        session: Session,
        of: Annotated[str, typer.Argument(metavar=singular(collection).upper())],
    ) -> None:
        found = session.client.get(f"/v1/{collection}/{session.id_of(collection, of)}/report")
        if not session.output.as_json:  # leave out the curve, which the console draws
            rows = [{name: row[name] for name in row if name != "shape"} for row in found["tensors"]]
            found = {name: found[name] for name in found if name != "curve"} | {"tensors": rows}
        session.output.show(found)


def _show_made(session: Session, job: Mapping[str, Any], view: View) -> None:
    """Show a finished job: its record as JSON, or else its result and the command that comes next."""
    if session.output.as_json:
        session.output.show(job)
        return
    session.output.show({"job": job["id"], "made": job["result_id"]})
    session.output.say_next(view.then.format(short(job["result_id"])))


@command(jobs, "list")
def list_jobs(
    session: Session,
    state: Annotated[JobState | None, typer.Option(help="List only jobs in this state.")] = None,
    kind: Annotated[JobKind | None, typer.Option(help="List only jobs of this kind.")] = None,
    limit: Rows = 50,
) -> None:
    """List jobs, newest first."""
    session.output.show(session.client.pages("/v1/jobs", limit=limit, state=state, kind=kind), _JOBS)


add_show(jobs, "jobs")


@command(jobs, "watch")
def watch_job(session: Session, job: JobId) -> None:
    """Follow a job to its end. If the job does not succeed, the exit code is 1."""
    ended = watch(session.client, session.output, session.id_of("jobs", job))
    work = WORK.get(ended["kind"])
    if work is None:
        session.output.show(ended)
    else:
        _show_made(session, ended, work.view)


@command(jobs, "events")
def list_job_events(session: Session, job: JobId) -> None:
    """List the events of a job."""
    path, found = f"/v1/jobs/{session.id_of('jobs', job)}/events", list[Any]()
    while page := session.client.get(path, after=found[-1]["seq"] if found else 0, limit=200):
        found += page
    session.output.show(found, ("seq", "created_at", "kind", "data"))


@command(jobs, "cancel")
def cancel_job(session: Session, job: JobId) -> None:
    """Cancel a job. A running job stops at its next step, usually within seconds."""
    found = session.client.post(f"/v1/jobs/{session.id_of('jobs', job)}/cancel")
    session.output.show(found)
    if found["state"] not in ENDED:
        session.output.say("The job was asked to stop. It stops at its next step, usually within seconds.")
        session.output.say_next(f"permille jobs show {found['id']}")
    elif found["state"] != JobState.CANCELLED:
        session.output.say(f"The job had ended before ({found['state']}), so it was not cancelled.")


add_action(jobs, "jobs", "retry", "Queue a failed, dead or cancelled job again.")
