"""Measure claims of jobs in a long queue, and a sweep over waiting builds, on SQLite and PostgreSQL.

    python -m permille_lab.service.queue_times --queued 10000 --ended 1000000 --tenants 100 --waiting 5000

The jobs of every second tenant are uploads of its ten devices. One process claims jobs and does not end them,
so the number of running jobs grows with each claim. The processor time is that of this process. For SQLite it
contains everything, for PostgreSQL only the client. Other load and a slow disk disturb it less.

Then builds are added whose parts have not ended: half of them wait for a mask, the others for a quantization.
The second of two sweeps is measured, since the first compiles SQL. A sweep should write nothing.
"""

import argparse
import gc
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Engine, event, text

from permille.schemas.fields import EXAMPLE_ULID
from permille.schemas.packages import BuildCreate
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
_BUILDS = (
    f"{_JOB} {_NUMBERS} SELECT 'job_b' || n, 'tenant_' || (n % :tenants), NULL, "
    "'build', 'running', :payload, n, 0, 0, 3, 0, 0, 0, 0, 0 FROM numbers"
)
_PARTS = (
    f"{_JOB.replace('updated_at', 'updated_at, parent_id')} {_NUMBERS} "
    "SELECT 'job_' || :kind || n, 'tenant_' || (n % :tenants), NULL, :kind, "
    "CASE WHEN n % 2 = :ended THEN 'succeeded' ELSE 'queued' END, '{}', n, 0, 0, 3, 0, 0, 0, 0, 0, "
    "'job_b' || n FROM numbers"
)
_BUILD = BuildCreate.model_validate(
    {
        "model_id": f"model_{EXAMPLE_ULID}",
        "mask": {"method": "fisher", "corpus_id": f"corpus_{EXAMPLE_ULID}", "density": 0.001},
        "quantization": {"scheme": "nf4"},
    }
).model_dump_json()
_WRITE = re.compile("BEGIN IMMEDIATE|UPDATE|INSERT|DELETE")


def main() -> None:
    """Measure both databases and print two lines for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--queued", type=int, default=10_000)
    parser.add_argument("--ended", type=int, default=1_000_000)
    parser.add_argument("--tenants", type=int, default=100)
    parser.add_argument("--claims", type=int, default=1_000)
    parser.add_argument("--waiting", type=int, default=5_000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        _measure("sqlite", f"sqlite:///{Path(folder) / 'permille.db'}", asked)
    with postgres_server() as server:
        _measure("postgresql", server.url, asked)


def _measure(name: str, url: str, asked: argparse.Namespace) -> None:
    migrate(url)
    db = Database(url)
    try:
        _stock(db, asked)
        print(queue_line(name, db, asked), flush=True)
        _stock_builds(db, asked)
        print(sweep_line(name, db, asked), flush=True)
    finally:
        db.close()


def queue_line(name: str, db: Database, asked: argparse.Namespace) -> str:
    """Claim jobs. Return the line with the result."""
    for _ in range(2):  # a job and an upload: a process's first ones also compile SQL
        _claim(db)
    gc.collect()
    gc.freeze()  # else a collection takes 45 ms, once in some 700 claims
    took = [_claim(db) for _ in range(asked.claims)]
    walls, processors = zip(*took, strict=True)
    rate, slowest = len(walls) / sum(walls), 1000 * max(walls)
    processor = (
        f"processor {1000 * sum(processors) / len(processors):.1f} ms, at most {1000 * max(processors):.1f}"
    )
    stock = f"{asked.queued} queued by {asked.tenants} tenants, {asked.ended} ended"
    return f"queue: {name:10}  {rate:.0f} claims/s  slowest {slowest:.1f} ms  {processor}  ({stock})"


def sweep_line(name: str, db: Database, asked: argparse.Namespace) -> str:
    """Sweep waiting builds twice. Return the line with the second sweep's seconds and writes."""
    claims.sweep(db)
    begun, begun_processor = time.perf_counter(), time.process_time()
    with _counted_writes() as writes:
        claims.sweep(db)
    wall_ms = 1000 * (time.perf_counter() - begun)
    processor_ms = 1000 * (time.process_time() - begun_processor)
    return (
        f"sweep: {name:10}  {wall_ms:.1f} ms  processor {processor_ms:.1f} ms  {len(writes)} writes  "
        f"({asked.waiting} waiting builds)"
    )


@contextmanager
def _counted_writes() -> Iterator[list[str]]:
    """Collect the statements of the block that begin a write transaction, lock a row or change it."""
    found: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if _WRITE.search(statement):
            found.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield found
    finally:
        event.remove(Engine, "before_cursor_execute", note)


def _stock_builds(db: Database, asked: argparse.Namespace) -> None:
    values = {"count": asked.waiting, "tenants": asked.tenants}
    with db.write() as session:
        session.execute(text(_BUILDS), values | {"payload": _BUILD})
        for ended, kind in enumerate(("mask", "quantization")):
            session.execute(text(_PARTS), values | {"kind": kind, "ended": ended})
    with db.write() as session:
        session.execute(text("ANALYZE"))


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
