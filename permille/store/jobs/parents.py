"""Jobs that consist of other jobs: builds, and jobs that a worker has split into parts.

A job that waits for its parts is `running`, but no worker holds it. The transaction that ends a part
also advances the waiting job. A sweep advances again the waiting jobs all of whose parts have ended.

A build waits from the start. Its mask job and its quantization job run side by side, unless earlier
results are reused. A build with an adapter has no mask job. The package job runs last. Any other waiting
job was split by its worker (`claims.split`). Once all parts have succeeded, it is queued again, and
its next attempt joins their results.
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

# The kind and the request of a part to add.
Part = tuple[JobKind, Closed]
# A function that finds, for a new job, an earlier job with the same request and inputs.
Find = Callable[[Session, Job], Job | None]
# Rough shares of a build's time, for its progress bar. The parts of a split job begin at 5 % of its time
# and take 80 %.
_WEIGHTS = {JobKind.MASK: 0.75, JobKind.QUANTIZATION: 0.05, JobKind.PACKAGE: 0.2}
_SPLIT_AT, _SPLIT_SHARE = 0.05, 0.8


def parts_due(request: BuildCreate, results: Mapping[str, str | None]) -> list[Part]:
    """Return the child jobs of a build to add now, with their requests.

    Args:
        results: for the kind of each existing child, the id of its result, or None while it is
            unfinished.
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
    """End each part of a new build whose result already exists, and give it that result."""
    # The parts were inserted before this search. If a corpus file changes after the search, the file is newer
    # than the parts that end here, so no later build reuses them.
    for part in transitions.children(session, build.id):
        earlier = find(session, part)
        if earlier is not None:
            part.started_at, part.result_id = now(session), earlier.result_id
            told = {"result_id": part.result_id, "message": f"{earlier.id} has made the same before"}
            transitions.transition(session, part, JobState.SUCCEEDED, **told)
    advance(session, build)


def advance(session: Session, job: Job) -> None:
    """Advance a locked job that waits for its parts: add the parts that are due, queue the job again, or end
    it.

    When the job ends, its own parent is advanced, too. You may call this at any time: a job that a
    worker holds, or that has ended, does not change.
    """
    if not transitions.has_ended(job):
        _move(session, job)
        if transitions.has_ended(job):
            advance_parent(session, job)


def advance_parent(session: Session, job: Job) -> None:
    """Advance the parent of this job, if it has one. `transitions.lock` must have locked the parent."""
    if job.parent_id is not None:
        parent = transitions.lock_one(session, job.parent_id)
        if parent is not None:
            advance(session, parent)


def hold_siblings(session: Session, part: Job) -> None:
    """Let the queued parts of the same job wait until this part is tried again.

    So a hub that cannot be reached ends a build before its long work. `transitions.lock` must have locked the
    parent.
    """
    if part.parent_id is None:
        return
    for sibling in transitions.children(session, part.parent_id):
        if sibling.state == JobState.QUEUED and sibling.available_at < part.available_at:
            sibling.available_at, sibling.dispatched_at = part.available_at, None
            sibling.updated_at = now(session)  # by it, `claims.pull_back` finds times of a wrong clock


def show_progress(session: Session, job: Job) -> None:
    """Compute the progress of a locked job from its parts. Then do the same for its own parent.

    If neither the progress nor the message changes, nothing is written.
    """
    parts = transitions.children(session, job.id)
    running = [part for part in parts if part.state == JobState.RUNNING]
    if job.kind == JobKind.BUILD:
        # A build with an adapter has no mask, so its other parts make up the whole.
        whole = 1.0 if job.payload.get("mask") else 1.0 - _WEIGHTS[JobKind.MASK]
        fraction = sum(_WEIGHTS[JobKind(part.kind)] * part.progress for part in parts) / whole
        message = "; ".join(f"{part.kind}: {part.message or 'running'}" for part in running) or None
    else:
        fraction = _SPLIT_AT + _SPLIT_SHARE * sum(part.progress for part in parts) / len(parts)
        ended = sum(transitions.has_ended(part) for part in parts)
        message = f"parts: {ended} of {len(parts)} done, {len(running)} running"
    fraction = min(fraction, 1.0)
    if (fraction, message) == (job.progress, job.message):
        return
    # Each event is a row, so add one only when another whole percent is reached.
    moved = int(100 * fraction) != int(100 * job.progress)
    job.progress, job.message, job.updated_at = fraction, message, now(session)
    if moved:
        told = {"progress": fraction, "message": message}
        transitions.tell(session, job, EventKind.PROGRESS, told)
        show_parent(session, job)


def show_parent(session: Session, job: Job) -> None:
    """Update the progress of the parent of this job, if it has one. `transitions.lock` must have
    locked it.
    """
    if job.parent_id is not None:
        parent = transitions.lock_one(session, job.parent_id)
        if parent is not None and not transitions.has_ended(parent):
            show_progress(session, parent)


def _move(session: Session, job: Job) -> None:
    # A worker still computes this attempt, so the job does not wait for parts.
    if job.worker is not None:
        return
    parts = transitions.children(session, job.id)
    # A part that failed has stopped those that are cancelled, so it comes first.
    ended = sorted(filter(transitions.has_failed, parts), key=lambda part: part.state == JobState.CANCELLED)
    broken = next(iter(ended), None)
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
    except InputError as exc:
        # Another version of permille wrote this row. End the build, because otherwise every sweep would fail
        # at it.
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
    """Stop all parts. Once they have ended, end the job like the broken part, or as cancelled."""
    at = now(session)
    # The parts come oldest first, which is the order of locks.
    for part in (transitions.lock_one(session, part.id) for part in parts):
        if part is None or transitions.has_ended(part):
            continue
        # The supervisor of a running part sees this request at its next poll.
        part.cancel_requested_at = part.cancel_requested_at or at
        if part.state == JobState.QUEUED:
            transitions.transition(session, part, JobState.CANCELLED)
        else:
            _move(session, part)
    if not all(transitions.has_ended(part) for part in parts):
        return
    # Someone cancelled the job or one of its parts. That is not a failure.
    if job.cancel_requested_at is not None or broken is None or broken.state == JobState.CANCELLED:
        transitions.transition(session, job, JobState.CANCELLED)
        return
    cause = (broken.error or {}).get("message", f"it is {broken.state}")
    _fail(session, job, f"{broken.kind} {broken.id}: {cause}", JobState(broken.state))


def _fail(session: Session, job: Job, message: str, state: JobState = JobState.FAILED) -> None:
    """End the job as `failed`, or as `dead` if a retry may succeed."""
    job.error = {"type": "PartFailed", "message": message, "retryable": state is JobState.DEAD}
    transitions.transition(session, job, state, error=job.error)
