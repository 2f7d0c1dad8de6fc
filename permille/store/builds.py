"""A build: one job row whose work is its children (mask, quantization, package).

No worker runs a build and none is held by one: it is moved on in the transaction that ends one of its
children, and looked at again by every sweep.

Payload: `model_id`, `corpus_id`, `evaluation_corpus_id`, `mask` (its options), `quantization` (its options),
`fisher_exponents`. Mask and quantization run side by side.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from permille.store import job_rows
from permille.store.database import now
from permille.store.tables import EventKind, Job, JobKind, JobState

# What share of a build's time each part takes, roughly.
_WEIGHTS = {JobKind.MASK: 0.6, JobKind.QUANTIZATION: 0.3, JobKind.PACKAGE: 0.1}


def children_due(
    payload: Mapping[str, Any], results: Mapping[str, str | None]
) -> list[tuple[JobKind, dict[str, Any]]]:
    """Which child jobs to add now.

    Args:
        payload: the build's.
        results: kind to result id, or to None while it is unfinished, of the children there are.
    """
    mask_id = results.get(JobKind.MASK)
    quantization_id = results.get(JobKind.QUANTIZATION)
    due: list[tuple[JobKind, dict[str, Any]]] = []
    if JobKind.MASK not in results:
        due.append((JobKind.MASK, _mask_payload(payload)))
    if JobKind.QUANTIZATION not in results:
        due.append((JobKind.QUANTIZATION, _quantization_payload(payload)))
    if JobKind.PACKAGE not in results and mask_id and quantization_id:
        parts = {"mask_id": mask_id, "quantization_id": quantization_id}
        due.append((JobKind.PACKAGE, {**parts, "fisher_exponents": payload.get("fisher_exponents", False)}))
    return due


def advance(session: Session, build: Job) -> None:
    """Move a locked build on: add children that are due, or end it. Safe to call at any time."""
    if job_rows.has_ended(build):
        return
    parts = job_rows.children(session, build.id)
    broken = next(
        (part for part in parts if job_rows.has_ended(part) and part.state != JobState.SUCCEEDED), None
    )
    if build.cancel_requested_at is not None or broken is not None:
        _stop(session, build, parts, broken)
        return
    results = {part.kind: part.result_id if part.state == JobState.SUCCEEDED else None for part in parts}
    if results.get(JobKind.PACKAGE):
        build.result_kind, build.result_id = JobKind.PACKAGE.value, results[JobKind.PACKAGE]
        build.message = None
        job_rows.move(session, build, JobState.SUCCEEDED)
        return
    if build.state == JobState.QUEUED:
        build.started_at = now(session)
        job_rows.move(session, build, JobState.RUNNING)
    for kind, payload in children_due(build.payload, results):
        child = job_rows.insert(
            session,
            tenant_id=build.tenant_id,
            kind=kind,
            payload=payload,
            parent_id=build.id,
            max_attempts=build.max_attempts,
        )
        job_rows.tell(session, build, EventKind.MESSAGE, {"message": f"added {kind}", "job_id": child.id})
    show_progress(session, build)


def advance_parent(session: Session, job: Job) -> None:
    """Move on the build that `job` belongs to, if any (locked by `job_rows.lock`)."""
    if job.parent_id is not None:
        parent = job_rows.lock_one(session, job.parent_id)
        if parent is not None:
            advance(session, parent)


def show_progress(session: Session, build: Job) -> None:
    """Set a locked build's progress from its children's."""
    parts = session.scalars(select(Job).where(Job.parent_id == build.id)).all()
    fraction = sum(_WEIGHTS[JobKind(part.kind)] * part.progress for part in parts)
    running = [part for part in parts if part.state == JobState.RUNNING]
    build.message = "; ".join(f"{part.kind}: {part.message or 'running'}" for part in running) or None
    build.updated_at = now(session)
    moved = int(100 * fraction) != int(100 * build.progress)
    build.progress = min(fraction, 1.0)
    if moved:
        job_rows.tell(
            session, build, EventKind.PROGRESS, {"progress": build.progress, "message": build.message}
        )


def _stop(session: Session, build: Job, parts: Sequence[Job], broken: Job | None) -> None:
    at = now(session)
    for part in parts:
        if part.state == JobState.QUEUED:
            part.cancel_requested_at = part.cancel_requested_at or at
            job_rows.move(session, part, JobState.CANCELLED)
        elif part.state == JobState.RUNNING:
            part.cancel_requested_at = part.cancel_requested_at or at
    if not all(job_rows.has_ended(part) for part in parts):
        return
    if build.cancel_requested_at is not None or broken is None or broken.state == JobState.CANCELLED:
        job_rows.move(session, build, JobState.CANCELLED)
        return
    cause = (broken.error or {}).get("message", f"it is {broken.state}")
    build.error = {
        "type": "ChildFailed",
        "message": f"{broken.kind} {broken.id}: {cause}",
        "job_id": broken.id,
    }
    job_rows.move(session, build, JobState.FAILED, error=build.error)


def _mask_payload(payload: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model_id": payload["model_id"],
        "corpus_id": payload.get("corpus_id"),
        **payload.get("mask", {}),
    }


def _quantization_payload(payload: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model_id": payload["model_id"],
        "evaluation_corpus_id": payload.get("evaluation_corpus_id"),
        **payload.get("quantization", {}),
    }
