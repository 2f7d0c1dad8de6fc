"""Time each SQL statement over a store with many rows in every table.

    python -m tests.large_store --rows 1000000

Print a line for each case and database: the wall time of its second run. Two tenants share the rows of each
table. The ages of the rows are between zero and a year. `make bench-queue` measures the claims of jobs.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Final

from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from permille.schemas.access import FIRST_DIGEST, RetentionRule
from permille.schemas.fields import EXAMPLE_ULID
from permille.schemas.jobs import JobKind, JobState
from permille.store import artifacts, audit, devices, inputs, releases, rows, runs, tables, uploads
from permille.store.database import Database, now
from permille.store.errors import ConflictError, NotFoundError
from permille.store.fleet.comparison import compare
from permille.store.fleet.summary import summary
from permille.store.jobs import claims, queue
from permille.store.jobs.figures import read_figures
from permille.store.migrations.schema import migrate
from permille.store.retention import rules
from permille.store.rows import Window
from permille.store.runs import RunFilter
from tests.artifacts import QUOTA
from tests.unit.store.postgres import postgres_server

TENANT: Final = "tenant_0"
_TENANTS: Final = 2
_YEAR_US: Final = 365 * 86_400_000_000
_NUMBERS = "WITH RECURSIVE numbers(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM numbers WHERE n + 1 < :count) "
_OWNER = "'tenant_' || (n % 2)"
_AT = "CAST(:now AS BIGINT) - CAST(:count - n AS BIGINT) * CAST(:step AS BIGINT)"
_STOCK: Final = (
    (
        "devices (id, tenant_id, public_key, name, agent_version, release, alias, version, engine, "
        "last_seen_at, created_at, tags, own_tags)",
        f"'dev_' || n, {_OWNER}, n, n, '0.1.' || (n % 3), 'r', 'stable', n % 4 + 1, 'light', {_AT}, {_AT}, "
        "'[]', '[]'",
    ),
    (
        "models (id, tenant_id, name, source, created_at)",
        f"'model_' || n, {_OWNER}, 'm' || n, '{{}}', {_AT}",
    ),
    (
        "jobs (id, tenant_id, device_id, kind, state, payload, request_digest, progress, attempt, "
        "max_attempts, fence, event_seq, available_at, created_at, updated_at, ended_at)",
        f"'job_' || n, {_OWNER}, CASE WHEN n % 4 < 2 THEN 'dev_' || n END, "
        "CASE WHEN n % 4 < 2 THEN 'replay' ELSE 'mask' END, "
        "CASE WHEN n % 100 = 0 THEN 'failed' WHEN n % 1000 = 3 THEN 'queued' ELSE 'succeeded' END, "
        f"'{{}}', n, 1, 1, 3, 1, 0, {_AT}, {_AT}, {_AT}, CASE WHEN n % 1000 <> 3 THEN {_AT} END",
    ),
    (
        "uploads (id, tenant_id, device_id, run_id, state, size_bytes, created_at)",
        f"'upload_' || n, {_OWNER}, 'dev_' || n, n, CASE WHEN n % 1000 < 2 THEN 'coming' ELSE 'held' END, 1, "
        f"{_AT}",
    ),
    (
        "runs (tenant_id, run_id, device_id, metrics, newest, release, version, outcome, gain, loss, rise, "
        "peak_rss_bytes, log_upload_id, log_sent_at, log_job_id, created_at, ended_at)",
        f"{_OWNER}, 'run_' || n, 'dev_' || n, '{{}}', n % 10 < 2, 'r', n % 4 + 1, 'adopted', n % 97, n % 89, "
        f"n % 83, n, CASE WHEN n % 4 < 2 THEN 'upload_' || n END, CASE WHEN n % 4 < 2 THEN {_AT} END, "
        f"CASE WHEN n % 4 < 2 THEN 'job_' || n END, {_AT}, {_AT}",
    ),
    (
        "artifacts (id, tenant_id, kind, job_id, model_id, request, digest, size_bytes, provenance, "
        "created_at)",
        f"'mask_' || n, {_OWNER}, CASE WHEN n % 8 < 2 THEN 'package' ELSE 'mask' END, 'job_' || n, "
        f"'model_' || (n % 100), '{{}}', n, 1, '{{}}', {_AT}",
    ),
    (
        "artifact_blobs (artifact_id, position, tenant_id, role, media_type, digest, size_bytes)",
        f"'mask_' || n, 0, {_OWNER}, 'mask', 'x', 'sha256:' || n, 1",
    ),
    (
        "artifact_sources (artifact_id, source_id, tenant_id)",
        f"'mask_' || n, 'model_' || (n % 100), {_OWNER}",
    ),
    (
        "audit_entries (tenant_id, seq, token_id, action, subject, digest, created_at)",
        f"{_OWNER}, n, 'operator_{EXAMPLE_ULID}', 'a', 's', '{FIRST_DIGEST}', {_AT}",
    ),
    (
        "device_tokens (token_hash, tenant_id, device_id, expires_at, created_at)",
        f"n, {_OWNER}, 'dev_' || n, CAST(:now AS BIGINT) + 3600000000, {_AT}",
    ),
    (
        "device_nonces (nonce_hash, tenant_id, device_id, expires_at, created_at)",
        f"n, {_OWNER}, 'dev_' || n, CAST(:now AS BIGINT) + 3600000000, {_AT}",
    ),
)
LARGE: Final = tuple(table.split()[0] for table, _ in _STOCK)


def stock(db: Database, count: int) -> None:
    """Add `count` rows to each table, and update the statistics of the database."""
    with db.write() as session:
        for number in range(_TENANTS):
            session.add(tables.Tenant(id=f"tenant_{number}", name=str(number), created_at=now(session)))
        session.flush()
        values = {"count": count, "now": _microseconds(now(session)), "step": _YEAR_US // count}
        for table, selected in _STOCK:
            session.execute(text(f"INSERT INTO {table} {_NUMBERS} SELECT {selected} FROM numbers"), values)
        for version in range(1, 5):
            package = session.get_one(tables.Artifact, f"mask_{8 * version}")
            releases.publish(session, name="r", package=package, version=version)
    with db.write() as session:
        session.execute(text("ANALYZE"))
    # Without VACUUM, an index-only scan has to look at the table as well.
    if db.url.startswith("postgresql"):
        engine = create_engine(db.url, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text("VACUUM"))
        engine.dispose()


def _microseconds(at: datetime) -> int:
    return int(at.timestamp() * 1e6)


@dataclass(frozen=True, slots=True)
class Case:
    """Statements over large tables, and the indexes that must serve them.

    Attributes:
        run: Function that runs the statements.
        by: Names of indexes. The index of a primary key has the name of its table, because SQLite makes its
            own name.
        whole: Tables that may be read as a whole, because they are counted by columns without an index.
    """

    run: Callable[[Database], object]
    by: tuple[str, ...]
    whole: tuple[str, ...] = ()


def _reading(work: Callable[[Session], object], *by: str) -> Case:
    def run(db: Database) -> object:
        with db.read() as session:
            return work(session)

    return Case(run, by)


def _writing(work: Callable[[Session], object], *by: str) -> Case:
    def run(db: Database) -> None:
        with suppress(ConflictError, NotFoundError), db.write() as session:
            work(session)

    return Case(run, by)


def _listing(table: type[tables.Named]) -> Callable[[Session], object]:
    return lambda session: rows.list_all(session, table, tenant_id=TENANT)


def _letting_go(**rule: int) -> Callable[[Session], object]:
    return lambda session: rules._let_go(session, TENANT, RetentionRule(**rule))


def _begin_upload(session: Session) -> None:
    uploads.begin(session, tenant_id=TENANT, device_id="dev_8", run_id="run_8", quota=QUOTA)
    uploads.check_runs(session, device_id="dev_8", quota=QUOTA)


def _list_jobs(session: Session, wanted: queue.JobFilter) -> None:
    queue.list_jobs(session, tenant_id=TENANT, wanted=wanted)


def _list_runs(session: Session) -> None:
    """Read the newest page, then a page from the middle of the list."""
    page = runs.list_runs(session, tenant_id=TENANT)
    moment = int(page.items[-1].created_at.timestamp() * 1e6) - _YEAR_US // 2
    runs.list_runs(session, tenant_id=TENANT, window=Window(cursor=f"{moment}.{page.items[-1].run_id}"))


CASES: Final[dict[str, Case]] = {
    "metrics": _reading(
        read_figures,
        *("ix_jobs_unsuccessful", "ix_artifact_blobs_digest", "ix_devices_active"),
    ),
    "fleet": replace(
        _reading(
            lambda session: summary(session, tenant_id=TENANT),
            *("ix_devices_active", "ix_runs_newest", "ix_runs_ended_at"),
        ),
        whole=("devices",),
    ),
    "comparison": _reading(
        lambda session: compare(session, tenant_id=TENANT, name="r", version=3, against=1), "ix_runs_newest"
    ),
    "told": _reading(
        lambda session: devices.count_told(session, tenant_id=TENANT, release="r", version=1),
        "ix_devices_active",
    ),
    "jobs": _reading(lambda session: queue.list_jobs(session, tenant_id=TENANT), "ix_jobs_tenant_id_id"),
    "jobs-of-kind": _reading(
        lambda session: _list_jobs(session, queue.JobFilter(kind=JobKind.EXPORT)),
        "ix_jobs_kind",
    ),
    "jobs-in-state": _reading(
        lambda session: _list_jobs(session, queue.JobFilter(state=JobState.DEAD)),
        "ix_jobs_state",
    ),
    "runs": _reading(_list_runs, "ix_runs_ended_at"),
    "runs-of-device": _reading(
        lambda session: runs.list_runs(session, tenant_id=TENANT, wanted=RunFilter(device_id="dev_8")),
        "ix_runs_device",
    ),
    "packages": _reading(
        lambda session: artifacts.list_artifacts(session, tenant_id=TENANT, kind=JobKind.PACKAGE),
        "ix_artifacts_kind",
    ),
    "masks-of-model": _reading(
        lambda session: artifacts.list_artifacts(
            session, tenant_id=TENANT, kind=JobKind.MASK, model_id="model_4"
        ),
        "ix_artifacts_model",
    ),
    "devices": _reading(_listing(tables.Device), "ix_devices_tenant_id_id"),
    "models": _reading(_listing(tables.Model), "ix_models_tenant_id_id"),
    "audit": _reading(
        lambda session: audit.entries_after(session, tenant_id=TENANT, seq=100, limit=50), "audit_entries"
    ),
    "model-name": _reading(
        lambda session: inputs.check_name(session, tables.Model, TENANT, "new"), "ix_models_tenant_id_name"
    ),
    "model-removal": _writing(
        lambda session: inputs.remove(session, tables.Model, tenant_id=TENANT, row_id="model_1000"),
        *("ix_artifact_sources_source_id", "ix_jobs_state", "ix_artifacts_made_model_id"),
    ),
    "mask-removal": _writing(
        lambda session: artifacts.remove(session, tenant_id=TENANT, kind=JobKind.MASK, key="mask_1204"),
        *("ix_jobs_state", "ix_artifact_sources_source_id"),
    ),
    "old-results": _writing(
        _letting_go(result_days=100, keep_newest=3),
        *("ix_artifacts_kind", "ix_artifacts_model", "ix_jobs_state"),
    ),
    "old-logs": _writing(_letting_go(log_days=100), "ix_runs_log_sent_at"),
    "old-reports": _writing(_letting_go(report_days=200), *("ix_runs_created_at", "ix_runs_device")),
    "old-jobs": _writing(
        _letting_go(job_days=300),
        *("ix_jobs_ended", "ix_artifacts_job_id", "ix_runs_log_job_id", "ix_rounds_job_id"),
    ),
    "upload": _writing(
        _begin_upload, *("ix_jobs_device", "ix_runs_device", "ix_uploads_device_id_created_at")
    ),
    "sweep-jobs": Case(claims.sweep, ("ix_jobs_running",)),
    "sweep-tokens": _writing(
        devices.purge_expired, *("ix_device_tokens_expires_at", "ix_device_nonces_expires_at")
    ),
}
"""The statements of lists, fleet, metrics, retention and sweep. `make bench-queue` measures claims."""


def main() -> None:
    """Measure both databases. Print the slowest case first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    count = parser.parse_args().rows
    with tempfile.TemporaryDirectory() as folder:
        _measure("sqlite", f"sqlite:///{Path(folder) / 'permille.db'}", count)
    with postgres_server() as server:
        _measure("postgresql", server.url, count)


def _measure(name: str, url: str, count: int) -> None:
    migrate(url)
    db = Database(url)
    stock(db, count)
    for case, took_s in sorted(_times(db).items(), key=lambda pair: -pair[1]):
        print(f"store: {name:10} {case:15} {1000 * took_s:8.1f} ms  ({count} rows a table)", flush=True)
    db.close()


def _times(db: Database) -> dict[str, float]:
    found = {}
    for name, case in CASES.items():
        for _ in range(2):  # the first run also compiles the statements and reads the disk
            begun = time.perf_counter()
            case.run(db)
            found[name] = time.perf_counter() - begun
    return found


if __name__ == "__main__":
    main()
