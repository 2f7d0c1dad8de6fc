"""Upgrade a database to the newest schema with the migrations beside this module.

    python -m permille.store.migrations.schema

The command upgrades the database of PERMILLE_DATABASE_URL or PERMILLE_DATA_DIR.
"""

import os
import sqlite3
import stat
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.orm import Session

from permille.errors import OperatorError, RetryableError
from permille.store.database import MIGRATION, make_engine, name_fault
from permille.store.grants import grant
from permille.store.settings import StoreSettings, explain
from permille.store.tables import Tenant

SCRIPTS: Final = Path(__file__).parent
# Key of a PostgreSQL advisory lock, so that processes which start together migrate one after the other.
_LOCK_ID = 0x7065726D


def migrate(url: str, scripts: Path = SCRIPTS, *, worker_role: str | None = None) -> None:
    """Create or upgrade the schema at `url` in one transaction.

    If the schema is up to date, this takes no write lock. So a worker can start while another
    process writes. Several processes may call it at once: they take turns.

    Args:
        url: the database.
        scripts: folder of the migrations.
        worker_role: a role of PostgreSQL that gets the privileges of workers (`permille.store.grants`).

    Raises:
        OperatorError: the database cannot be opened, a newer version of permille or another program made
            it, or there is no such role.
        RetryableError: another process kept the lock, PostgreSQL does not answer, or the schema is old and
            this role may not upgrade it.

    Example:

        migrate("sqlite:////var/lib/permille/permille.db")
    """
    engine = make_engine(url, MIGRATION)
    file = engine.url.database if engine.dialect.name == "sqlite" else None
    if file is not None:
        _check_own(Path(file))
        _create_private(Path(file))
        event.listen(engine, "connect", _defer_foreign_keys)
    config = Config()
    # Alembic's configuration treats `%` as the start of a variable.
    config.set_main_option("script_location", str(scripts).replace("%", "%%"))
    try:
        # This check only reads, so it does not wait for the write lock of another process.
        newest = _is_newest(engine, config)
        if file is not None:  # SQLite has read the file, so it is no folder
            _take_from_others(Path(file))
        if newest and worker_role is None:
            return
        with _begin(engine) as connection:
            if connection.dialect.name == "postgresql":
                _check_encoding(connection)
                _check_owner(connection)
                connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK_ID})"))
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
            if connection.dialect.name == "sqlite":
                _check_foreign_keys(connection)
            if worker_role is not None:
                _grant(connection, worker_role)
    finally:
        engine.dispose()


