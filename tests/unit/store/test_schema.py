"""Tests of the schema: migrations create exactly the tables, and connections follow the store's rules."""

import os
import shutil
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import JSON, Boolean, Engine, Float, Integer, LargeBinary, String, Table, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError, StatementError
from sqlalchemy.types import TypeEngine

from permille.errors import OperatorError, RetryableError
from permille.store import access
from permille.store.database import Database, Patience, make_engine, now
from permille.store.migrations import schema
from permille.store.migrations.schema import SCRIPTS, migrate
from permille.store.tables import Base, Instant, Tenant
from tests.preloaded import run
from tests.unit.store.postgres import postgres_server

SHORT = Patience(lock_s=0.05, answer_s=None)


def test_migrations_make_exactly_the_tables_of_the_model(db: Database) -> None:
    with db.read() as session:
        context = MigrationContext.configure(session.connection(), opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []


def test_errors_name_no_values_for_the_log(db: Database) -> None:
    with pytest.raises(DBAPIError, match="nowhere") as caught, db.read() as session:
        session.execute(text("SELECT :text FROM nowhere"), {"text": "what a device said"})
    assert "a device" not in str(caught.value)


def test_migrate_twice_keeps_the_rows(url: str) -> None:
    migrate(url)
    db = Database(url)
    with db.write() as session:
        access.create_tenant(session, name="acme")
    migrate(url)
    with db.read() as session:
        first = access.first_tenant(session)
    db.close()
    assert first is not None
    assert first.name == "acme"


def test_a_later_migration_keeps_a_row_of_every_table(url: str, tmp_path: Path) -> None:
    migrate(url)
    engine = make_engine(url)
    with engine.begin() as connection:
        for table in Base.metadata.sorted_tables:
            connection.execute(table.insert().values(_row(table)))
    before = _rows(engine)
    assert before.keys() == Base.metadata.tables.keys()
    losing = _with_another_migration(tmp_path / "losing", "DELETE FROM tenants")
    with pytest.raises((IntegrityError, RuntimeError), match="tenants"):
        migrate(url, losing)
    assert _rows(engine) == before
    later = _with_another_migration(tmp_path / "later")
    migrate(url, later)
    assert _rows(engine) == {name: {**row, "added": 7} for name, row in before.items()}
    migrate(url, later)
    with pytest.raises(IntegrityError), engine.begin() as connection:  # foreign keys are kept, too
        connection.execute(text("DELETE FROM tenants"))
    engine.dispose()


def _row(table: Table) -> dict[str, object]:
    """Return one value per column, by its type. Equal values make the rows refer to each other."""
    values: dict[type[TypeEngine[Any]], object] = {
        Instant: datetime(2030, 1, 1, tzinfo=UTC),
        JSON: {"a": [1]},
        LargeBinary: b"bytes",
        Boolean: True,
        Float: 0.5,
        Integer: 1,
        String: "x",
    }
    return {
        column.name: next(value for kind, value in values.items() if isinstance(column.type, kind))
        for column in table.columns
    }


def _rows(engine: Engine) -> dict[str, dict[str, object]]:
    """Return the only row of every table, as the database stores it."""
    with engine.connect() as connection:
        return {
            name: dict(connection.execute(text(f'SELECT * FROM "{name}"')).mappings().one())
            for name in Base.metadata.tables
        }


def _with_another_migration(folder: Path, *statements: str) -> Path:
    """Copy the migrations, and add one that adds a column to every table.

    On SQLite it recreates each table, as most changes there do.
    """
    shutil.copytree(SCRIPTS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    lines = ["import sqlalchemy as sa", "from alembic import op", "revision, down_revision = '9999', '0001'"]
    lines += ["branch_labels = depends_on = None", "def upgrade():"]
    lines.append("    way = 'always' if op.get_bind().dialect.name == 'sqlite' else 'never'")
    for table in Base.metadata.tables:
        lines.append(f"    with op.batch_alter_table({table!r}, recreate=way) as batch:")
        lines.append(
            "        batch.add_column(sa.Column('added', sa.Integer, server_default='7', nullable=False))"
        )
    lines += [f"    op.execute({statement!r})" for statement in statements]
    (folder / "versions" / "v9999_more.py").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize("logged", [False, True])
@pytest.mark.parametrize("names", [("notes",), ("alembic_version", "runs")])
def test_a_file_of_another_program_is_refused_and_not_changed(
    tmp_path: Path, names: tuple[str, ...], logged: bool
) -> None:
    path = tmp_path / "it's #theirs.db"
    with closing(sqlite3.connect(path)) as theirs:
        if logged:
            theirs.execute("PRAGMA journal_mode = WAL")
        for name in names:
            theirs.execute(f"CREATE TABLE {name} (version_num TEXT)")
        path.chmod(0o644)
        before = {file: (file.read_bytes(), file.stat().st_mode) for file in tmp_path.glob("*[!m]")}
        with pytest.raises(
            OperatorError, match=f"is not a database of permille: it has the tables {names[0]}"
        ):
            migrate(f"sqlite:///{path}")
        assert {file: (file.read_bytes(), file.stat().st_mode) for file in tmp_path.glob("*[!m]")} == before


def test_only_files_are_taken_from_others(tmp_path: Path) -> None:
    """As root, this must not close /dev/null to all other users. A pipe stands for a device."""
    for name, made in (("pipe", lambda path: os.mkfifo(path)), ("file", Path.touch)):
        path = tmp_path / name
        made(path)
        path.chmod(0o666)
        schema._take_from_others(path)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"pipe": 0o666, "file": 0o600}


def test_processes_that_migrate_at_once_take_turns(url: str) -> None:
    code = f"from permille.store.migrations.schema import migrate; migrate({url!r})"
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0]


