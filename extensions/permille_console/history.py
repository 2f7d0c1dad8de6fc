"""Pages of the history: jobs and runs with filters, comparisons of two objects, and the audit log.

Filters are part of the URL, so a filtered list can be bookmarked and shared.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Depends, Query, Response
from pydantic import BaseModel
from sqlalchemy import select
from sqlalchemy.orm import Session

from permille.package.blobs import BlobFolder
from permille.schemas.fields import DIGEST_PATTERN, ULID_PATTERN
from permille.schemas.jobs import ENDED, Job, JobKind, JobState
from permille.schemas.runs import Outcome
from permille.store import artifacts, audit, rows, runs, tables
from permille.store.fleet.versions import results
from permille.store.jobs import queue
from permille.time_left import span
from permille_console import work
from permille_console.masks import MaskEvidence
from permille_console.names import choices_of, known_names, lines_of, names_of, page_at
from permille_console.rendering import (
    AdminPage,
    Page,
    PageRoute,
    ViewerPage,
    moment,
    number,
    percent,
    short,
    size,
)
from permille_service.jobs import records
from permille_service.parameters import MomentPaging, NumberPaging, Paging, RunId, page_of
from permille_service.runs.routes import present

router = APIRouter(prefix="/ui", include_in_schema=False, route_class=PageRoute)
Nothing = Literal[""]
"""The value that a browser sends for an empty field of a filter."""
_JOB: Final = rf"^job_{ULID_PATTERN}$"
JobToCompare = Annotated[str, Query(pattern=_JOB)]
_RUN: Final = r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"
RunToCompare = Annotated[str, Query(pattern=_RUN)]
PackageToCompare = Annotated[str, Query(pattern=DIGEST_PATTERN)]
Text = Annotated[str, Query(max_length=200)]
Facts = dict[str, str]
_ID: Final = re.compile(rf"[a-z]+_{ULID_PATTERN}|sha256:[0-9a-f]{{64}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLine:
    """A line in the list of jobs.

    Attributes:
        of: the name of the job's model.
        released: the releases that contain the job's result.
    """

    job: Job
    of: str | None
    released: str | None


class Cost(BaseModel):
    """The part of a quantization's report that says how much accuracy the quantization costs."""

    relative_error: float
    perplexity: work.Perplexity | None = None


def _job_filter(
    kind: JobKind | Nothing = "",
    state: JobState | Nothing = "",
    model_id: Text = "",
    release: Text = "",
    alias: Text = "",
) -> queue.JobFilter:
    return queue.JobFilter(
        kind=kind or None,
        state=state or None,
        model_id=model_id or None,
        release=release or None,
        alias=alias or None,
    )


def _run_filter(
    device_id: Text = "",
    release: Text = "",
    version: Annotated[str, Query(pattern=r"^[0-9]{0,15}$")] = "",
    outcome: Outcome | Nothing = "",
) -> runs.RunFilter:
    return runs.RunFilter(
        device_id=device_id or None,
        release=release or None,
        version=int(version) if version else None,
        outcome=outcome or None,
    )


def _audit_filter(action: Text = "", token_id: Text = "", subject: Text = "") -> audit.AuditFilter:
    return audit.AuditFilter(action=action or None, token_id=token_id or None, subject=subject or None)


@router.get("/jobs")
def show_jobs(
    page: ViewerPage,
    window: Paging,
    wanted: Annotated[queue.JobFilter, Depends(_job_filter)],
    against: Annotated[str | None, Query(pattern=_JOB)] = None,
) -> Response:
    """Show jobs, newest first.

    With `against`, each job has a link that compares it with the job `against`.
    """
    with page.service.database.read() as session:
        found = queue.list_jobs(session, tenant_id=page.tenant_id, wanted=wanted, window=window)
        lines = _job_lines(session, page.tenant_id, found.items)
        models = choices_of(session, page.tenant_id, "models")
        releases, aliases = known_names(session, page.tenant_id)
    fields = {
        "kind": ("Kind", _same(JobKind)),
        "state": ("State", _same(JobState)),
        "model_id": ("Model", models),
        "release": ("Released as", _same(releases)),
        "alias": ("Alias", _same(aliases)),
    }
    return page.render(
        "jobs",
        lines=lines,
        next_cursor=found.next_cursor,
        fields=fields,
        live=any(line.job.state not in ENDED for line in lines),
        against=against,
    )


