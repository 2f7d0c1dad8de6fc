"""A build advances with its children, fails with them, is cancelled with them, and holds no worker."""

from typing import Any

import pytest

from permille.store import claims, jobs
from permille.store.builds import children_due
from permille.store.claims import Claim
from permille.store.database import Database
from permille.store.errors import ConflictError
from permille.store.tables import Job
from tests.unit.store.test_jobs import read

PAYLOAD: dict[str, Any] = {
    "model_id": "model_1",
    "corpus_id": "corpus_1",
    "evaluation_corpus_id": "corpus_2",
    "mask": {"method": "fisher", "density": 0.001, "seed": 3},
    "quantization": {"scheme": "nf4", "group_size": 64},
}


def submit_build(db: Database, tenant_id: str, **changes: object) -> Job:
    with db.write() as session:
        payload = {**PAYLOAD, **changes}
        return jobs.submit(session, tenant_id=tenant_id, kind="build", payload=payload, max_attempts=1)


def take(db: Database) -> Claim | None:
    with db.write() as session:
        return claims.claim(session, worker="w", lease_s=30)


def finish(db: Database, claim: Claim) -> None:
    with db.write() as session:
        claims.complete(session, claim, result_kind=claim.kind, result_id=f"{claim.kind}_1")


def run(db: Database, kind: str) -> None:
    claim = take(db)
    assert claim is not None
    assert claim.kind == kind
    finish(db, claim)


def parts(db: Database, build: Job) -> dict[str, Job]:
    with db.read() as session:
        page = jobs.list_jobs(session, tenant_id=build.tenant_id, parent_id=build.id)
    return {job.kind: job for job in page.items}


def test_parts_get_the_payloads_of_jobs_of_their_own(db: Database, tenant_id: str) -> None:
    build = submit_build(db, tenant_id)
    for kind in ("mask", "quantization"):
        run(db, kind)
    payloads = {kind: job.payload for kind, job in parts(db, build).items()}
    assert payloads == {
        "mask": {
            "model_id": "model_1",
            "corpus_id": "corpus_1",
            "method": "fisher",
            "density": 0.001,
            "seed": 3,
        },
        "quantization": {
            "model_id": "model_1",
            "evaluation_corpus_id": "corpus_2",
            "scheme": "nf4",
            "group_size": 64,
        },
        "package": {"mask_id": "mask_1", "quantization_id": "quantization_1", "fisher_exponents": False},
    }


def test_builds_run_mask_and_quantization_side_by_side(db: Database, tenant_id: str) -> None:
    build = submit_build(db, tenant_id)
    assert read(db, build).state == "running"
    first, second = take(db), take(db)
    assert first is not None
    assert second is not None
    assert {first.kind, second.kind} == {"mask", "quantization"}
    assert take(db) is None
    finish(db, first)
    assert take(db) is None
    finish(db, second)
    run(db, "package")
    assert take(db) is None
    after = read(db, build)
    assert (after.state, after.result_kind, after.result_id, after.progress) == (
        "succeeded",
        "package",
        "package_1",
        1.0,
    )


def test_children_due_adds_nothing_twice() -> None:
    assert children_due(PAYLOAD, {"mask": None, "quantization": None}) == []
    assert children_due(PAYLOAD, {"mask": "m", "quantization": "q", "package": None}) == []


def test_progress_of_the_parts_is_the_builds(db: Database, tenant_id: str) -> None:
    build = submit_build(db, tenant_id)
    claim = take(db)
    assert claim is not None
    with db.write() as session:
        claims.report_progress(session, claim, fraction=0.5, message="fisher 1/2")
    row = read(db, build)
    assert row.progress == pytest.approx(0.3)
    assert row.message == "mask: fisher 1/2"


def test_a_failed_part_fails_the_build_and_stops_its_siblings(db: Database, tenant_id: str) -> None:
    build = submit_build(db, tenant_id)
    first, second = take(db), take(db)
    assert first is not None
    assert second is not None
    with db.write() as session:
        claims.fail(session, first, error={"type": "InputError", "message": "bad text"}, retryable=False)
    with db.read() as session:
        assert claims.is_cancel_requested(session, second)
    assert read(db, build).state == "running"
    with db.write() as session:
        claims.cancelled(session, second)
    after = read(db, build)
    assert after.state == "failed"
    assert after.error is not None
    assert "bad text" in after.error["message"]


def test_cancel_of_a_build_cancels_its_parts(db: Database, tenant_id: str) -> None:
    build = submit_build(db, tenant_id)
    running = take(db)
    assert running is not None
    with db.write() as session:
        jobs.request_cancel(session, tenant_id=tenant_id, job_id=build.id)
    states = {job.id: job.state for job in parts(db, build).values()}
    assert states.pop(running.job_id) == "running"
    assert set(states.values()) == {"cancelled"}
    with db.write() as session:
        claims.cancelled(session, running)
    assert read(db, build).state == "cancelled"
    assert take(db) is None


def test_cancel_of_a_part_cancels_the_build(db: Database, tenant_id: str) -> None:
    build = submit_build(db, tenant_id)
    with db.write() as session:
        jobs.request_cancel(session, tenant_id=tenant_id, job_id=parts(db, build)["mask"].id)
    assert read(db, build).state == "cancelled"


def test_retry_of_a_build_repeats_only_what_failed(db: Database, tenant_id: str) -> None:
    build = submit_build(db, tenant_id)
    run(db, "mask")
    claim = take(db)
    assert claim is not None
    with db.write() as session:
        claims.fail(session, claim, error={"type": "T", "message": "m"}, retryable=True)
    assert read(db, build).state == "failed"
    with pytest.raises(ConflictError, match="retry that"), db.write() as session:
        jobs.retry(session, tenant_id=tenant_id, job_id=claim.job_id)
    with db.write() as session:
        jobs.retry(session, tenant_id=tenant_id, job_id=build.id)
    run(db, "quantization")
    run(db, "package")
    assert read(db, build).state == "succeeded"


def test_builds_are_never_claimed(db: Database, tenant_id: str) -> None:
    build = submit_build(db, tenant_id)
    with db.write() as session:
        assert claims.claim(session, worker="w", lease_s=30, job_id=build.id) is None
