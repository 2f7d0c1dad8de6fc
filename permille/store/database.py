"""Sessions, transactions and the clock of the database.

On SQLite, a write transaction starts with BEGIN IMMEDIATE. A second writer therefore waits before its
transaction starts (for at most the busy timeout), and no transaction fails halfway. Readers never wait for
writers, because the database uses a write-ahead log (WAL).

Keep write transactions short, without file or network access. Only those of
`permille.store.retention.collection` look for blobs, and delete them.

All transactions take locks in one order, so that PostgreSQL finds no deadlock:

1. jobs, a parent before its parts, older parts first;
2. federation, member, round;
3. rollout, then its reports;
4. run;
5. upload;
6. tenant, for the audit log.

A request of a device locks the device's row before its runs. Most locks are FOR NO KEY UPDATE (SQLAlchemy's
`key_share=True`), so that a transaction which only adds a reference to a locked row need not wait. Code that
cannot keep this order takes only rows that are free (`skip_locked`): claims, dispatch, and updates of
`served_at`.

All stored times come from the database, since the clocks of several workers may differ. Tests pass a clock
instead.
"""

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, TypeVar, TypeVarTuple

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    Row,
    Select,
    bindparam,
    create_engine,
    event,
    func,
    literal,
    select,
)
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import Session
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from permille.store.errors import ChangedError
from permille.store.tables import Instant, Probe

Clock = Callable[[], datetime]

Answer = TypeVar("Answer")
Columns = TypeVarTuple("Columns")

# The longest time that a writer of SQLite waits for another writer.
BUSY_TIMEOUT_MS = 30_000
# Timeout in seconds for a connection to PostgreSQL, unless the address sets `?connect_timeout=`.
CONNECT_S = 10
_PROBE_BYTES = 16 * 1024
# SQLSTATE `disk_full`.
_POSTGRES_FULL = "53100"
ATTEMPTS = 8
LONGEST_PAUSE_S = 0.1
# The size of the pool, and how many connections may be open beyond it. Their sum is 41: one for each of the
# 40 threads of the API (anyio's default), and one for the health check, which has its own thread.
_CONNECTIONS, _MORE_CONNECTIONS = 16, 25


class _Moment(FunctionElement[datetime]):
    """The SQL expression of the database's current time."""

    type = Instant()
    inherit_cache = True


@compiles(_Moment, "sqlite")
def _sqlite_moment(_element: _Moment, _compiler: SQLCompiler, **_: Any) -> str:
    # 2440587.5 is the Julian day of 1970-01-01. Days times 86,400,000 are milliseconds.
    return "(CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000)"


@compiles(_Moment, "postgresql")
def _postgresql_moment(_element: _Moment, _compiler: SQLCompiler, **_: Any) -> str:
    # PostgreSQL's `now()` would return the time at which the transaction began.
    return "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS BIGINT)"


# The time that `now` returns, as an expression for statements of `Database.first`.
NOW = func.coalesce(bindparam("clock", type_=Instant()), _Moment())
_TELL_NOW = select(_Moment())


class Database:
    """A connection pool to one database with an up-to-date schema (see `migrations.schema.migrate`).

    Args:
        url: `sqlite:////absolute/path.db` or `postgresql+psycopg://...`.
        clock: replaces the database's clock in tests.

    Example:

        db = Database("sqlite:////var/lib/permille/permille.db")
        with db.read() as session:
            page = rows.list_all(session, tables.Model, tenant_id=tenant.id)
    """

    def __init__(self, url: str, *, clock: Clock | None = None) -> None:
        self.url = url
        self._clock = clock
        self._engine = make_engine(url)
        self._writer = self._engine.execution_options(permille_begin="IMMEDIATE")

    @contextmanager
    def write(self) -> Iterator[Session]:
        """Open a write transaction. The end of the block commits it, and an exception rolls it back."""
        with self._session(self._writer) as session, session.begin():
            yield session

    def transact(self, work: Callable[[Session], Answer]) -> Answer:
        """Run `work` in a write transaction. If another transaction changed the same rows first, run
        `work` again.

        Raises:
            ChangedError, IntegrityError: other transactions were faster at every attempt.
            Any exception of `work`: the transaction is rolled back.
        """
        # The last attempt is outside of the loop, so that its error reaches the caller.
        for _ in range(ATTEMPTS - 1):
            try:
                with self.write() as session:
                    return work(session)
            except (ChangedError, IntegrityError):
                time.sleep(random.uniform(0, LONGEST_PAUSE_S))  # noqa: S311 - jitter needs no secrecy
        with self.write() as session:
            return work(session)

    @contextmanager
    def read(self) -> Iterator[Session]:
        """Open a read transaction with one consistent view.

        Rows stay readable after the block. Changes to them are not written.
        """
        with self._session(self._engine) as session:
            yield session

    def first(self, statement: Select[*Columns], **values: object) -> Row[*Columns] | None:
        """Run a statement and return its first row, or None.

        Build the statement once, at import, with `bindparam` for its values: building costs more
        than running. The statement may contain `NOW`.
        """
        clock = self._clock() if self._clock else None
        with self.read() as session:
            return session.execute(statement, {"clock": clock, **values}).first()

    def _session(self, engine: Engine) -> Session:
        info = {"clock": self._clock} if self._clock else {}
        return Session(engine, expire_on_commit=False, info=info)

    def close(self) -> None:
        """Close all pooled connections."""
        self._engine.dispose()


