"""Jobs whose work is other jobs: builds, and jobs that an attempt has split.

No worker runs a waiting job and none is held by one: it is `running` without a worker, is moved on in the
transaction that ends one of its parts, and is looked at again by every sweep. A build waits from the start:
mask (none for an adapter) and quantization run side by side, or are there from earlier; the package runs
after both. Any other job that waits was split by its worker (`claims.split`); once all parts have succeeded
it is queued again, and its next attempt joins them.
"""

from collections.abc import Callable, Mapping, Sequence

from sqlalchemy.orm import Session

from permille.errors import InputError
from permille.schemas.fields import Closed
from permille.schemas.jobs import EventKind, JobKind, JobState
from permille.schemas.kinds import parse_request
from permille.schemas.packages import BuildCreate
from permille.store.database import now
from permille.store.jobs import transitions
from permille.store.tables import Job

# A job to add below another one: its kind and its request.
Part = tuple[JobKind, Closed]
# Finds, for a job that was just added, one that has made the same of the same before.
Find = Callable[[Session, Job], Job | None]
# What share of a build's time each part takes, roughly; and of a split job's time, where its parts begin and
# how much they take.
_WEIGHTS = {JobKind.MASK: 0.6, JobKind.QUANTIZATION: 0.3, JobKind.PACKAGE: 0.1}
_SPLIT_AT, _SPLIT_SHARE = 0.05, 0.8


def parts_due(request: BuildCreate, results: Mapping[str, str | None]) -> list[Part]:
    """Return the child jobs of a build to add now, with their requests.

    Args:
        results: kind to result id, or to None while it is unfinished, of the children there are.
    """
    due: list[Part] = []
    mask = request.mask_request()
    if JobKind.MASK not in results and mask is not None:
        due.append((JobKind.MASK, mask))
    mask_id, quantization_id = results.get(JobKind.MASK), results.get(JobKind.QUANTIZATION)
    if JobKind.QUANTIZATION not in results:
        due.append((JobKind.QUANTIZATION, request.quantization_request()))
    if JobKind.PACKAGE not in results and (mask_id or mask is None) and quantization_id:
        due.append((JobKind.PACKAGE, request.package_request(mask_id, quantization_id)))
    return due


def add(session: Session, parent: Job, due: Sequence[Part]) -> None:
    """Add parts to a locked job."""
    for kind, request in due:
        part = transitions.insert(
            session,
            transitions.NewJob(
                tenant_id=parent.tenant_id,
                kind=kind,
                payload=request.model_dump(mode="json"),
                parent_id=parent.id,
                max_attempts=parent.max_attempts,
            ),
        )
        transitions.tell(session, parent, EventKind.MESSAGE, {"message": f"added {kind}", "job_id": part.id})


def take_earlier(session: Session, build: Job, find: Find) -> None:
    """End the parts of a build that was just added whose result is there already, with that result.

    They are looked for once they are rows: what changes after that is newer than they are.
    """
    for part in transitions.children(session, build.id):
        earlier = find(session, part)
        if earlier is not None:
            part.started_at, part.result_id = now(session), earlier.result_id
            told = {"result_id": part.result_id, "message": f"{earlier.id} has made the same before"}
            transitions.transition(session, part, JobState.SUCCEEDED, **told)
    advance(session, build)


def advance(session: Session, job: Job) -> None:
    """Move a locked job with parts on: add what is due, queue it again, or end it, and then its own parent.

    Safe to call at any time: a job that a worker holds, or that has ended, stays as it is.
    """
    if not transitions.has_ended(job):
        _move(session, job)
        if transitions.has_ended(job):
            advance_parent(session, job)


def advance_parent(session: Session, job: Job) -> None:
    """Move on the job that `job` is a part of, if any (locked by `transitions.lock`)."""
    if job.parent_id is not None:
        parent = transitions.lock_one(session, job.parent_id)
        if parent is not None:
            advance(session, parent)


def show_progress(session: Session, job: Job) -> None:
    """Set a locked job's progress from its parts', and that of the job that it is a part of."""
    parts = transitions.children(session, job.id)
    running = [part for part in parts if part.state == JobState.RUNNING]
    if job.kind == JobKind.BUILD:
        whole = 1.0 if job.payload.get("mask") else 1.0 - _WEIGHTS[JobKind.MASK]
        fraction = sum(_WEIGHTS[JobKind(part.kind)] * part.progress for part in parts) / whole
        job.message = "; ".join(f"{part.kind}: {part.message or 'running'}" for part in running) or None
    else:
        fraction = _SPLIT_AT + _SPLIT_SHARE * sum(part.progress for part in parts) / len(parts)
        ended = sum(transitions.has_ended(part) for part in parts)
        job.message = f"parts: {ended} of {len(parts)} done, {len(running)} running"
    job.updated_at = now(session)
    moved = int(100 * fraction) != int(100 * job.progress)
    job.progress = min(fraction, 1.0)
    if moved:
        told = {"progress": job.progress, "message": job.message}
        transitions.tell(session, job, EventKind.PROGRESS, told)
        show_parent(session, job)


def show_parent(session: Session, job: Job) -> None:
    """Set the progress of the job that `job` is a part of, if any (locked by `transitions.lock`)."""
    if job.parent_id is not None:
        parent = transitions.lock_one(session, job.parent_id)
        if parent is not None and not transitions.has_ended(parent):
            show_progress(session, parent)


def _move(session: Session, job: Job) -> None:
    if job.worker is not None:
        return
    parts = transitions.children(session, job.id)
    broken = next(
        (part for part in parts if transitions.has_ended(part) and part.state != JobState.SUCCEEDED), None
    )
    if job.cancel_requested_at is not None or broken is not None:
        _stop(session, job, parts, broken)
    elif job.kind == JobKind.BUILD:
        _move_build(session, job, parts)
    elif not all(transitions.has_ended(part) for part in parts):
        _wait(session, job)
        show_progress(session, job)
    elif job.state == JobState.RUNNING:
        job.available_at = now(session)
        job.dispatched_at = None
        transitions.transition(session, job, JobState.QUEUED, message="all parts are done")


def _move_build(session: Session, build: Job, parts: Sequence[Job]) -> None:
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
    _wait(session, build)
    add(session, build, due)
    show_progress(session, build)


def _wait(session: Session, job: Job) -> None:
    if job.state == JobState.QUEUED:
        job.started_at = now(session)
        transitions.transition(session, job, JobState.RUNNING)


def _stop(session: Session, job: Job, parts: Sequence[Job], broken: Job | None) -> None:
    """Stop all parts; once they have ended, end the job as the broken one has."""
    at = now(session)
    for part in (transitions.lock_one(session, part.id) for part in parts):
        if part is None or transitions.has_ended(part):
            continue
        part.cancel_requested_at = part.cancel_requested_at or at
        if part.state == JobState.QUEUED:
            transitions.transition(session, part, JobState.CANCELLED)
        else:
            _move(session, part)
    if not all(transitions.has_ended(part) for part in parts):
        return
    if job.cancel_requested_at is not None or broken is None or broken.state == JobState.CANCELLED:
        transitions.transition(session, job, JobState.CANCELLED)
        return
    cause = (broken.error or {}).get("message", f"it is {broken.state}")
    _fail(session, job, f"{broken.kind} {broken.id}: {cause}")


def _fail(session: Session, job: Job, message: str) -> None:
    job.error = {"type": "PartFailed", "message": message, "retryable": False}
    transitions.transition(session, job, JobState.FAILED, error=job.error)
