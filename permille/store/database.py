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

import asyncio
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, TypeVar, TypeVarTuple

from anyio import Semaphore, WouldBlock
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
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.util.concurrency import await_only, in_greenlet

from permille.store.errors import ChangedError
from permille.store.tables import Instant, Probe

Clock = Callable[[], datetime]

Answer = TypeVar("Answer")
Columns = TypeVarTuple("Columns")

BUSY_TIMEOUT_MS = 30_000
LEFT_MS = 40_000
"""PostgreSQL ends what was read in the event loop after so long; nobody waits for it any more then."""
CONNECT_S = 10
"""A server of PostgreSQL that has not answered after so long is taken for unreachable. The address may say
otherwise (`?connect_timeout=`)."""
_PROBE_BYTES = 16 * 1024
ATTEMPTS = 8
LONGEST_PAUSE_S = 0.1
_INTERVAL_S = 0.1
"""After so long the driver looks again whether a server has answered."""
_CONNECTIONS, _MORE_CONNECTIONS, _LOOP_CONNECTIONS = 16, 8, 8
"""As many are kept, and so many more are opened while they are needed: an API has 40 threads. As many are the
event loop's."""


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


NOW = func.coalesce(bindparam("clock", type_=Instant()), _Moment())
"""What `now` tells, within a statement, which is handed `Database.clock_value` as `clock`."""
_TELL_NOW = select(_Moment())
_ALONE: dict[str, dict[str, Any]] = {
    "sqlite": {"permille_begin": None},
    "postgresql": {"isolation_level": "AUTOCOMMIT"},
}
"""By database how a statement stands alone: in no transaction."""


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
        self._reader = self._engine.execution_options(**_ALONE[self._engine.dialect.name])
        self._looping = _Looping(url)

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

    @contextmanager
    def look(self) -> Iterator[Connection]:
        """Statements that each see what is there then, as rows of columns: for who reads one row or two.

        A statement costs a fifth of what a view and its objects do. It has no transaction, so that nothing
        can be locked or written in it. It may also be made in a greenlet of an event loop, where nothing else
        here may: the loop goes on while a server is waited for. It waits for no lock of SQLite there.
        """
        with self._looping.connect() if in_greenlet() else self._reader.connect() as connection:
            yield connection

    def rows(self, statement: Select[*Columns], **values: object) -> Sequence[Row[*Columns]]:
        """All rows of one statement, as `first`."""
        with self.look() as connection:
            return connection.execute(statement, {"clock": self.clock_value, **values}).all()

    def first(self, statement: Select[*Columns], **values: object) -> Row[*Columns] | None:
        """The first row of one statement that reads, without a transaction around it: the cheapest look.

        A statement that is made once costs less than one that is made by each call: its values are
        `bindparam`. It may say `NOW`.
        """
        with self.look() as connection:
            return connection.execute(statement, {"clock": self.clock_value, **values}).first()

    @property
    def clock_value(self) -> datetime | None:
        """The time of the clock that this was given; None: the database's counts."""
        return self._clock() if self._clock else None

    def _session(self, engine: Engine) -> Session:
        if in_greenlet():
            raise RuntimeError(
                "expected a look at rows in the event loop, got a session: it would wait there"
            )
        info = {"clock": self._clock} if self._clock else {}
        return Session(engine, expire_on_commit=False, info=info)

    def close(self) -> None:
        """Close all pooled connections."""
        self._engine.dispose()
        self._looping.close()


class _Looping:
    """Connections for `look` in the greenlets of an event loop; each is opened in a thread, and kept open.

    A file of SQLite is read at once: a row by its key takes some microseconds, of pages that the system keeps
    in memory, and going to a thread takes ten times as many. A page that it does not keep is one read of the
    disk; from one that is as slow as a network, who has many rows has moved to PostgreSQL.

    None is pinged, which would cost as much as a read: who meets a broken one asks again. SQLAlchemy's
    asyncio engines wait as well, through adapters that cost a third of a read.
    """

    def __init__(self, url: str) -> None:
        self._engine = _alone_engine(url)
        self._free = Semaphore(_LOOP_CONNECTIONS)  # fair: who waits is not passed by who comes later
        self._kept: list[Connection] = []

    @contextmanager
    def connect(self) -> Iterator[Connection]:
        """A connection of this greenlet's alone, as long as the block lasts."""
        try:
            self._free.acquire_nowait()
        except WouldBlock:
            await_only(self._free.acquire())
        connection = None
        try:
            connection = (
                self._kept.pop() if self._kept else await_only(asyncio.to_thread(self._engine.connect))
            )
            yield connection
        finally:
            if connection is not None and not connection.invalidated:
                self._kept.append(connection)
            self._free.release()

    def close(self) -> None:
        """Close those that nobody uses."""
        while self._kept:
            self._kept.pop().close()


def _alone_engine(url: str) -> Engine:
    """An engine whose connections are in no transaction, wait in the event loop, and for no lock."""
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":
        return _sqlite_engine(parsed, busy_timeout_ms=0, hide_parameters=True, poolclass=NullPool)
    from psycopg import Connection as Driver
    from psycopg import waiting

    class Waiting(Driver[Any]):
        """A connection that lets the event loop go on in a greenlet of it."""

        def wait(self, gen: Any, interval: float = _INTERVAL_S, timeout: float | None = None) -> Any:
            if not in_greenlet():
                return super().wait(gen, interval, timeout)
            try:
                return await_only(waiting.wait_async(gen, self.pgconn.socket, interval, timeout))
            except asyncio.CancelledError:
                self.pgconn.finish()  # in the middle of a statement: it is of no use any more
                raise

    def connect(_dialect: object, _record: object, given: Sequence[Any], named: Mapping[str, Any]) -> Waiting:
        connection = Waiting.connect(*given, **{**named, "autocommit": True})
        # A server that waits for a lock does not see that we have left: each would keep it one process more.
        connection.execute(f"SET statement_timeout = {LEFT_MS}")
        return connection

    engine = create_engine(
        _impatient(parsed), isolation_level="AUTOCOMMIT", hide_parameters=True, poolclass=NullPool
    )
    event.listen(engine, "do_connect", connect)
    return engine


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
    """What `now` would tell, within a statement that is made for this session."""
    clock: Clock | None = session.info.get("clock")
    return _Moment() if clock is None else literal(clock(), Instant())


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
    engine = _sqlite_engine(parsed, busy_timeout_ms=BUSY_TIMEOUT_MS, **common)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _impatient(url: URL) -> URL:
    """Return the address with a limit for opening a connection, where it has none."""
    if "connect_timeout" in url.query:
        return url
    return url.update_query_dict({"connect_timeout": str(CONNECT_S)})


def _sqlite_engine(url: URL, *, busy_timeout_ms: int, **options: Any) -> Engine:
    driver = {"timeout": busy_timeout_ms / 1000, "check_same_thread": False}
    engine = create_engine(url, connect_args=driver, **options)

    def configure(connection: Any, _record: object) -> None:
        connection.isolation_level = None  # the driver must not start transactions of its own
        for pragma in (
            f"busy_timeout = {busy_timeout_ms}",
            "journal_mode = WAL",
            "synchronous = FULL",  # a committed job row survives a power cut
            "foreign_keys = ON",
        ):
            connection.execute(f"PRAGMA {pragma}")

    event.listen(engine, "connect", configure)
    return engine


def _begin_sqlite(connection: Connection) -> None:
    mode = connection.get_execution_options().get("permille_begin", "DEFERRED")
    if mode is not None:
        connection.exec_driver_sql(f"BEGIN {mode}")
