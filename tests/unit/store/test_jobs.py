"""Tests of the API's operations on jobs: submit, list, cancel, retry and events."""

import pytest

from permille.schemas.jobs import JobKind, JobState
from permille.store import audit, releases, rows
from permille.store.artifacts import TaskResult
from permille.store.database import Database
from permille.store.errors import ConflictError, NotFoundError
from permille.store.ids import Prefix, new_id
from permille.store.jobs import claims, queue, transitions
from permille.store.jobs.claims import Claim
from permille.store.jobs.transitions import NewJob
from permille.store.rows import Window
from permille.store.tables import Job
from permille.version import RESULTS
from tests.artifacts import PARTS, add_artifact, some_model
from tests.unit.store.conftest import Clock

PAYLOAD = {"model_id": "model_1", "density": 0.001}


def submit(db: Database, tenant_id: str, *, key: str | None = None, max_attempts: int = 3) -> Job:
    with db.write() as session:
        return queue.submit(
            session,
            NewJob(
                tenant_id=tenant_id,
                kind="mask",
                payload=PAYLOAD,
                idempotency_key=key,
                max_attempts=max_attempts,
            ),
        )


def read(db: Database, job: Job) -> Job:
    with db.read() as session:
        return rows.get(session, Job, tenant_id=job.tenant_id, row_id=job.id)


def take(db: Database, worker: str = "w") -> Claim:
    with db.write() as session:
        claim = claims.claim(session, worker=worker, lease_s=30)
    assert claim is not None
    return claim


def test_ids_of_one_process_keep_their_order_within_a_millisecond() -> None:
    ids = [new_id(Prefix.JOB) for _ in range(2000)]
    assert ids == sorted(ids)
    assert len(set(ids)) == len(ids)


def test_same_key_and_payload_returns_the_same_job(db: Database, tenant_id: str) -> None:
    assert submit(db, tenant_id, key="k").id == submit(db, tenant_id, key="k").id


def test_same_key_with_another_payload_is_a_conflict(db: Database, tenant_id: str) -> None:
    submit(db, tenant_id, key="k")
    with pytest.raises(ConflictError, match="idempotency key 'k'"), db.write() as session:
        queue.submit(session, NewJob(tenant_id=tenant_id, kind="mask", payload={}, idempotency_key="k"))


def test_same_key_with_another_kind_is_a_conflict(db: Database, tenant_id: str) -> None:
    submit(db, tenant_id, key="k")
    with pytest.raises(ConflictError), db.write() as session:
        queue.submit(
            session, NewJob(tenant_id=tenant_id, kind="package", payload=PAYLOAD, idempotency_key="k")
        )


def test_a_key_is_free_for_another_job_after_a_day(db: Database, tenant_id: str, clock: Clock) -> None:
    first = submit(db, tenant_id, key="k")
    clock.forward(86_399)
    assert submit(db, tenant_id, key="k").id == first.id
    clock.forward(1)
    second = submit(db, tenant_id, key="k")
    assert second.id != first.id
    assert submit(db, tenant_id, key="k").id == second.id
    clock.forward(86_400)
    with db.write() as session:
        queue.submit(session, NewJob(tenant_id=tenant_id, kind="mask", payload={}, idempotency_key="k"))
    assert [read(db, job).idempotency_key for job in (first, second)] == [None, None]


def test_tenants_do_not_share_keys(db: Database, tenant_id: str, other_tenant_id: str) -> None:
    assert submit(db, tenant_id, key="k").id != submit(db, other_tenant_id, key="k").id


def test_without_a_key_every_request_is_a_job(db: Database, tenant_id: str) -> None:
    assert submit(db, tenant_id).id != submit(db, tenant_id).id


@pytest.mark.parametrize("call", [queue.request_cancel, queue.retry, queue.events_after])
def test_another_tenants_job_does_not_exist(
    db: Database, tenant_id: str, other_tenant_id: str, call: object
) -> None:
    job = submit(db, tenant_id)
    assert callable(call)
    with pytest.raises(NotFoundError), db.write() as session:
        call(session, tenant_id=other_tenant_id, job_id=job.id)
    assert read(db, job).state == "queued"


