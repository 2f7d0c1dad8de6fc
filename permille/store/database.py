"""Sessions, transactions and the clock.

A write transaction on SQLite starts with BEGIN IMMEDIATE, so that two writers queue at its start (busy
timeout) and never fail half-way. Keep them short: nothing slow, no file and no network inside. Reads never
wait for writers (WAL).

One order of locks, so that no two transactions wait for each other (PostgreSQL): jobs, a parent before its
parts, the older part first; federation, member, round; run; upload; at last the tenant, for the audit log. A
device's row is locked by what it asks for itself, before its runs. No lock is for the key (`key_share`):
PostgreSQL locks what a row refers to also where a transaction changes that row for the second time. Whoever
takes rows out of this order takes what is free (`skip_locked`): claims, dispatch, the note of whose turn was
last.

Time is the database's: several workers' clocks may differ, leases may not. Tests hand in a clock instead.
"""

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from permille.store.errors import ChangedError
from permille.store.tables import Probe

Clock = Callable[[], datetime]

Answer = TypeVar("Answer")

BUSY_TIMEOUT_MS = 30_000
_PROBE_BYTES = 16 * 1024
ATTEMPTS = 8
LONGEST_PAUSE_S = 0.1
_SQLITE_NOW = text("SELECT CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000")
_POSTGRES_NOW = text("SELECT CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS BIGINT)")


class Database:
    """A pool of connections to one database whose schema is up to date (see `migrations.schema.migrate`).

    Args:
        url: `sqlite:////absolute/path.db` or `postgresql+psycopg://...`.
        clock: replaces the database's clock; for tests.
    """

    def __init__(self, url: str, *, clock: Clock | None = None) -> None:
        self.url = url
        self._clock = clock
        self._engine = make_engine(url)
        self._writer = self._engine.execution_options(permille_begin="IMMEDIATE")

    @contextmanager
    def write(self) -> Iterator[Session]:
        """One write transaction: committed at the end of the block, rolled back by any exception."""
        with self._session(self._writer) as session, session.begin():
            yield session

    def transact(self, work: Callable[[Session], Answer]) -> Answer:
        """Run `work` in a write transaction; again on what is there now, where another changed it first.

        Raises:
            ChangedError, IntegrityError: others were faster every time.
            Whatever `work` raises; nothing is kept then.
        """
        for _ in range(ATTEMPTS - 1):
            try:
                with self.write() as session:
                    return work(session)
            except (ChangedError, IntegrityError):
                time.sleep(random.uniform(0, LONGEST_PAUSE_S))  # noqa: S311 - spreads, keeps no secret
        with self.write() as session:
            return work(session)

    @contextmanager
    def read(self) -> Iterator[Session]:
        """One consistent view.

        What it returns stays readable after the block; changes to it are not written.
        """
        with self._session(self._engine) as session:
            yield session

    def _session(self, engine: Engine) -> Session:
        info = {"clock": self._clock} if self._clock else {}
        return Session(engine, expire_on_commit=False, info=info)

    def close(self) -> None:
        """Close all pooled connections."""
        self._engine.dispose()


def now(session: Session) -> datetime:
    """The time by the database's clock (milliseconds on SQLite), or by the clock that the `Database` was
    given.
    """
    clock: Clock | None = session.info.get("clock")
    if clock is not None:
        return clock()
    sqlite = session.get_bind().dialect.name == "sqlite"
    microseconds = session.execute(_SQLITE_NOW if sqlite else _POSTGRES_NOW).scalar_one()
    return datetime.fromtimestamp(microseconds / 1_000_000, UTC)


def check_writable(db: Database) -> None:
    """Write a row of some pages, for real. Raises SQLAlchemy's DBAPIError as the database reports it."""
    with db.write() as session:
        session.merge(Probe(id=1, filler=os.urandom(_PROBE_BYTES), written_at=now(session)))


def make_engine(url: str) -> Engine:
    """An engine with our rules for SQLite: WAL, full sync, foreign keys, explicit BEGIN. Errors are logged,
    so they name no values: these may be what devices have reported.
    """
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite":
        return create_engine(parsed, pool_pre_ping=True, hide_parameters=True)
    busy = {"timeout": BUSY_TIMEOUT_MS / 1000}
    engine = create_engine(parsed, connect_args=busy, hide_parameters=True)
    event.listen(engine, "connect", _configure_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _configure_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # the driver must not start transactions of its own
    for pragma in (
        f"busy_timeout = {BUSY_TIMEOUT_MS}",
        "journal_mode = WAL",
        "synchronous = FULL",  # a committed job row survives a power cut
        "foreign_keys = ON",
    ):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    mode = connection.get_execution_options().get("permille_begin", "DEFERRED")
    connection.exec_driver_sql(f"BEGIN {mode}")
