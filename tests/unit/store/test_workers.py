"""Tests of the rows by which workers report that they run, and what they have."""

import pytest
from sqlalchemy import text

from permille.store.database import Database
from permille.store.jobs.dispatch import largest_memory, note_worker
from tests.unit.store.conftest import Clock
from tests.unit.store.test_jobs import submit, take

GIB = 2**30


def note(db: Database, name: str, memory_bytes: int | None) -> None:
    with db.write() as session:
        note_worker(session, name=name, exports=False, memory_bytes=memory_bytes)


def largest(db: Database) -> int | None:
    with db.read() as session:
        return largest_memory(session)


def test_the_largest_worker_that_runs_decides(db: Database, clock: Clock) -> None:
    assert largest(db) is None
    note(db, "a", 16 * GIB)
    note(db, "b", 4 * GIB)
    note(db, "c", None)
    assert largest(db) == 16 * GIB
    clock.forward(240)
    note(db, "b", 5 * GIB)
    clock.forward(120)  # a was silent for six minutes
    assert largest(db) == 5 * GIB


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_text_in_place_of_memory_is_no_largest_worker(db: Database) -> None:
    note(db, "a", GIB)
    note(db, "b", GIB)
    with db.write() as session:
        session.execute(text("UPDATE workers SET memory_bytes = 'much' WHERE name = 'b'"))
    assert largest(db) == GIB


def test_a_busy_worker_keeps_the_memory_that_it_had_when_it_was_idle(
    db: Database, clock: Clock, tenant_id: str
) -> None:
    note(db, "a", 16 * GIB)
    submit(db, tenant_id)
    take(db, "a")
    clock.forward(61)
    note(db, "a", GIB)
    assert largest(db) == 16 * GIB
    note(db, "b", 2 * GIB)
    submit(db, tenant_id)
    clock.forward(61)
    note(db, "b", 3 * GIB)
    assert largest(db) == 16 * GIB


def test_a_worker_that_starts_with_a_job_has_no_memory_yet(db: Database, tenant_id: str) -> None:
    submit(db, tenant_id)
    take(db, "a")
    note(db, "a", GIB)
    assert largest(db) is None