def test_pages_hold_every_job_once_newest_first(db: Database, tenant_id: str, other_tenant_id: str) -> None:
    made = [submit(db, tenant_id).id for _ in range(5)]
    submit(db, other_tenant_id)
    seen: list[str] = []
    cursor: str | None = None
    while True:
        with db.read() as session:
            page = queue.list_jobs(session, tenant_id=tenant_id, window=Window(limit=2, cursor=cursor))
        assert len(page.items) <= 2
        seen += [job.id for job in page.items]
        submit(db, tenant_id)  # a new job does not move the following pages
        if (cursor := page.next_cursor) is None:
            break
    assert seen == sorted(made, reverse=True)


def test_list_filters_by_state_and_kind(db: Database, tenant_id: str) -> None:
    first = submit(db, tenant_id)
    submit(db, tenant_id)
    take(db)
    with db.read() as session:
        wanted = (queue.JobFilter(state=JobState.RUNNING), queue.JobFilter(kind=JobKind.BUILD))
        running, builds = (queue.list_jobs(session, tenant_id=tenant_id, wanted=one).items for one in wanted)
    assert [job.id for job in running] == [first.id]
    assert builds == ()


def test_list_filters_by_model_release_and_alias(db: Database, tenant_id: str, other_tenant_id: str) -> None:
    mask = submit(db, tenant_id)
    made = []
    with db.write() as session:
        for tenant in (tenant_id, other_tenant_id):
            model_id = some_model(session, tenant)
            result = TaskResult(model_id=model_id, digest=f"sha256:{'1' * 64}", k=1, provenance={}, blobs=())
            package = add_artifact(
                session, tenant_id=tenant, kind=JobKind.PACKAGE, request=PARTS, made=result
            )
            releases.publish(session, name="notes", package=package)
            made.append((package.job_id, model_id))
        releases.set_alias(session, tenant_id=tenant_id, name="notes", alias="stable", version=1)
    job_id, model_id = made[0]
    for wanted, found in (
        (queue.JobFilter(model_id="model_1"), [mask.id]),
        (queue.JobFilter(model_id=model_id), [job_id]),
        (queue.JobFilter(model_id=made[1][1]), []),
        (queue.JobFilter(release="notes"), [job_id]),
        (queue.JobFilter(release="notes", alias="stable"), [job_id]),
        (queue.JobFilter(release="other", alias="stable"), []),
        (queue.JobFilter(alias="canary"), []),
    ):
        with db.read() as session:
            page = queue.list_jobs(session, tenant_id=tenant_id, wanted=wanted)
        assert [job.id for job in page.items] == found, wanted


def test_audit_entries_are_listed_by_action_token_and_subject(
    db: Database, tenant_id: str, other_tenant_id: str
) -> None:
    tokens = {action: new_id(Prefix.OPERATOR) for action in "ab"}
    with db.write() as session:
        for tenant, action in ((tenant_id, "a"), (tenant_id, "b"), (other_tenant_id, "a"), (tenant_id, "a")):
            change = audit.Change(token_id=tokens[action], action=action, subject=f"/v1/100%/{action}")
            audit.append(session, tenant_id=tenant, change=change)
    for wanted, limit, found, after in (
        (audit.AuditFilter(), 2, [3, 2], "2"),
        (audit.AuditFilter(action="a"), 50, [3, 1], None),
        (audit.AuditFilter(token_id=tokens["b"]), 50, [2], None),
        (audit.AuditFilter(subject="0%/b"), 50, [2], None),
        (audit.AuditFilter(subject="_"), 50, [], None),
    ):
        with db.read() as session:
            page = audit.list_entries(session, tenant_id=tenant_id, wanted=wanted, window=Window(limit=limit))
        assert ([entry.seq for entry in page.items], page.next_cursor) == (found, after)
    with db.read() as session:
        rest = audit.list_entries(
            session, tenant_id=tenant_id, wanted=audit.AuditFilter(), window=Window(cursor="2")
        )
        assert [entry.seq for entry in rest.items] == [1]
        assert audit.actions_of(session, tenant_id=tenant_id) == ["a", "b"]