def test_a_schema_that_is_up_to_date_waits_for_no_writer(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/x.db"
    migrate(url)
    db, other = Database(url), Database(url, patience=SHORT)
    with db.write() as session:
        session.execute(text("SELECT 1"))  # a transaction begins with its first statement
        migrate(url)
        with pytest.raises(OperationalError, match="database is locked"), other.write() as second:
            second.execute(text("SELECT 1"))  # proves that the database was locked
    for each in (db, other):
        each.close()


def test_a_database_that_cannot_be_opened_is_named_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=r"Cannot use the database.*unable to open.*nowhere/x\.db"):
        migrate(f"sqlite:///{tmp_path}/nowhere/x.db")
    with pytest.raises(RetryableError, match=r"127\.0\.0\.1:1/") as caught:
        migrate("postgresql+psycopg://me:secret@127.0.0.1:1/x?sslpassword=secret")
    assert "secret" not in str(caught.value)
    (tmp_path / "notes.txt").write_text("no database " * 99)
    with pytest.raises(OperatorError, match="file is not a database"):
        migrate(f"sqlite:///{tmp_path}/notes.txt")


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_a_database_that_cannot_hold_every_name_is_refused(encoding: str) -> None:
    with postgres_server() as server:
        admin = make_engine(server.url).execution_options(isolation_level="AUTOCOMMIT")
        with admin.connect() as connection:
            locale = "LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
            connection.execute(text(f"CREATE DATABASE narrow ENCODING '{encoding}' {locale}"))
        admin.dispose()
        url = make_url(server.url).set(database="narrow").render_as_string(hide_password=False)
        with pytest.raises(OperatorError, match=f"encoding {encoding}. Make it with ENCODING 'UTF8'"):
            migrate(url)


def test_a_database_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/x.db"
    migrate(url)
    db = Database(url)
    with db.write() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(
        OperatorError, match="newer version of permille has upgraded the database: its schema is 9999"
    ):
        migrate(url)
    db.close()


def test_a_lock_that_stays_taken_may_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "MIGRATION", SHORT)
    url = f"sqlite:///{tmp_path}/x.db"
    db = Database(url)
    with db.write() as session:
        session.execute(text("SELECT 1"))
        with pytest.raises(RetryableError, match="database is locked"):
            migrate(url)
    migrate(url)
    db.close()


def test_a_table_that_stays_locked_may_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with postgres_server() as server:
        migrate(server.url)
        monkeypatch.setattr(schema, "MIGRATION", SHORT)
        monkeypatch.setattr(schema, "_is_newest", lambda *_: False)
        db = Database(server.url)
        with db.write() as session:
            session.execute(text("LOCK TABLE alembic_version IN ACCESS EXCLUSIVE MODE"))
            with pytest.raises(RetryableError, match="lock timeout"):
                migrate(server.url)
        migrate(server.url)
        db.close()


def test_what_fails_in_a_migration_says_so_itself(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "x.db")) as other:
        for table in ("alembic_version", "tenants"):
            other.execute(f"CREATE TABLE {table} (version_num TEXT)")
    with pytest.raises(OperationalError, match="table tenants already exists"):
        migrate(f"sqlite:///{tmp_path}/x.db")


def test_a_program_without_its_database_says_so_in_a_line(tmp_path: Path) -> None:
    settings = {"PERMILLE_DATA_DIR": str(tmp_path), "PERMILLE_DATABASE_URL": f"sqlite:///{tmp_path}/no/x.db"}
    for program in ("permille_workers", "permille_service"):
        command = [sys.executable, "-m", program]
        done = run(command, env=os.environ | settings, timeout=120)
        assert done.returncode == 2
        assert done.stderr.startswith("permille: Cannot use the database")
        assert len(done.stderr.splitlines()) == 1


def test_foreign_keys_are_enforced(db: Database) -> None:
    with pytest.raises(IntegrityError), db.write() as session:
        access_row = {"id": "x", "source": "{}", "name": "n", "tenant_id": "nobody", "at": 0}
        session.execute(
            text(
                "INSERT INTO corpora (id, source, name, tenant_id, created_at)"
                " VALUES (:id, :source, :name, :tenant_id, :at)"
            ),
            access_row,
        )


def test_a_failed_transaction_writes_nothing(db: Database) -> None:
    with pytest.raises(RuntimeError), db.write() as session:
        access.create_tenant(session, name="acme")
        raise RuntimeError("stop")
    with db.read() as session:
        assert access.first_tenant(session) is None


def test_naive_times_are_refused(db: Database) -> None:
    with pytest.raises(StatementError, match="aware"), db.write() as session:
        session.add(Tenant(id="t", name="n", created_at=datetime(2030, 1, 1)))
        session.flush()


def test_the_database_clock_tells_the_time(url: str) -> None:
    migrate(url)
    db = Database(url)
    with db.read() as session:
        told = now(session)
    db.close()
    assert abs(told - datetime.now(UTC)) < timedelta(minutes=1)


def test_sqlite_keeps_a_write_ahead_log_and_full_sync(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/x.db"
    migrate(url)
    db = Database(url)
    with db.read() as session:
        pragmas = {
            name: session.execute(text(f"PRAGMA {name}")).scalar_one()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    db.close()
    assert pragmas == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 30_000}