@router.get("/runs")
def show_runs(
    page: ViewerPage,
    window: MomentPaging,
    wanted: Annotated[runs.RunFilter, Depends(_run_filter)],
    against: Annotated[str | None, Query(pattern=_RUN)] = None,
) -> Response:
    """Show the runs of devices. Runs that ended last come first."""
    with page.service.database.read() as session:
        found = page_of(
            runs.list_runs(session, tenant_id=page.tenant_id, wanted=wanted, window=window), present
        )
        names = names_of(session, page.tenant_id, [run.device_id for run in found.items])
        releases, _ = known_names(session, page.tenant_id)
    fields = {
        "release": ("Release", _same(releases)),
        "version": ("Version", None),
        "outcome": ("Outcome", [(outcome.value, outcome.replace("_", " ")) for outcome in Outcome]),
        "device_id": ("Device", None),
    }
    return page.render("runs", runs=found, names=names, fields=fields, against=against)


@router.get("/runs/{run_id}")
def show_run(run_id: RunId, page: ViewerPage) -> Response:
    """Show a device's report on one run."""
    with page.service.database.read() as session:
        facts = _facts_of_run(session, page.tenant_id, run_id)
    return page.render("run", key=run_id, facts=facts)


@router.get("/compare/runs")
def compare_runs(page: ViewerPage, a: RunToCompare, b: RunToCompare) -> Response:
    """Show two runs side by side."""
    with page.service.database.read() as session:
        one, other = (_facts_of_run(session, page.tenant_id, key) for key in (a, b))
    return _side_by_side(page, "runs", (a, b), (one, other))


@router.get("/compare/jobs")
def compare_jobs(page: ViewerPage, a: JobToCompare, b: JobToCompare) -> Response:
    """Show two jobs side by side, with their requests and results."""
    with page.service.database.read() as session:
        one, other = (_facts_of_job(session, page.service.blobs, page.tenant_id, key) for key in (a, b))
    return _side_by_side(page, "jobs", (a, b), (one, other))


@router.get("/compare/packages")
def compare_packages(page: ViewerPage, a: PackageToCompare, b: PackageToCompare) -> Response:
    """Show two packages side by side, with their inputs, their cost, and the reports of devices."""
    with page.service.database.read() as session:
        one, other = (_facts_of_package(session, page.service.blobs, page.tenant_id, key) for key in (a, b))
    return _side_by_side(page, "packages", (a, b), (one, other))


@router.get("/audit")
def show_audit(
    page: AdminPage, window: NumberPaging, wanted: Annotated[audit.AuditFilter, Depends(_audit_filter)]
) -> Response:
    """List the changes of the audit log, newest first."""
    with page.service.database.read() as session:
        found = audit.list_entries(session, tenant_id=page.tenant_id, wanted=wanted, window=window)
        lines = [(one, page_at(one.subject), list(lines_of(one.request or {}))) for one in found.items]
        ids = [text for one in found.items for text in (one.token_id, *_ID.findall(one.subject))]
        values = [value for _, _, request in lines for _, value in request]
        names = names_of(session, page.tenant_id, [*ids, *values])
        paths = {
            one.seq: _ID.sub(lambda at: names.get(at[0]) or short(at[0]), one.subject) for one in found.items
        }
        tokens = rows.list_all(session, tables.OperatorToken, tenant_id=page.tenant_id).items
        actions = audit.actions_of(session, tenant_id=page.tenant_id)
    fields = {
        "action": ("Action", _same(actions)),
        "token_id": ("Token", [(token.id, token.name) for token in tokens]),
        "subject": ("Path has", None),
    }
    return page.render(
        "audit", lines=lines, names=names, paths=paths, fields=fields, next_cursor=found.next_cursor
    )


def _same(values: Any) -> list[tuple[str, str]]:
    return [(value, value) for value in values]


def _job_lines(session: Session, tenant_id: str, found: tuple[tables.Job, ...]) -> list[JobLine]:
    ids = [row.id for row in found]
    made = select(tables.Artifact.job_id, tables.Artifact.model_id).where(tables.Artifact.job_id.in_(ids))
    models: dict[str, object] = {row.job_id: row.model_id for row in session.execute(made)}
    models |= {row.id: row.payload["model_id"] for row in found if "model_id" in row.payload}
    names = names_of(session, tenant_id, [*models.values(), *(row.result_id for row in found)])

    def line(row: tables.Job) -> JobLine:
        return JobLine(
            job=records.present(session, row),
            of=names.get(str(models.get(row.id))),
            released=names.get(str(row.result_id)),
        )

    return rows.records_of(found, line)


