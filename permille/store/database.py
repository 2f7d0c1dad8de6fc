"""Sessions, transactions and the clock.

A write transaction on SQLite starts with BEGIN IMMEDIATE, so that two writers queue at its start (busy
timeout) and never fail half-way. Keep them short: nothing slow, no file and no network inside. Reads never
wait for writers (WAL).

One order of locks, so that no two transactions wait for each other (PostgreSQL): jobs, a parent before its
parts, the older part first; federation, member, round; rollout, its reports; run; upload; at last the tenant,
for the audit log. A device's row is locked by what it asks for itself, before its runs. No lock is for the
key (`key_share`): PostgreSQL locks what a row refers to also where a transaction changes that row for the
second time. Whoever takes rows out of this order takes what is free (`skip_locked`): claims, dispatch, the
note of whose turn was last.

Time is the database's: several workers' clocks may differ, leases may not. Tests hand in a clock instead.
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
from sqlalchemy.engine import URL, make_url
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

BUSY_TIMEOUT_MS = 30_000
# A server of PostgreSQL that has not answered after so long is taken for unreachable. The address
# may say otherwise (`?connect_timeout=`).
CONNECT_S = 10
_PROBE_BYTES = 16 * 1024
_POSTGRES_FULL = "53100"
ATTEMPTS = 8
LONGEST_PAUSE_S = 0.1
# Connections that are kept, and how many more are opened while they are needed. Together one more
# than the 40 threads of an API's requests (anyio's default): the check of its health has a thread
# of its own, and always finds a connection, however slow the requests are.
_CONNECTIONS, _MORE_CONNECTIONS = 16, 25


class _Moment(FunctionElement[datetime]):
    """The time by the database's clock."""

    type = Instant()
    inherit_cache = True


@compiles(_Moment, "sqlite")
def _sqlite_moment(_element: _Moment, _compiler: SQLCompiler, **_: Any) -> str:
    return "(CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000)"


@compiles(_Moment, "postgresql")
def _postgresql_moment(_element: _Moment, _compiler: SQLCompiler, **_: Any) -> str:
    return "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS BIGINT)"


# The time of `now`, within a statement of `Database.first`.
NOW = func.coalesce(bindparam("clock", type_=Instant()), _Moment())
_TELL_NOW = select(_Moment())


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
        """Open a write transaction. The end of the block commits it; an exception rolls it back."""
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
        """Open a read transaction with one consistent view.

        What it returns stays readable after the block; changes to it are not written.
        """
        with self._session(self._engine) as session:
            yield session

    def first(self, statement: Select[*Columns], **values: object) -> Row[*Columns] | None:
        """Return the first row of one statement.

        A statement that is made once costs less than one that is made by each call: its values are
        `bindparam`. It may say `NOW`.
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
    """The time by the database's clock (milliseconds on SQLite), or by the clock that the `Database` was
    given.
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
    """Return the problem of the database's disk or file that an error names, or None."""
    name = getattr(exc.orig, "sqlite_errorname", None) or ""
    if name == "SQLITE_FULL" or getattr(exc.orig, "sqlstate", None) == _POSTGRES_FULL:
        return "the disk of the database is full"
    if name.startswith(("SQLITE_IOERR", "SQLITE_READONLY", "SQLITE_CANTOPEN")):
        return f"the database cannot be written: {exc.orig}"
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return (
            f"the database is damaged: {exc.orig}. Restore a backup of it; "
            f"a file that was copied while the service ran is none"
        )
    return None


def check_writable(db: Database) -> None:
    """Write a row of some pages, for real. Raises SQLAlchemy's DBAPIError as the database reports it."""
    with db.write() as session:
        session.merge(Probe(id=1, filler=os.urandom(_PROBE_BYTES), written_at=now(session)))


def make_engine(url: str) -> Engine:
    """An engine with our rules for SQLite: WAL, full sync, foreign keys, explicit BEGIN. Errors are logged,
    so they name no values: these may be what devices have reported.
    """
    parsed = make_url(url)
    common: dict[str, Any] = {
        "hide_parameters": True,
        "pool_size": _CONNECTIONS,
        "max_overflow": _MORE_CONNECTIONS,
        "pool_use_lifo": True,
    }
    if parsed.get_backend_name() != "sqlite":
        return create_engine(_impatient(parsed), pool_pre_ping=True, **common)
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


def _impatient(url: URL) -> URL:
    """Return the address with a limit for opening a connection, where it has none."""
    if "connect_timeout" in url.query:
        return url
    return url.update_query_dict({"connect_timeout": str(CONNECT_S)})


def _begin_sqlite(connection: Connection) -> None:
    mode = connection.get_execution_options().get("permille_begin", "DEFERRED")
    connection.exec_driver_sql(f"BEGIN {mode}")