def test_a_queued_job_is_cancelled_at_once(db: Database, tenant_id: str) -> None:
    job = submit(db, tenant_id)
    with db.write() as session:
        assert queue.request_cancel(session, tenant_id=tenant_id, job_id=job.id).state == "cancelled"
    with db.write() as session:
        assert claims.claim(session, worker="w", lease_s=30) is None


def test_a_running_job_is_asked_to_stop(db: Database, tenant_id: str) -> None:
    job = submit(db, tenant_id)
    claim = take(db)
    with db.write() as session:
        assert queue.request_cancel(session, tenant_id=tenant_id, job_id=job.id).state == "running"
    with db.read() as session:
        assert claims.is_cancel_requested(session, claim)
    with db.write() as session:
        claims.cancelled(session, claim)
    assert read(db, job).state == "cancelled"


def test_cancel_of_an_ended_job_changes_nothing(db: Database, tenant_id: str) -> None:
    job = submit(db, tenant_id)
    claim = take(db)
    with db.write() as session:
        claims.complete(session, claim, result_id="mask_1")
    with db.write() as session:
        queue.request_cancel(session, tenant_id=tenant_id, job_id=job.id)
    after = read(db, job)
    assert (after.state, after.cancel_requested_at) == ("succeeded", None)


def test_retry_counts_attempts_anew_and_keeps_the_fence_growing(db: Database, tenant_id: str) -> None:
    job = submit(db, tenant_id, max_attempts=1)
    claim = take(db)
    with db.write() as session:
        claims.fail(session, claim, error={"type": "T", "message": "m"}, retryable=True)
    assert read(db, job).state == "dead"
    with db.write() as session:
        queue.retry(session, tenant_id=tenant_id, job_id=job.id)
    again = take(db)
    assert (again.attempt, again.fence) == (1, claim.fence + 1)


def test_retry_of_a_job_that_runs_or_succeeded_is_a_conflict(db: Database, tenant_id: str) -> None:
    job = submit(db, tenant_id)
    with pytest.raises(ConflictError, match="queued"), db.write() as session:
        queue.retry(session, tenant_id=tenant_id, job_id=job.id)
    claim = take(db)
    with db.write() as session:
        claims.complete(session, claim, result_id="mask_1")
    with pytest.raises(ConflictError, match="succeeded"), db.write() as session:
        queue.retry(session, tenant_id=tenant_id, job_id=job.id)


def test_events_are_numbered_without_gaps_and_resume_after_any(
    db: Database, tenant_id: str, clock: Clock
) -> None:
    job = submit(db, tenant_id)
    claim = take(db)
    for step in range(3):
        clock.forward(1)
        with db.write() as session:
            claims.report_progress(session, claim, fraction=step / 3, message=f"step {step}")
    with db.write() as session:
        claims.complete(session, claim, result_id="mask_1")
    with db.read() as session:
        every = queue.events_after(session, tenant_id=tenant_id, job_id=job.id)
        late = queue.events_after(session, tenant_id=tenant_id, job_id=job.id, seq=4)
    assert [event.seq for event in every] == [1, 2, 3, 4, 5, 6]
    assert [event.data.get("state") for event in every if event.kind == "state"] == [
        "queued",
        "running",
        "succeeded",
    ]
    assert [event.seq for event in late] == [5, 6]


def test_a_change_of_results_makes_equal_requests_new(monkeypatch: pytest.MonkeyPatch) -> None:
    before = transitions.request_digest("mask", {"seed": 1, "density": 0.1})
    assert transitions.request_digest("mask", {"density": 0.1, "seed": 1}) == before
    for name, value in (("RESULTS", RESULTS + 1), ("__version__", "0.1.1")):
        with monkeypatch.context() as other:
            other.setattr(transitions, name, value)
            assert transitions.request_digest("mask", {"seed": 1, "density": 0.1}) != before
