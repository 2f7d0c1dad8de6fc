"""Measure claims of jobs in a long queue, on SQLite and PostgreSQL: claims per second, and the slowest claim.

    python -m permille_lab.service.queue_times --queued 10000 --ended 1000000 --tenants 100

The jobs of every second tenant are uploads of its ten devices. One process claims jobs and does not end them,
so the number of running jobs grows with each claim. The processor time is that of this process. For SQLite it
contains everything, for PostgreSQL only the client. Other load and a slow disk disturb it less.
"""

import argparse
import gc
import tempfile
import time
from pathlib import Path

from sqlalchemy import text

from permille.store.database import Database
from permille.store.jobs import claims
from permille.store.migrations.schema import migrate
from tests.unit.store.postgres import postgres_server

_NUMBERS = "WITH RECURSIVE numbers(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM numbers WHERE n + 1 < :count) "
_JOB = (
    "INSERT INTO jobs (id, tenant_id, device_id, kind, state, payload, request_digest, progress, attempt, "
    "max_attempts, fence, event_seq, available_at, created_at, updated_at) "
)
_TENANTS = f"INSERT INTO tenants (id, name, created_at) {_NUMBERS} SELECT 'tenant_' || n, n, 0 FROM numbers"
_DEVICES = (
    "INSERT INTO devices (id, tenant_id, public_key, name, release, alias, tags, own_tags, created_at) "
    f"{_NUMBERS} SELECT 'dev_' || n, 'tenant_' || (n % :tenants), n, n, 'r', 'stable', '[]', '[]', 0 "
    "FROM numbers"
)
# Jobs are assigned to the tenants in turn. Those of every second tenant are uploads, of its devices in turn.
_QUEUED = (
    f"{_JOB} {_NUMBERS} SELECT 'job_q' || n, 'tenant_' || (n % :tenants), "
    "CASE WHEN n % :tenants % 2 = 1 THEN 'dev_' || (n / :tenants % 10 * :tenants + n % :tenants) END, "
    "'mask', 'queued', '{}', n, 0, 0, 3, 0, 0, n, 0, 0 FROM numbers"
)
_ENDED = (
    f"{_JOB} {_NUMBERS} SELECT 'job_e' || n, 'tenant_' || (n % :tenants), NULL, "
    "'mask', 'succeeded', '{}', n, 1, 1, 3, 1, 0, n, 0, 0 FROM numbers"
)


def main() -> None:
    """Measure both databases and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--queued", type=int, default=10_000)
    parser.add_argument("--ended", type=int, default=1_000_000)
    parser.add_argument("--tenants", type=int, default=100)
    parser.add_argument("--claims", type=int, default=1_000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(queue_line("sqlite", f"sqlite:///{Path(folder) / 'permille.db'}", asked), flush=True)
    with postgres_server() as server:
        print(queue_line("postgresql", server.url, asked), flush=True)


def queue_line(name: str, url: str, asked: argparse.Namespace) -> str:
    """Fill an empty database and claim jobs. Return the line with the result."""
    migrate(url)
    db = Database(url)
    try:
        _stock(db, asked)
        for _ in range(2):  # a job and an upload: a process's first ones also compile SQL
            _claim(db)
        gc.collect()
        gc.freeze()  # else a collection takes 45 ms, once in some 700 claims
        took = [_claim(db) for _ in range(asked.claims)]
    finally:
        db.close()
    walls, processors = zip(*took, strict=True)
    rate, slowest = len(walls) / sum(walls), 1000 * max(walls)
    processor = (
        f"processor {1000 * sum(processors) / len(processors):.1f} ms, at most {1000 * max(processors):.1f}"
    )
    stock = f"{asked.queued} queued by {asked.tenants} tenants, {asked.ended} ended"
    return f"queue: {name:10}  {rate:.0f} claims/s  slowest {slowest:.1f} ms  {processor}  ({stock})"


def _stock(db: Database, asked: argparse.Namespace) -> None:
    with db.write() as session:
        for statement, count in (
            (_TENANTS, asked.tenants),
            (_DEVICES, 10 * asked.tenants),
            (_QUEUED, asked.queued),
            (_ENDED, asked.ended),
        ):
            session.execute(text(statement), {"count": count, "tenants": asked.tenants})
    with db.write() as session:
        session.execute(text("ANALYZE"))


def _claim(db: Database) -> tuple[float, float]:
    """Claim a job. Return its wall-clock and processor seconds."""
    begun, begun_processor = time.perf_counter(), time.process_time()
    with db.write() as session:
        claim = claims.claim(session, worker="bench", lease_s=600)
    took = time.perf_counter() - begun, time.process_time() - begun_processor
    assert claim is not None
    return took


if __name__ == "__main__":
    main()
