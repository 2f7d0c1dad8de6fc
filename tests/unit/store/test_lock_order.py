"""Tests of lock order: if two transactions overlap, only one of them waits (PostgreSQL)."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from typing import Any

import pytest
from sqlalchemy.orm import Session

from permille.schemas.runs import LogState
from permille.store import runs
from permille.store.database import Database
from permille.store.jobs import claims, transitions
from permille.store.tables import Job
from tests.unit.store.test_logs_at_once import begun
from tests.unit.store.test_parents import parts, submit_build, take
from tests.unit.store.test_releases import LOG, attach, claimed

METRICS: dict[str, object] = {"release": "tiny", "version": 1}
Work = Callable[[Session], object]


class Meanwhile:
    """Work in another transaction, begun in the middle of a first one."""

    def __init__(self, db: Database, pool: ThreadPoolExecutor, work: Work) -> None:
        self._db, self._pool, self._work = db, pool, work
        self.other: Future[object] | None = None

    def begin(self) -> None:
        self.other = begun(self._db, self._pool, self._work)

    def end(self) -> None:
        assert self.other is not None, "expected it to be begun"
        self.other.result(30)


def test_a_part_may_be_claimed_while_its_parent_is_stopped(
    db: Database, tenant_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = submit_build(db, tenant_id)
    mask, quantization = (parts(db, build)[kind] for kind in ("mask", "quantization"))
    held = take(db, mask.id)
    assert held is not None
    error = {"type": "T", "message": "bad input"}
    note = transitions._note_turn
    with ThreadPoolExecutor(1) as pool:
        stop = Meanwhile(db, pool, lambda session: claims.fail(session, held, error=error, retryable=False))

        def note_and_stop(session: Session, job: Job, at: datetime) -> None:
            if job.id == quantization.id:  # the job's row is locked, the tenant's row is not yet locked
                stop.begin()
            note(session, job, at)

        monkeypatch.setattr(transitions, "_note_turn", note_and_stop)
        second = take(db, quantization.id)
        stop.end()
    assert second is not None
    left = parts(db, build)
    assert (left["mask"].state, left["quantization"].state) == ("failed", "running")
    assert left["quantization"].cancel_requested_at is not None


def test_a_device_may_report_while_the_replay_of_its_last_run_ends(
    db: Database, tenant_id: str, device_id: str
) -> None:
    def report(run_id: str) -> Work:
        who: dict[str, Any] = {"tenant_id": tenant_id, "device_id": device_id}
        return lambda session: runs.report(session, **who, run_id=run_id, metrics=dict(METRICS))

    with db.write() as session:
        report("run")(session)
    attach(db, tenant_id, device_id)
    held = claimed(db)
    verdict = runs.LogVerdict(state=LogState.VERIFIED, state_digest=LOG)
    with ThreadPoolExecutor(1) as pool:
        other = Meanwhile(db, pool, report("next"))
        with db.write() as session:
            claims.check(session, held)
            runs.finish_log(session, tenant_id=tenant_id, run_id="run", log_digest=LOG, verdict=verdict)
            session.flush()  # the run's row is locked, the device's row is not yet locked
            other.begin()
            claims.complete(session, held, result_id="run")
        other.end()
    with db.read() as session:
        newest = {
            name: runs.get(session, tenant_id=tenant_id, run_id=name).newest for name in ("run", "next")
        }
    assert newest == {"run": False, "next": True}
