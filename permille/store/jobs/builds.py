"""A build: one job row whose work is its children: mask (none for an adapter), quantization, package.

No worker runs a build and none is held by one: it is moved on in the transaction that ends one of its
children, and looked at again by every sweep. Mask and quantization run side by side, the package after both.
"""

from collections.abc import Mapping, Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from permille.errors import InputError
from permille.schemas.fields import Closed
from permille.schemas.jobs import EventKind, JobKind, JobState
from permille.schemas.kinds import parse_request
from permille.schemas.packages import BuildCreate
from permille.store.database import now
from permille.store.jobs import transitions
from permille.store.tables import Job

# What share of a build's time each part takes, roughly.
_WEIGHTS = {JobKind.MASK: 0.6, JobKind.QUANTIZATION: 0.3, JobKind.PACKAGE: 0.1}


def parts_due(request: BuildCreate, results: Mapping[str, str | None]) -> list[tuple[JobKind, Closed]]:
    """Which child jobs to add now, with their requests.

    Args:
        results: kind to result id, or to None while it is unfinished, of the children there are.
    """
    due: list[tuple[JobKind, Closed]] = []
    mask = request.mask_request()
    if JobKind.MASK not in results and mask is not None:
        due.append((JobKind.MASK, mask))
    if JobKind.QUANTIZATION not in results:
        due.append((JobKind.QUANTIZATION, request.quantization_request()))
    mask_id, quantization_id = results.get(JobKind.MASK), results.get(JobKind.QUANTIZATION)
    if JobKind.PACKAGE not in results and (mask_id or mask is None) and quantization_id:
        due.append((JobKind.PACKAGE, request.package_request(mask_id, quantization_id)))
    return due


def advance(session: Session, build: Job) -> None:
    """Move a locked build on: add children that are due, or end it. Safe to call at any time."""
    if transitions.has_ended(build):
        return
    parts = transitions.children(session, build.id)
    broken = next(
        (part for part in parts if transitions.has_ended(part) and part.state != JobState.SUCCEEDED), None
    )
    if build.cancel_requested_at is not None or broken is not None:
        _stop(session, build, parts, broken)
        return
    results = {part.kind: part.result_id if part.state == JobState.SUCCEEDED else None for part in parts}
    if results.get(JobKind.PACKAGE):
        build.result_id = results[JobKind.PACKAGE]
        build.message = None
        transitions.transition(session, build, JobState.SUCCEEDED)
        return
    try:
        due = parts_due(parse_request(JobKind.BUILD, build.payload), results)
    except InputError as exc:  # another version's row: no sweep may stumble over it again
        _fail(session, build, str(exc))
        return
    if build.state == JobState.QUEUED:
        build.started_at = now(session)
        transitions.transition(session, build, JobState.RUNNING)
    for kind, request in due:
        child = transitions.insert(
            session,
            transitions.NewJob(
                tenant_id=build.tenant_id,
                kind=kind,
                payload=request.model_dump(mode="json"),
                parent_id=build.id,
                max_attempts=build.max_attempts,
            ),
        )
        transitions.tell(session, build, EventKind.MESSAGE, {"message": f"added {kind}", "job_id": child.id})
    show_progress(session, build)


def advance_parent(session: Session, job: Job) -> None:
    """Move on the build that `job` belongs to, if any (locked by `transitions.lock`)."""
    if job.parent_id is not None:
        parent = transitions.lock_one(session, job.parent_id)
        if parent is not None:
            advance(session, parent)


def show_progress(session: Session, build: Job) -> None:
    """Set a locked build's progress from its children's."""
    parts = session.scalars(select(Job).where(Job.parent_id == build.id)).all()
    whole = 1.0 if build.payload.get("mask") else 1.0 - _WEIGHTS[JobKind.MASK]
    fraction = sum(_WEIGHTS[JobKind(part.kind)] * part.progress for part in parts) / whole
    running = [part for part in parts if part.state == JobState.RUNNING]
    build.message = "; ".join(f"{part.kind}: {part.message or 'running'}" for part in running) or None
    build.updated_at = now(session)
    moved = int(100 * fraction) != int(100 * build.progress)
    build.progress = min(fraction, 1.0)
    if moved:
        told = {"progress": build.progress, "message": build.message}
        transitions.tell(session, build, EventKind.PROGRESS, told)


def _stop(session: Session, build: Job, parts: Sequence[Job], broken: Job | None) -> None:
    at = now(session)
    for part in parts:
        if part.state == JobState.QUEUED:
            part.cancel_requested_at = part.cancel_requested_at or at
            transitions.transition(session, part, JobState.CANCELLED)
        elif part.state == JobState.RUNNING:
            part.cancel_requested_at = part.cancel_requested_at or at
    if not all(transitions.has_ended(part) for part in parts):
        return
    if build.cancel_requested_at is not None or broken is None or broken.state == JobState.CANCELLED:
        transitions.transition(session, build, JobState.CANCELLED)
        return
    cause = (broken.error or {}).get("message", f"it is {broken.state}")
    _fail(session, build, f"{broken.kind} {broken.id}: {cause}")


def _fail(session: Session, build: Job, message: str) -> None:
    build.error = {"type": "BuildFailed", "message": message, "retryable": False}
    transitions.transition(session, build, JobState.FAILED, error=build.error)