def _side_by_side(page: Page, what: str, keys: tuple[str, str], facts: tuple[Facts, Facts]) -> Response:
    one, other = facts
    lines = [(name, one.get(name, "–"), other.get(name, "–")) for name in {**one, **other}]
    return page.render("compare", what=what, keys=keys, lines=lines)


def _facts_of_job(session: Session, blobs: BlobFolder, tenant_id: str, job_id: str) -> Facts:
    row = rows.get(session, tables.Job, tenant_id=tenant_id, row_id=job_id)
    job = records.present(session, row)
    facts = {"kind": str(job.kind), "state": str(job.state), "created": moment(job.created_at)}
    if job.started_at and job.finished_at:
        facts["took"] = span((job.finished_at - job.started_at).total_seconds())
    if job.error is not None:
        facts["error"] = job.error.message
    facts |= _request(session, tenant_id, row.payload)
    made = select(tables.Artifact).where(tables.Artifact.job_id.in_([job_id, *job.children]))
    for artifact in session.scalars(made.order_by(tables.Artifact.id)):
        facts |= _evidence(blobs, artifact)
    return facts


def _facts_of_run(session: Session, tenant_id: str, run_id: str) -> Facts:
    run = present(runs.get(session, tenant_id=tenant_id, run_id=run_id))
    device = names_of(session, tenant_id, [run.device_id]).get(run.device_id, run.device_id)
    told = {"device": device, "reported": moment(run.created_at), "ended": moment(run.ended_at)}
    lines = lines_of(run.metrics.model_dump(mode="json", exclude={"ended_at"}))
    return told | {
        name: number(value) if isinstance(value, int | float) else short(str(value)) for name, value in lines
    }


def _facts_of_package(session: Session, blobs: BlobFolder, tenant_id: str, digest: str) -> Facts:
    row = artifacts.get(session, tenant_id=tenant_id, kind=JobKind.PACKAGE, key=digest)
    names = names_of(session, tenant_id, (digest, row.model_id))
    facts = {"released as": names.get(digest, "–"), "model": names.get(row.model_id, "–")}
    facts |= {"made": moment(row.created_at)} | _evidence(blobs, row)
    sources = select(tables.ArtifactSource.source_id).where(tables.ArtifactSource.artifact_id == row.id)
    made_of = select(tables.Artifact).where(tables.Artifact.id.in_(sources))
    for artifact in session.scalars(made_of.order_by(tables.Artifact.kind)):
        lines = _request(session, tenant_id, artifact.request)
        facts |= {f"{artifact.kind} {name}": value for name, value in lines.items()}
        facts |= _evidence(blobs, artifact)
    return facts | dict(_on_devices(session, row))


def _on_devices(session: Session, package: tables.Artifact) -> Iterator[tuple[str, str]]:
    """Iterate over the results of a package on devices, from the reports on its newest release."""
    query = select(tables.Release).where(tables.Release.package_id == package.id)
    newest = session.scalars(query.order_by(tables.Release.id.desc()).limit(1)).all()
    for found in results(session, newest):
        yield "devices that reported", number(found.reported)
        yield "devices that adopted", percent(found.adopted_fraction)
        yield (
            "median improvement, nats per token",
            number(found.improvement.median if found.improvement else None),
        )
        yield "rise on general text, nats per token", number(found.general_rise)


def _request(session: Session, tenant_id: str, request: Mapping[str, object]) -> Facts:
    """Return the fields of a request, each with its value.

    If a value is the id of an object that has a name, the name replaces the id.
    """
    lines = list(lines_of(request))
    names = names_of(session, tenant_id, (value for _, value in lines))
    return {
        name: names.get(str(value), short(value) if isinstance(value, str) else str(value))
        for name, value in lines
    }


def _evidence(blobs: BlobFolder, made: tables.Artifact) -> Facts:
    """Return figures about the result of a job. Some of them come from the job's report."""
    facts = {f"{made.kind} size": size(made.size_bytes)}
    if made.k is not None:
        facts[f"{made.kind} trained numbers"] = number(made.k)
    if made.kind == JobKind.MASK and (mask := work.report_of(blobs, made, MaskEvidence)):
        facts["mask share of the score"] = percent(mask.coverage)
    if made.kind == JobKind.QUANTIZATION and (cost := work.report_of(blobs, made, Cost)):
        facts["quantization relative error"] = percent(cost.relative_error)
        if cost.perplexity is not None:
            facts["perplexity before"] = number(cost.perplexity.before)
            facts["perplexity after"] = number(cost.perplexity.after)
    return facts
