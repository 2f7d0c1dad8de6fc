"""Tests of connections: servers that do not answer, locks, and URLs that cannot be used."""

import socket
import time
from functools import partial

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, OperationalError

from permille.store import database
from permille.store.database import Database, Patience, check_writable, name_fault, parse_url, run_each
from permille.store.migrations.schema import migrate
from tests.integration.test_slow_requests import stopped
from tests.unit.store.postgres import postgres_server

SHORT = Patience(lock_s=0.2, answer_s=1.0)


def test_a_step_that_fails_stops_no_other_and_is_told() -> None:
    ran: list[int] = []

    def step(number: int) -> None:
        ran.append(number)
        if number % 2:
            raise ValueError(f"number {number}")

    with pytest.raises(ValueError, match="number 1"):
        run_each([partial(step, number) for number in range(5)])
    assert ran == [0, 1, 2, 3, 4]


def test_a_server_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "CONNECT_S", 2)  # the driver's shortest limit
    with socket.create_server(("127.0.0.1", 0)) as silent:
        db = Database(f"postgresql+psycopg://user@127.0.0.1:{silent.getsockname()[1]}/name")
        with pytest.raises(OperationalError, match="timeout"), db.read() as session:
            session.execute(text("SELECT 1"))
        db.close()


def test_a_server_that_falls_silent_is_given_up_and_asked_anew() -> None:
    with postgres_server() as server:
        db = Database(server.url, patience=SHORT)
        with pytest.raises(OperationalError, match="did not answer within 1 s"), db.read() as session:
            session.execute(text("SELECT 1"))
            with stopped(server):
                session.execute(text("SELECT 1"))
        with db.read() as session:
            assert session.scalar(text("SELECT 1")) == 1
        db.close()


def test_a_statement_ends_with_its_time_and_the_connection_stays() -> None:
    with postgres_server() as server:
        db = Database(server.url, patience=SHORT)
        for _ in range(2):
            with (
                pytest.raises(OperationalError, match=r"time|did not answer"),
                db.read() as session,
            ):
                session.execute(text("SELECT pg_sleep(60)"))
        with db.read() as session:
            assert session.scalar(text("SELECT 1")) == 1
        db.close()


def test_a_lock_is_waited_for_within_a_bound_in_either_database(tmp_path: object) -> None:
    with postgres_server() as server:
        for url, lock in (
            (f"sqlite:///{tmp_path}/x.db", "UPDATE tenants SET name = name"),
            (server.url, "LOCK TABLE tenants IN ACCESS EXCLUSIVE MODE"),
        ):
            migrate(url)
            holder, other = Database(url), Database(url, patience=SHORT)
            with holder.write() as session:
                session.execute(text(lock))
                begun = time.monotonic()
                with pytest.raises(OperationalError, match="lock"), other.write() as waiting:
                    waiting.execute(text("UPDATE tenants SET name = name"))
                assert time.monotonic() - begun < 30
            with other.write() as session:
                session.execute(text("UPDATE tenants SET name = name"))
            for db in (holder, other):
                db.close()


def test_the_time_limits_end_with_the_transaction() -> None:
    """A session of PgBouncer belongs to other clients afterwards."""
    with postgres_server() as server:
        engine = database.make_engine(server.url, SHORT)
        with engine.connect() as connection:
            assert connection.scalar(text("SHOW lock_timeout")) == "200ms"
            connection.rollback()
            raw = connection.connection.driver_connection
            assert raw is not None
            assert raw.execute("SHOW lock_timeout").fetchone() == ("0",)
        engine.dispose()


def test_a_server_that_became_a_copy_is_left() -> None:
    with postgres_server() as server:
        migrate(server.url)
        db = Database(server.url)
        with db.write() as session:  # as of a server that a failover has demoted
            session.execute(text("SET default_transaction_read_only = on"))
        with pytest.raises(DBAPIError) as refused:
            check_writable(db)
        assert name_fault(refused.value) == "the database is read-only"
        check_writable(db)
        db.close()


def test_an_address_may_name_another_limit() -> None:
    url = database.make_engine("postgresql+psycopg://user@host/name?connect_timeout=3").url
    assert url.query["connect_timeout"] == "3"
    assert database.make_engine("postgresql+psycopg://user@host/name").url.query["connect_timeout"] == "5"


@pytest.mark.parametrize(("option", "prepared"), [("", True), ("?prepare_threshold=0", False)])
def test_an_option_of_the_address_turns_prepared_statements_off(option: str, prepared: bool) -> None:
    with postgres_server() as server:
        engine = database.make_engine(server.url + option)
        with engine.connect() as connection:
            for number in range(12):
                connection.execute(text("SELECT :number + 1"), {"number": number})
            count = connection.scalar(text("SELECT count(*) FROM pg_prepared_statements"))
        engine.dispose()
        assert (count > 0) is prepared


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("notaurl", "no URL of a database"),
        ("", "no URL of a database"),
        ("postgresql+psycopg://me:s3cret@host:s3cret/x", "no URL of a database"),
        ("postgres://me:s3cret@host/x", "A URL of 'postgres' cannot be used. Write sqlite:"),
        ("postgresql://me:s3cret@host/x", "A URL of 'postgresql' cannot be used"),
        ("postgresql+asyncpg://me:s3cret@host/x", "cannot be used"),
        ("mysql://me:s3cret@host/x", "A URL of 'mysql' cannot be used"),
        ("postgresql+psycopg://me:s3cret@host/x?pool_size=5", "has no option 'pool_size'"),
        ("postgresql+psycopg://me:s3cret@host/x?autocommit=1", "has no option 'autocommit'"),
        ("postgresql+psycopg://me:s3cret@host/x?prepare_threshold=off", "prepare_threshold must be a number"),
        ("postgresql+psycopg://me:s3cret@host/x?port=s3cret", "`host` and `port` do not fit"),
        ("postgresql+psycopg://me:s3cret@/x?host=a&host=b&port=1,2,3", "`host` and `port` do not fit"),
        ("postgresql+psycopg://me:s3cret@host/x?connect_timeout=5s", "connect_timeout must be a number"),
        ("postgresql+psycopg://me:s3cret@host/x?prepare_threshold=1&prepare_threshold=2", "must be a number"),
        ("postgresql+psycopg://me:ab@s3cret@host/x", "Write @ in a user name or password as %40"),
        ("postgresql+psycopg://me:ab@c/s3cret@host:5432/x", "Write @ in a user name or password as %40"),
        ("postgresql+psycopg://me:s3cret@host:65536/x", "port must be 1 to 65535"),
        ("postgresql+psycopg://me:s3cret@host:0/x", "port must be 1 to 65535"),
        ("sqlite://", "path of a SQLite file must be absolute"),
        ("sqlite:///:memory:", "path of a SQLite file must be absolute"),
        ("sqlite:///permille.db", "path of a SQLite file must be absolute"),
        ("sqlite:////srv/permille.db?mode=ro", "without options"),
        ("sqlite+aiosqlite:////srv/permille.db", "cannot be used"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_without_its_password(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        parse_url(url)
    assert "s3cret" not in str(refused.value)
    assert refused.value.__cause__ is None


def test_options_of_the_driver_are_accepted() -> None:
    url = "postgresql+psycopg://me@/x?host=/run/postgresql&sslmode=verify-full&application_name=permille"
    assert parse_url(url).database == "x"
    assert parse_url("postgresql+psycopg://me%40host:a%40b%2F@host/x").password == "a@b/"
