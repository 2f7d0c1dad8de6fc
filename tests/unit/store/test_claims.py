"""Tests of claims, leases and fences: no job is lost, and no result is published twice."""

import subprocess
import sys
from datetime import timedelta

import pytest
from sqlalchemy import text, update

from permille.store import artifacts
from permille.store.artifacts import TaskResult
from permille.store.database import Database, now
from permille.store.errors import StaleClaimError
from permille.store.jobs import claims, queue
from permille.store.jobs.claims import Claim
from permille.store.tables import Artifact, Job
from tests.artifacts import some_model
from tests.unit.store.conftest import Clock
from tests.unit.store.plans import assert_by_index, explained
from tests.unit.store.test_jobs import PAYLOAD, read, submit, take

ERROR = {"type": "RetryableError", "message": "try again"}
DIGEST = "sha256:" + "0" * 64


def sweep(db: Database) -> claims.SweepReport:
    return claims.sweep(db)


def test_claim_counts_attempt_and_fence_and_takes_the_oldest(
    db: Database, tenant_id: str, clock: Clock
) -> None:
    first = submit(db, tenant_id)
    clock.forward(1)
    submit(db, tenant_id)
    claim = take(db)
    assert (claim.job_id, claim.attempt, claim.fence) == (first.id, 1, 1)
    row = read(db, first)
    assert (row.state, row.worker) == ("running", "w")
    assert row.lease_expires_at is not None
    assert (row.lease_expires_at - clock.at).total_seconds() == 30


def test_a_claimed_job_is_not_claimed_again(db: Database, tenant_id: str) -> None:
    job = submit(db, tenant_id)
    take(db)
    with db.write() as session:
        assert claims.claim(session, worker="x", lease_s=30) is None
        assert claims.claim(session, worker="x", lease_s=30, job_id=job.id) is None


@pytest.mark.parametrize("payload", ["null", '"text"', "[]", "{no JSON"])
def test_a_damaged_job_stops_no_other(db: Database, tenant_id: str, payload: str) -> None:
    damaged, other = submit(db, tenant_id), submit(db, tenant_id)
    with db.write() as session:
        if session.get_bind().dialect.name == "postgresql" and payload.startswith("{"):
            pytest.skip("PostgreSQL stores no other text")
        session.execute(
            text("UPDATE jobs SET payload = :payload WHERE id = :id"), {"payload": payload, "id": damaged.id}
        )
    first, second = take(db), take(db)
    assert (first.job_id, first.payload, second.job_id) == (damaged.id, {}, other.id)


@pytest.mark.parametrize(
    "column", ["attempt", "fence", "max_attempts", "event_seq", "progress", "created_at"]
)
def test_a_job_whose_numbers_are_damaged_fails_and_stops_no_other(
    db: Database, tenant_id: str, column: str
) -> None:
    damaged, other = submit(db, tenant_id), submit(db, tenant_id)
    with db.write() as session:
        sqlite = session.get_bind().dialect.name == "sqlite"
        if not sqlite and column != "created_at":
            pytest.skip("PostgreSQL stores no text there")
        value = "'many'" if sqlite else str(2**62)  # a time after the year 9999
        session.execute(text(f"UPDATE jobs SET {column} = {value} WHERE id = :id"), {"id": damaged.id})
    assert take(db).job_id == other.id
    row = read(db, damaged)
    assert (row.state, (row.error or {})["type"]) == ("failed", "DamagedRow")
    assert column in str((row.error or {})["message"])
    with db.write() as session:
        assert queue.retry(session, tenant_id=tenant_id, job_id=damaged.id).state == "queued"
    assert take(db).job_id == damaged.id


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_a_running_job_whose_numbers_are_damaged_fails_when_its_lease_expires(
    db: Database, tenant_id: str, clock: Clock
) -> None:
    job = submit(db, tenant_id)
    take(db)
    with db.write() as session:
        session.execute(text("UPDATE jobs SET attempt = 'many'"))
    sweep(db)
    assert read(db, job).state == "running"
    clock.forward(31)
    sweep(db)
    assert read(db, job).state == "failed"


