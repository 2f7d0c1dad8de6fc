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

import json
import logging
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

from sqlalchemy import (
    URL,
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
from sqlalchemy.engine import ExceptionContext, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import Session
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from permille.extras import install_line
from permille.store.errors import ChangedError
from permille.store.tables import Instant, Probe

_log = logging.getLogger(__name__)

Clock = Callable[[], datetime]

Answer = TypeVar("Answer")
Columns = TypeVarTuple("Columns")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """The longest times that a statement waits. After them, it fails with an OperationalError.

    Attributes:
        lock_s: the time for which it waits for a lock. SQLite has one lock for all writers, so its writers
            wait twice as long.
        answer_s: the time for which it waits for PostgreSQL in all. None: no limit.
    """

    lock_s: float
    answer_s: float | None


REQUESTS = Patience(lock_s=2.0, answer_s=15.0)
"""For threads that answer requests. All of them may wait for one lock, and then others wait for a thread."""
JOBS = Patience(lock_s=15.0, answer_s=300.0)
MIGRATION = Patience(lock_s=60.0, answer_s=None)
"""For migrations, which wait for each other and may rewrite a large table."""
# Timeout in seconds for a connection to PostgreSQL, unless the address sets `?connect_timeout=`.
CONNECT_S = 5
_PROBE_BYTES = 16 * 1024
_LAST_PORT = 65_535
# SQLSTATE `disk_full`.
_POSTGRES_FULL = "53100"
# SQLSTATE `read_only_sql_transaction`: after a failover, the server of a connection is only a copy.
_POSTGRES_COPY = "25006"
_FORMS = "Write sqlite:////path/of/file.db, or postgresql+psycopg://user:password@host/name."
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
        patience: how long statements wait.

    Example:

        db = Database("sqlite:////var/lib/permille/permille.db")
        with db.read() as session:
            page = rows.list_all(session, tables.Model, tenant_id=tenant.id)
    """

    def __init__(self, url: str, *, clock: Clock | None = None, patience: Patience = JOBS) -> None:
        self.url = url
        self._clock = clock
        self._engine = make_engine(url, patience)
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
    state = getattr(exc.orig, "sqlstate", None)
    if name == "SQLITE_FULL" or state == _POSTGRES_FULL:
        return "the disk of the database is full"
    if state == _POSTGRES_COPY:
        return "the database is read-only"
    if name.startswith(("SQLITE_IOERR", "SQLITE_READONLY", "SQLITE_CANTOPEN")):
        return f"the database cannot be written: {exc.orig}"
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return (
            f"the database is damaged: {exc.orig}. Restore a backup. "
            "A file that was copied while the service ran is not a backup"
        )
    return None


def run_each(steps: Iterable[Callable[[], object]]) -> None:
    """Run steps in turn. A step that fails does not stop those after it.

    Raises:
        Exception: the first failure, after all steps. Later failures are logged.
    """
    failed: list[Exception] = []
    for step in steps:
        try:
            step()
        except Exception as exc:  # noqa: BLE001 - raised below
            failed.append(exc)
    for other in failed[1:]:
        _log.warning("one of several failed, too: %s", other)
    if failed:
        raise failed[0]


def check_writable(db: Database) -> None:
    """Write a row of several pages, to test the database. Raises SQLAlchemy's DBAPIError."""
    with db.write() as session:
        session.merge(Probe(id=1, filler=os.urandom(_PROBE_BYTES), written_at=now(session)))


def make_engine(url: str, patience: Patience = JOBS) -> Engine:
    """Return an engine with our settings.

    On SQLite, these are WAL, full sync, foreign keys and explicit BEGIN. On PostgreSQL, each transaction
    starts with its timeouts.
    """
    parsed = parse_url(url)
    common: dict[str, Any] = {
        # Errors are logged. Without this setting, they would quote values that devices have reported.
        "hide_parameters": True,
        "pool_size": _CONNECTIONS,
        "max_overflow": _MORE_CONNECTIONS,
        # A request must not wait longer for a connection than for a lock.
        "pool_timeout": patience.lock_s,
        # Reuse the most recently used connection first. The server can then close the idle ones.
        "pool_use_lifo": True,
    }
    if parsed.get_backend_name() != "sqlite":
        if "connect_timeout" not in parsed.query:
            parsed = parsed.update_query_dict({"connect_timeout": str(CONNECT_S)})
        # A restart of PostgreSQL breaks pooled connections, so each is tested before its use.
        engine = create_engine(parsed, pool_pre_ping=True, **common)
        _bound_postgres(engine, patience)
        return engine
    busy_s = 2 * patience.lock_s
    driver = {"timeout": busy_s, "check_same_thread": False}
    engine = create_engine(parsed, connect_args=driver, json_deserializer=_decoded, **common)

    def configure(connection: Any, _record: object) -> None:
        connection.isolation_level = None  # the driver must not start transactions of its own
        for pragma in (
            f"busy_timeout = {round(1000 * busy_s)}",
            "journal_mode = WAL",
            "synchronous = FULL",  # a committed job row survives a power cut
            "foreign_keys = ON",
        ):
            connection.execute(f"PRAGMA {pragma}")

    event.listen(engine, "connect", configure)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _decoded(content: str) -> Any:
    """Decode the JSON of a column. Return other text as it is, so that a damaged row stops no query."""
    try:
        return json.loads(content)
    except ValueError:
        return content


def _begin_sqlite(connection: Connection) -> None:
    mode = connection.get_execution_options().get("permille_begin", "DEFERRED")
    connection.exec_driver_sql(f"BEGIN {mode}")


def _bound_postgres(engine: Engine, patience: Patience) -> None:
    from permille.store import postgres

    limits = f"SET LOCAL lock_timeout = {round(1000 * patience.lock_s)}"
    if patience.answer_s is not None:
        limits += f"; SET LOCAL statement_timeout = {round(1000 * patience.answer_s)}"

    def connect(_dialect: object, _record: object, _arguments: object, options: dict[str, Any]) -> Any:
        return postgres.connect(options, patience.answer_s)

    def begin(connection: Connection) -> None:
        # For the transaction only: behind PgBouncer, the session belongs to other clients as well.
        connection.exec_driver_sql(limits)

    def leave_copies(context: ExceptionContext) -> None:
        # Otherwise pooled connections would stay with the copy, and every write would fail until a restart.
        if getattr(context.original_exception, "sqlstate", None) == _POSTGRES_COPY:
            context.is_disconnect = True

    event.listen(engine, "do_connect", connect)
    event.listen(engine, "begin", begin)
    event.listen(engine, "handle_error", leave_copies)


def parse_url(text: str) -> URL:
    """Return the parts of a database's URL.

    Raises:
        ValueError: it is no URL of a SQLite file or of PostgreSQL. The message does not quote it, because it
            may hold a password.

    Example:
        >>> parse_url("postgresql+psycopg://permille:secret@db.example.org/permille").host
        'db.example.org'
    """
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):  # ValueError: the port is not a number
        raise ValueError(f"This is no URL of a database. {_FORMS}") from None
    if url.drivername == "sqlite":
        if url.query or not Path(url.database or "").is_absolute():
            raise ValueError(f"The path of a SQLite file must be absolute, without options. {_FORMS}")
    elif url.drivername == "postgresql+psycopg":
        try:
            from permille.store import postgres
        except ModuleNotFoundError as exc:
            raise ValueError(f"PostgreSQL needs psycopg. Run {install_line('postgres')}.") from exc
        if "@" in f"{url.host}{url.database}":  # the rest of a password, which errors would quote
            raise ValueError("Write @ in a user name or password as %40, and the signs : / ? # % alike.")
        if url.port is not None and not 0 < url.port <= _LAST_PORT:
            raise ValueError(f"The port must be 1 to {_LAST_PORT}.")
        unknown = sorted(url.query.keys() - postgres.option_names())
        if unknown:
            raise ValueError(f"PostgreSQL has no option {unknown[0]!r:.40}.")
        for name in postgres.NUMBERS & url.query.keys():
            if not re.fullmatch(r"\d{1,9}", str(url.query[name]), re.ASCII):
                raise ValueError(f"{name} must be a number.")
        try:
            url.get_dialect()().create_connect_args(url)
        except ArgumentError:
            raise ValueError("The options `host` and `port` do not fit together.") from None
    else:
        raise ValueError(f"A URL of {url.drivername!r:.40} cannot be used. {_FORMS}")
    return url
