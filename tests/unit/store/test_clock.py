"""Tests of a clock that was a year ahead and is corrected: nothing waits for a year."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from permille.package.blobs import BlobFolder
from permille.store import runs, uploads
from permille.store.database import Database
from permille.store.jobs import claims
from permille.store.jobs.claims import pull_back
from permille.store.retention import collection
from permille.store.tables import Tenant, Upload
from tests.artifacts import QUOTA
from tests.unit.store.conftest import Clock
from tests.unit.store.test_jobs import read, submit, take
from tests.unit.store.test_parents import parts, submit_build

YEAR_S = 366 * 86_400.0
METRICS: dict[str, object] = {"release": "tiny", "version": 1}


def test_a_job_of_the_wrong_time_is_due_and_a_lost_lease_ends(
    db: Database, tenant_id: str, clock: Clock
) -> None:
    lost, waiting = submit(db, tenant_id), submit(db, tenant_id)
    clock.forward(YEAR_S)
    assert take(db, "lost").job_id == lost.id
    with db.write() as session:
        claim = claims.claim(session, worker="w", lease_s=30)
        assert claim is not None
        claims.release(session, claim)
    clock.forward(-YEAR_S)
    with db.write() as session:
        assert claims.claim(session, worker="w", lease_s=30) is None
    assert pull_back(db) == 2
    assert take(db).job_id == waiting.id
    assert claims.sweep(db).requeued == 0
    clock.forward(31)
    assert claims.sweep(db).requeued == 2
    assert read(db, lost).state == "queued"
    assert pull_back(db) == 0


def test_a_part_that_waits_for_another_waits_for_no_year(db: Database, tenant_id: str, clock: Clock) -> None:
    build = submit_build(db, tenant_id, attempts=2)
    clock.forward(YEAR_S)
    mask = take(db)
    assert mask.kind == "mask"
    with db.write() as session:
        claims.fail(session, mask, error={"type": "T", "message": "no hub"}, retryable=True)
    clock.forward(-YEAR_S)
    pull_back(db)
    clock.forward(10)
    assert {take(db).job_id for _ in range(2)} == {part.id for part in parts(db, build).values()}


def test_who_was_served_by_the_wrong_time_is_served_again(db: Database, tenant_id: str, clock: Clock) -> None:
    submit(db, tenant_id)
    clock.forward(YEAR_S)
    take(db)
    clock.forward(-YEAR_S)
    pull_back(db)
    with db.read() as session:
        assert session.get_one(Tenant, tenant_id).served_at == clock.at


def test_what_a_device_sent_at_the_wrong_time_counts_for_no_day(
    db: Database, tenant_id: str, device_id: str, clock: Clock, tmp_path: Path
) -> None:
    quota, of_device = replace(QUOTA, runs_a_day=2, uploads_a_day=2), _of(tenant_id, device_id)
    clock.forward(YEAR_S)
    with db.write() as session:
        for number in range(3):
            runs.report(session, **of_device, run_id=f"run {number}", metrics=METRICS)
        coming = [
            uploads.begin(session, **of_device, run_id=f"run {number}", quota=QUOTA) for number in range(3)
        ]
    clock.forward(-YEAR_S)
    with db.write() as session:
        runs.report(session, **of_device, run_id="now", metrics=METRICS)
        uploads.check_runs(session, device_id=device_id, quota=quota)
        uploads.begin(session, **of_device, run_id="now", quota=quota)
    uploads.sweep(db, BlobFolder(tmp_path))
    with db.read() as session:
        assert {session.get_one(Upload, row.id).state for row in coming} == {"erased"}


def _of(tenant_id: str, device_id: str) -> dict[str, Any]:
    return {"tenant_id": tenant_id, "device_id": device_id}


def test_a_collection_of_the_wrong_time_holds_none_up(db: Database, clock: Clock) -> None:
    clock.forward(YEAR_S)
    assert collection.take_turn(db, 3600)
    clock.forward(-YEAR_S)
    assert collection.take_turn(db, 3600)
    assert not collection.take_turn(db, 3600)
