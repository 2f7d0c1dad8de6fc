"""Logs of a database that an earlier version kept: what was not judged becomes undecided."""

from collections.abc import Iterator

import pytest
from sqlalchemy import MetaData, Table

from permille.store import jobs, runs
from permille.store.database import Database, make_engine
from permille.store.schema import migrate

WORKER_LOST = "replay-failed: attempt 3 of 3: worker w stopped renewing its lease"
VERDICT = "state-differs: expected the device's a, got b by replay"


# The log's state and reason, its job's state; and what the log is afterwards.
LOGS = {
    "lost": (("refused", WORKER_LOST, "dead"), ("undecided", WORKER_LOST)),
    "failed": (("refused", "replay-failed: no disk", "failed"), ("undecided", "replay-failed: no disk")),
    "queued-again": (("refused", "replay-failed: no disk", "queued"), ("pending", None)),
    "at-work-again": (("refused", "replay-failed: no disk", "running"), ("pending", None)),
    "cancelled": (("pending", None, "cancelled"), ("undecided", "replay-cancelled")),
    "dead": (("pending", None, "dead"), ("undecided", "replay-failed: dead")),
    "judged": (("refused", VERDICT, "succeeded"), ("refused", VERDICT)),
    "verified": (("verified", None, "succeeded"), ("verified", None)),
    "waiting": (("pending", None, "queued"), ("pending", None)),
    "running": (("pending", None, "running"), ("pending", None)),
    "deleted": ((None, None, "cancelled"), (None, None)),
}


def fill(url: str) -> None:
    """Rows as they are at revision 0004, one run with a replay job for each of `LOGS`."""
    engine, tables = make_engine(url), MetaData()
    tables.reflect(engine)

    with engine.begin() as connection:

        def add(table: str, **values: object) -> None:
            connection.execute(_table(tables, table).insert().values(created_at=1, **values))

        add("tenants", id="tenant", name="acme")
        add("devices", id="dev", tenant_id="tenant", public_key="k", name="n", release="tiny", alias="stable")
        for name, ((state, reason, job_state), _) in LOGS.items():
            add(
                "jobs",
                id=f"job_{name}",
                tenant_id="tenant",
                kind="replay",
                state=job_state,
                payload={"run_id": name},
                progress=0.0,
                attempt=1,
                max_attempts=3,
                fence=1,
                event_seq=0,
                available_at=1,
                updated_at=1,
            )
            add(
                "runs",
                tenant_id="tenant",
                run_id=name,
                device_id="dev",
                metrics={},
                log_state=state,
                log_reason=reason,
                log_digest=None if state is None else "sha256:" + "a" * 64,
                log_job_id=f"job_{name}",
            )
    engine.dispose()


def _table(tables: MetaData, name: str) -> Table:
    return tables.tables[name]


@pytest.fixture
def migrated(url: str) -> Iterator[Database]:
    """A database of revision 0004, brought up to date."""
    migrate(url, revision="0004")
    fill(url)
    migrate(url)
    db = Database(url)
    yield db
    db.close()


def found(db: Database) -> dict[str, tuple[str | None, str | None]]:
    with db.read() as session:
        rows = runs.list_runs(session, tenant_id="tenant", limit=50).items
    return {row.run_id: (row.log_state, row.log_reason) for row in rows}


def test_what_was_not_judged_is_undecided_and_verdicts_stay(migrated: Database) -> None:
    assert found(migrated) == {name: after for name, (_, after) in LOGS.items()}


def test_an_undecided_log_of_an_earlier_version_can_be_retried(migrated: Database) -> None:
    with migrated.write() as session:
        jobs.retry(session, tenant_id="tenant", job_id="job_lost")
    assert found(migrated)["lost"] == ("pending", None)