def _check_own(path: Path) -> None:
    """Refuse a SQLite file with tables of another program. A connection of ours would change the file.

    Raises:
        OperatorError: the file has tables, but lacks ours.
    """
    # With `immutable`, SQLite makes no files beside the database, but does not read the write-ahead log. If
    # there is a log, these files are there already.
    logged = path.with_name(f"{path.name}-wal").exists()
    address = f"{path.as_uri()}?mode=ro{'' if logged else '&immutable=1'}"
    # Errors are left to the engine, which reports them when it opens the database. They also occur while
    # another process writes the first tables.
    with suppress(sqlite3.Error), closing(sqlite3.connect(address, uri=True)) as file:
        names = {name for (name,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if names and not names >= {"alembic_version", Tenant.__tablename__}:
            some = ", ".join(sorted(names)[:5])
            raise OperatorError(
                f"{path} is not a database of permille: it has the tables {some}. The file was not changed. "
                "Name another one in PERMILLE_DATABASE_URL."
            )


def _create_private(path: Path) -> None:
    """Create the file of a new database for its owner only. SQLite gives its other files the same mode."""
    # Errors are left to the engine, which reports them when it opens the database.
    with suppress(OSError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))


def _take_from_others(database: Path) -> None:
    """Make the files of an older database accessible to their owner only."""
    for path in (database.with_name(f"{database.name}{suffix}") for suffix in ("", "-wal", "-shm")):
        with suppress(OSError):
            mode = path.stat().st_mode
            # SQLite reads a device such as /dev/null as an empty database.
            if stat.S_ISREG(mode) and mode & 0o077:
                path.chmod(0o600)


def _defer_foreign_keys(connection: Any, _record: object) -> None:
    """Allow migrations to drop a table to which others refer."""
    # SQLite cannot change most properties of a table. A migration makes a new table and drops the old one.
    connection.execute("PRAGMA foreign_keys = OFF")


def _check_foreign_keys(connection: Connection) -> None:
    """Check all foreign keys before the commit. Raises RuntimeError if a migration lost a row."""
    broken = {(row.table, row.parent) for row in connection.execute(text("PRAGMA foreign_key_check"))}
    if broken:
        raise RuntimeError(f"Migrations lost rows that others refer to (from, to): {sorted(broken)}")


def _check_encoding(connection: Connection) -> None:
    """Check that the database can hold every name. `initdb` chooses SQL_ASCII if the locale is C."""
    encoding = connection.scalar(text("SHOW server_encoding"))
    if encoding != "UTF8":
        raise OperatorError(
            f"The database has the encoding {encoding}. Make it with ENCODING 'UTF8' TEMPLATE template0 "
            f"({_where(connection.engine)})."
        )


def _check_owner(connection: Connection) -> None:
    """Check that this role may change the schema. Raises RetryableError for the role of a worker."""
    owner = connection.scalar(
        text("SELECT tableowner FROM pg_tables WHERE tablename = 'tenants' AND schemaname = current_schema()")
    )
    may = "has_schema_privilege(current_schema(), 'CREATE')"
    if owner is not None:
        may = "pg_has_role(:owner, 'USAGE')"
    if not connection.scalar(text(f"SELECT {may}"), {"owner": owner}):
        raise RetryableError(
            "The schema of the database is not that of this version, and this role may not change it. Start "
            f"the API of this version first ({_where(connection.engine)})."
        )


def _grant(connection: Connection, role: str) -> None:
    if connection.dialect.name != "postgresql":
        raise OperatorError("Only PostgreSQL has roles. Unset PERMILLE_WORKER_ROLE, or use PostgreSQL.")
    query = "SELECT rolsuper OR pg_has_role(oid, current_user, 'MEMBER') FROM pg_roles WHERE rolname = :role"
    may_all = connection.scalar(text(query), {"role": role})
    if may_all is None:
        raise OperatorError(
            f"The database has no role {role}. Make it: CREATE ROLE {role} LOGIN PASSWORD '...'"
        )
    if may_all:
        raise OperatorError(f"The role {role} may do all that the API may. Make another role for workers.")
    grant(connection, role)


def _is_newest(engine: Engine, config: Config) -> bool:
    scripts = ScriptDirectory.from_config(config)
    try:
        with engine.connect() as connection:
            heads = MigrationContext.configure(connection).get_current_heads()
    except DBAPIError as exc:
        raise (RetryableError if _may_pass(exc) else OperatorError)(_message(engine, exc)) from exc
    known = {script.revision for script in scripts.walk_revisions()}
    if not known.issuperset(heads):
        raise OperatorError(
            f"A newer version of permille has upgraded the database: its schema is {', '.join(heads)} "
            f"({_where(engine)})."
        )
    return heads == tuple(scripts.get_heads())


@contextmanager
def _begin(engine: Engine) -> Iterator[Connection]:
    """Open a write transaction, and raise RetryableError for a taken lock, a full disk or a broken
    disk.
    """
    with ExitStack() as stack:
        try:
            begun = engine.execution_options(permille_begin="IMMEDIATE").begin()
            connection = stack.enter_context(begun)
        except OperationalError as exc:
            raise RetryableError(_message(engine, exc)) from exc
        try:
            yield connection
            stack.close()  # commits
        except DBAPIError as exc:
            if not _may_pass(exc) and name_fault(exc) is None:
                raise
            raise RetryableError(_message(engine, exc)) from exc


def check_newest(session: Session) -> None:
    """Check that the schema is the one that this process knows.

    Raises:
        OperatorError: a newer version of permille has upgraded the database.
    """
    found = session.execute(text("SELECT version_num FROM alembic_version")).scalars().all()
    if tuple(found) != _known():
        raise OperatorError(
            f"the database has schema {', '.join(found)}, this process knows {', '.join(_known())}. "
            "Stop this process, and start the newer version"
        )


@cache
def _known() -> tuple[str, ...]:
    return tuple(ScriptDirectory(str(SCRIPTS)).get_heads())


def _may_pass(exc: DBAPIError) -> bool:
    """Return whether PostgreSQL may still start, or another process keeps a lock there.

    SQLite raises the same error for a file that cannot be opened, which needs a person.
    """
    return isinstance(exc, OperationalError) and not hasattr(exc.orig, "sqlite_errorname")


def _message(engine: Engine, exc: DBAPIError) -> str:
    fault = name_fault(exc) or exc.orig
    return f"Cannot use the database: {fault} ({_where(engine)})"


def _where(engine: Engine) -> str:
    # Options may hold a password, too.
    return engine.url.set(query={}).render_as_string(hide_password=True)


def main() -> int:
    """Upgrade the database of the environment's settings. Return the exit code."""
    try:
        settings = StoreSettings.model_validate({})
        migrate(settings.database_url.get_secret_value(), worker_role=settings.worker_role)
    except (OperatorError, RetryableError) as exc:
        print(f"permille: {exc}", file=sys.stderr)
        return 75 if isinstance(exc, RetryableError) else 2
    except ValueError as exc:
        print(f"permille: {explain(exc)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