def test_a_job_without_a_due_time_stops_no_other_tenant(
    db: Database, tenant_id: str, other_tenant_id: str
) -> None:
    damaged, other = submit(db, tenant_id), submit(db, other_tenant_id)
    with db.write() as session:
        value = "'soon'" if session.get_bind().dialect.name == "sqlite" else str(2**62)
        session.execute(text(f"UPDATE jobs SET available_at = {value} WHERE id = :id"), {"id": damaged.id})
    assert take(db).job_id == other.id


_RACE = """
import sys
from permille.store.jobs import claims
from permille.store.database import Database, now
db = Database(sys.argv[1])
won = 0
while True:
    with db.write() as session:
        claim = claims.claim(session, worker=sys.argv[2], lease_s=60)
    if claim is None:
        break
    won += 1
print(won)
"""


def test_processes_that_race_share_the_jobs_without_overlap(db: Database, tenant_id: str) -> None:
    made = [submit(db, tenant_id) for _ in range(12)]
    command = [sys.executable, "-c", _RACE, db.url]
    # The tests' clock is in 2030, but the racing processes use the real time. In 2020, jobs are due by both.
    with db.write() as session:
        for job in made:
            row = session.get(Job, job.id)
            assert row is not None
            row.available_at = row.available_at.replace(year=2020)
    racers = [
        subprocess.Popen([*command, f"racer-{index}"], stdout=subprocess.PIPE, text=True)
        for index in range(2)
    ]
    won = [int(racer.communicate(timeout=60)[0]) for racer in racers]
    assert sum(won) == 12
    assert {read(db, job).fence for job in made} == {1}


def _stock(db: Database, tenant_ids: list[str], *, queued: int, ended: int) -> None:
    """Add jobs of several tenants in turn, and update the database's statistics."""
    with db.write() as session:
        at = now(session)
        states = ["queued"] * queued + ["succeeded"] * ended
        for number, state in enumerate(states):
            session.add(
                Job(
                    id=f"job_{number:06}",
                    tenant_id=tenant_ids[number % len(tenant_ids)],
                    kind="mask",
                    state=state,
                    payload=PAYLOAD,
                    request_digest=str(number),
                    max_attempts=3,
                    available_at=at,
                    created_at=at,
                    updated_at=at,
                )
            )
    with db.write() as session:
        session.execute(text("ANALYZE"))


@pytest.mark.parametrize("uploads", [False, True])
def test_a_claim_reads_jobs_by_index_alone(
    db: Database, tenant_id: str, other_tenant_id: str, device_id: str, uploads: bool
) -> None:
    _stock(db, [tenant_id, other_tenant_id], queued=200, ended=2000)
    if uploads:
        with db.write() as session:
            session.execute(update(Job).values(device_id=device_id, tenant_id=tenant_id))
    with explained("jobs") as plans, db.write() as session:
        assert claims.claim(session, worker="w", lease_s=30) is not None
    assert_by_index(plans, "ix_jobs_running", "ix_jobs_queued", "ix_jobs_queued_devices")


def test_sweep_and_dispatch_read_jobs_by_index_alone(
    db: Database, tenant_id: str, other_tenant_id: str
) -> None:
    _stock(db, [tenant_id, other_tenant_id], queued=200, ended=2000)
    assert len(_undispatched(db)) == 100
    with explained("jobs") as plans:
        sweep(db)
        _undispatched(db)
    assert_by_index(plans, "ix_jobs_running")


def test_a_tenant_with_nothing_due_lets_the_next_one_go(
    db: Database, tenant_id: str, other_tenant_id: str, clock: Clock
) -> None:
    waits = submit(db, tenant_id)
    clock.forward(1)
    due = submit(db, other_tenant_id)
    with db.write() as session:
        session.execute(
            update(Job).where(Job.id == waits.id).values(available_at=clock.at + timedelta(seconds=9))
        )
    assert take(db).job_id == due.id
    with db.write() as session:
        assert claims.claim(session, worker="w", lease_s=30) is None
    clock.forward(9)
    assert take(db).job_id == waits.id


