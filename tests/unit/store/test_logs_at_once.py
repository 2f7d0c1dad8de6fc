"""Tests of two simultaneous requests about a log: the second waits, and then sees the first one's result."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from permille.schemas.runs import LogForm, LogState
from permille.store import runs
from permille.store.database import Database
from permille.store.errors import NotFoundError
from permille.store.jobs import claims, queue
from permille.store.tables import Job
from tests.unit.store.test_releases import LOG, attach, begin_upload, claimed, fail_for_good, log_of, report

_WAIT_S = 60.0
First = TypeVar("First")
Second = TypeVar("Second")


@dataclass(frozen=True, slots=True)
class Log:
    """A device's run "run", with the requests of the device and of the operator."""

    db: Database
    tenant_id: str
    device_id: str

    def send(self, session: Session) -> str:
        """Attach the log for the device. Return the job's id."""
        upload_id = begin_upload(session, self.tenant_id, self.device_id)
        _, job = runs.attach_log(
            session,
            tenant_id=self.tenant_id,
            device_id=self.device_id,
            run_id="run",
            log=runs.SentLog(form=LogForm.LOG, digest=LOG, size_bytes=9, upload_id=upload_id),
        )
        return job.id

    def delete(self, session: Session) -> str | None:
        """Delete the log for the device."""
        return runs.delete_log(session, tenant_id=self.tenant_id, run_id="run", device_id=self.device_id)

    def delete_run(self, session: Session) -> str | None:
        """Delete the run for the device."""
        return runs.delete_run(session, tenant_id=self.tenant_id, run_id="run", device_id=self.device_id)

    def retry(self, session: Session) -> str:
        """Retry the newest job for the operator."""
        return queue.retry(session, tenant_id=self.tenant_id, job_id=self.job.id).id

    def cancel(self, session: Session) -> str:
        """Cancel the newest job for the operator."""
        return queue.request_cancel(session, tenant_id=self.tenant_id, job_id=self.job.id).id

    @property
    def job(self) -> Job:
        """Newest job of the tenant."""
        with self.db.read() as session:
            return queue.list_jobs(session, tenant_id=self.tenant_id).items[0]

    @property
    def states(self) -> tuple[str | None, str]:
        """States of the log and of its job."""
        return log_of(self.db, self.tenant_id)[0], self.job.state


@pytest.fixture
def log(db: Database, tenant_id: str, device_id: str) -> Log:
    """Return a reported run. Its log has not arrived."""
    report(db, tenant_id, device_id)
    return Log(db, tenant_id, device_id)


@pytest.fixture
def pending(log: Log) -> Log:
    """Return a run with a log that waits for a replay."""
    attach(log.db, log.tenant_id, log.device_id)
    return log


@pytest.fixture
def undecided(pending: Log) -> Log:
    """Return a run after the failure of its log's replay."""
    fail_for_good(pending.db, pending.tenant_id, claimed(pending.db))
    return pending


def at_once(
    db: Database, first: Callable[[Session], First], second: Callable[[Session], Second]
) -> tuple[First, Second]:
    """Begin `second` when `first` is done, but not committed. Return both results."""

    with ThreadPoolExecutor(max_workers=1) as pool:
        with db.write() as session:
            answer = first(session)
            session.flush()
            other = begun(db, pool, second)
        return answer, other.result(_WAIT_S)


def begun(db: Database, pool: ThreadPoolExecutor, work: Callable[[Session], Second]) -> Future[Second]:
    """Begin a transaction in another thread. Return when it waits for a lock, or has ended."""

    def run() -> Second:
        with db.write() as session:
            return work(session)

    other = pool.submit(run)
    wait_until_it_waits(db, other)
    return other


def wait_until_it_waits(db: Database, other: Future[Second]) -> None:
    """Wait until `other` waits for a lock, or has ended.

    On SQLite this returns at once, because a second writer waits at its beginning.
    """
    if not db.url.startswith("postgresql"):
        return
    query = text("SELECT count(*) FROM pg_locks WHERE NOT granted")
    deadline = time.monotonic() + _WAIT_S
    while not other.done():
        with db.read() as session:
            if session.execute(query).scalar_one():
                return
        assert time.monotonic() < deadline, "expected the second request to wait, or to end"
        time.sleep(0.01)


@pytest.mark.parametrize("first", [Log.send, Log.retry])
def test_an_undecided_log_is_queued_again_once_and_nobody_is_refused(
    undecided: Log, first: Callable[[Log, Session], str]
) -> None:
    answers = at_once(undecided.db, lambda session: first(undecided, session), undecided.send)
    assert answers == (undecided.job.id, undecided.job.id)
    assert undecided.states == ("pending", "queued")


def test_a_first_log_that_is_sent_twice_has_one_job(log: Log) -> None:
    first, second = at_once(log.db, log.send, log.send)
    assert first == second
    with log.db.read() as session:
        assert len(queue.list_jobs(session, tenant_id=log.tenant_id).items) == 1


def test_a_log_that_comes_while_its_replay_is_cancelled_is_queued_again(pending: Log) -> None:
    at_once(pending.db, pending.cancel, pending.send)
    assert pending.states == ("pending", "queued")


def test_a_log_that_comes_while_it_is_deleted_is_a_new_one(pending: Log) -> None:
    earlier = pending.job.id
    _, job_id = at_once(pending.db, pending.delete, pending.send)
    assert job_id != earlier
    assert (pending.job.id, pending.states) == (job_id, ("pending", "queued"))


def test_a_log_that_comes_while_its_run_is_deleted_is_not_kept(pending: Log) -> None:
    with pytest.raises(NotFoundError):
        at_once(pending.db, pending.delete_run, pending.send)
    assert pending.job.state == "cancelled"


def test_a_verdict_that_comes_while_its_log_is_deleted_goes_with_it(pending: Log) -> None:
    held = claimed(pending.db)

    def publish(session: Session) -> None:
        claims.check(session, held)
        runs.finish_log(
            session,
            tenant_id=pending.tenant_id,
            run_id="run",
            log_digest=LOG,
            verdict=runs.LogVerdict(state=LogState.VERIFIED, state_digest=LOG),
        )
        claims.complete(session, held, result_id="run")

    _, upload_id = at_once(pending.db, publish, pending.delete)
    assert upload_id is not None
    with pending.db.read() as session:
        row = runs.get(session, tenant_id=pending.tenant_id, run_id="run")
    assert (row.log_state, row.log_digest, row.state_digest) == (None, None, None)