def now(session: Session) -> datetime:
    """Return the current time of the database, or of the clock that the `Database` was given.

    On SQLite, the time is rounded to whole milliseconds.
    """
    clock: Clock | None = session.info.get("clock")
    if clock is not None:
        return clock()
    told: datetime = session.execute(_TELL_NOW).scalar_one()
    return told


def moment(session: Session) -> ColumnElement[datetime]:
    """Return the SQL expression of `now`, for a statement in this session."""
    clock: Clock | None = session.info.get("clock")
    return _Moment() if clock is None else literal(clock(), Instant())


def name_fault(exc: DBAPIError) -> str | None:
    """Describe the disk or file problem behind a database error, or return None if there is none."""
    name = getattr(exc.orig, "sqlite_errorname", None) or ""
    if name == "SQLITE_FULL" or getattr(exc.orig, "sqlstate", None) == _POSTGRES_FULL:
        return "the disk of the database is full"
    if name.startswith(("SQLITE_IOERR", "SQLITE_READONLY", "SQLITE_CANTOPEN")):
        return f"the database cannot be written: {exc.orig}"
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return (
            f"the database is damaged: {exc.orig}. Restore a backup. "
            "A file that was copied while the service ran is not a backup"
        )
    return None


def check_writable(db: Database) -> None:
    """Write a row of several pages, to test the database. Raises SQLAlchemy's DBAPIError."""
    with db.write() as session:
        session.merge(Probe(id=1, filler=os.urandom(_PROBE_BYTES), written_at=now(session)))


def make_engine(url: str) -> Engine:
    """Return an engine with our settings for SQLite: WAL, full sync, foreign keys and explicit BEGIN."""
    parsed = make_url(url)
    common: dict[str, Any] = {
        # Errors are logged. Without this setting, they would quote values that devices have reported.
        "hide_parameters": True,
        "pool_size": _CONNECTIONS,
        "max_overflow": _MORE_CONNECTIONS,
        # Reuse the most recently used connection first. The server can then close the idle ones.
        "pool_use_lifo": True,
    }
    if parsed.get_backend_name() != "sqlite":
        if "connect_timeout" not in parsed.query:
            parsed = parsed.update_query_dict({"connect_timeout": str(CONNECT_S)})
        # A restart of PostgreSQL breaks pooled connections, so each is tested before its use.
        return create_engine(parsed, pool_pre_ping=True, **common)
    driver = {"timeout": BUSY_TIMEOUT_MS / 1000, "check_same_thread": False}
    engine = create_engine(url, connect_args=driver, **common)

    def configure(connection: Any, _record: object) -> None:
        connection.isolation_level = None  # the driver must not start transactions of its own
        for pragma in (
            f"busy_timeout = {BUSY_TIMEOUT_MS}",
            "journal_mode = WAL",
            "synchronous = FULL",  # a committed job row survives a power cut
            "foreign_keys = ON",
        ):
            connection.execute(f"PRAGMA {pragma}")

    event.listen(engine, "connect", configure)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _begin_sqlite(connection: Connection) -> None:
    mode = connection.get_execution_options().get("permille_begin", "DEFERRED")
    connection.exec_driver_sql(f"BEGIN {mode}")