def test_what_other_workers_have_locked_is_passed(
    db: Database, backend: str, tenant_id: str, other_tenant_id: str, device_id: str
) -> None:
    if backend == "sqlite":
        return  # SQLite has one writing transaction at a time
    own, upload, others = submit(db, tenant_id), submit(db, tenant_id), submit(db, other_tenant_id)
    with db.write() as session:
        session.execute(update(Job).where(Job.id == upload.id).values(device_id=device_id))
    with db.write() as first, db.write() as second, db.write() as third, db.write() as fourth:
        taken = [claims.claim(each, worker="w", lease_s=30) for each in (first, second, third, fourth)]
        assert [claim and claim.job_id for claim in taken] == [own.id, upload.id, others.id, None]


def test_renew_extends_the_lease(db: Database, tenant_id: str, clock: Clock) -> None:
    job = submit(db, tenant_id)
    claim = take(db)
    clock.forward(20)
    with db.write() as session:
        assert claims.renew(session, claim, lease_s=30) is None
    clock.forward(20)
    assert sweep(db).requeued == 0
    assert read(db, job).state == "running"


def test_an_expired_lease_gives_the_job_to_another_attempt(
    db: Database, tenant_id: str, clock: Clock
) -> None:
    job = submit(db, tenant_id)
    stale = take(db, "first")
    clock.forward(31)
    assert sweep(db).requeued == 1
    with db.write() as session:
        assert claims.claim(session, worker="early", lease_s=30) is None  # the job waits for its backoff
    clock.forward(claims.backoff_s(1))
    claim = take(db, "second")
    assert (claim.attempt, claim.fence) == (2, stale.fence + 1)
    assert "first" in str((read(db, job).error or {})["message"])


@pytest.mark.parametrize("call", ["complete", "fail", "cancelled", "renew", "report", "release", "check"])
def test_a_stale_claim_can_do_nothing(db: Database, tenant_id: str, clock: Clock, call: str) -> None:
    job = submit(db, tenant_id)
    stale = take(db)
    clock.forward(31)
    sweep(db)
    clock.forward(10)
    take(db)
    before = read(db, job)
    with pytest.raises(StaleClaimError, match="fence 2"), db.write() as session:
        if call == "complete":
            made = TaskResult(model_id=some_model(session, tenant_id), digest=DIGEST, provenance={}, blobs=())
            artifacts.add(session, job=stale, made=made)
            claims.complete(session, stale, result_id="pkg_1")
        elif call == "fail":
            claims.fail(session, stale, error=ERROR, retryable=True)
        elif call == "cancelled":
            claims.cancelled(session, stale)
        elif call == "renew":
            claims.renew(session, stale, lease_s=30)
        elif call == "report":
            claims.report_progress(session, stale, fraction=0.5)
        elif call == "release":
            claims.release(session, stale)
        else:
            claims.check(session, stale)
    after = read(db, job)
    assert (after.state, after.fence, after.event_seq) == ("running", 2, before.event_seq)
    with db.read() as session:
        assert session.query(Artifact).count() == 0


def test_retryable_failures_wait_longer_and_at_last_die(db: Database, tenant_id: str, clock: Clock) -> None:
    job = submit(db, tenant_id, max_attempts=3)
    waits = []
    for _ in range(3):
        claim = take(db)
        with db.write() as session:
            claims.fail(session, claim, error=ERROR, retryable=True)
        wait = (read(db, job).available_at - clock.at).total_seconds()
        waits.append(wait)
        clock.forward(max(wait, 0))
    after = read(db, job)
    assert waits[:2] == [2, 4]
    assert after.state == "dead"
    assert after.error == {**ERROR, "retryable": True, "attempts": 3}


def test_a_wait_that_another_server_asks_for_spends_no_attempt_on_the_first_day(
    db: Database, tenant_id: str, clock: Clock
) -> None:
    job = submit(db, tenant_id, max_attempts=1)
    for _ in range(5):
        claim = take(db)
        with db.write() as session:
            assert claims.fail(session, claim, error=ERROR, retryable=True, wait_s=196) == "queued"
        waiting = read(db, job)
        assert (waiting.attempt, waiting.error) == (0, {**ERROR, "retryable": True})
        assert (waiting.available_at - clock.at).total_seconds() == 196
        with db.write() as session:
            assert claims.claim(session, worker="early", lease_s=30) is None
        clock.forward(196)
    clock.forward(86_400)
    claim = take(db)
    with db.write() as session:
        assert claims.fail(session, claim, error=ERROR, retryable=True, wait_s=196) == "dead"


def test_a_job_that_waits_for_another_server_can_be_cancelled(db: Database, tenant_id: str) -> None:
    job = submit(db, tenant_id)
    claim = take(db)
    with db.write() as session:
        queue.request_cancel(session, tenant_id=tenant_id, job_id=job.id)
        assert claims.fail(session, claim, error=ERROR, retryable=True, wait_s=196) == "cancelled"


def test_a_worker_that_is_lost_too_often_leaves_a_dead_job_with_the_diagnosis(
    db: Database, tenant_id: str, clock: Clock
) -> None:
    job = submit(db, tenant_id, max_attempts=1)
    take(db, "unlucky")
    clock.forward(31)
    assert sweep(db).died == 1
    after = read(db, job)
    assert after.state == "dead"
    assert after.error is not None
    assert after.error["type"] == "WorkerLost"
    assert "unlucky" in str(after.error["message"])


def test_a_final_failure_is_not_tried_again(db: Database, tenant_id: str) -> None:
    job = submit(db, tenant_id)
    claim = take(db)
    with db.write() as session:
        claims.fail(session, claim, error={"type": "InputError", "message": "no such file"}, retryable=False)
    after = read(db, job)
    assert after.state == "failed"
    assert after.error == {"type": "InputError", "message": "no such file", "retryable": False}


def test_a_lost_attempt_that_was_to_be_cancelled_is_cancelled(
    db: Database, tenant_id: str, clock: Clock
) -> None:
    job = submit(db, tenant_id)
    take(db)
    with db.write() as session:
        queue.request_cancel(session, tenant_id=tenant_id, job_id=job.id)
    clock.forward(31)
    assert sweep(db).cancelled == 1
    assert read(db, job).state == "cancelled"


def test_release_gives_the_attempt_back(db: Database, tenant_id: str) -> None:
    submit(db, tenant_id)
    first = take(db)
    with db.write() as session:
        claims.release(session, first)
    second = take(db)
    assert (second.attempt, second.fence) == (1, first.fence + 1)


def test_progress_is_stored_with_its_estimate(db: Database, tenant_id: str, clock: Clock) -> None:
    job = submit(db, tenant_id)
    claim = take(db)
    with db.write() as session:
        stop = claims.report_progress(session, claim, fraction=0.25, message="fisher 1/4", eta_s=90)
    row = read(db, job)
    assert stop is False
    assert (row.progress, row.message) == (0.25, "fisher 1/4")
    assert row.eta_at is not None
    assert (row.eta_at - clock.at).total_seconds() == 90


def _undispatched(db: Database) -> list[str]:
    with db.write() as session:
        return claims.take_undispatched(session, resend_after_s=60)


def test_messages_are_sent_once_and_again_when_lost(db: Database, tenant_id: str, clock: Clock) -> None:
    job = submit(db, tenant_id)
    assert _undispatched(db) == [job.id]
    assert _undispatched(db) == []
    clock.forward(61)
    assert _undispatched(db) == [job.id]
    with db.write() as session:
        claims.mark_undispatched(session, [job.id])
    assert _undispatched(db) == [job.id]


def test_nothing_is_sent_for_running_or_waiting_jobs(db: Database, tenant_id: str, clock: Clock) -> None:
    job = submit(db, tenant_id)
    claim: Claim = take(db)
    assert _undispatched(db) == []
    with db.write() as session:
        claims.fail(session, claim, error=ERROR, retryable=True)
    assert _undispatched(db) == []
    clock.forward(2)
    assert _undispatched(db) == [job.id]
