"""Tests of connections: a server that does not answer."""

import socket

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from permille.store import database
from permille.store.database import Database


def test_a_server_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "CONNECT_S", 2)  # the driver's shortest limit
    with socket.create_server(("127.0.0.1", 0)) as silent:
        db = Database(f"postgresql+psycopg://user@127.0.0.1:{silent.getsockname()[1]}/name")
        with pytest.raises(OperationalError, match="timeout"), db.read() as session:
            session.execute(text("SELECT 1"))
        db.close()


def test_an_address_may_name_another_limit() -> None:
    url = database.make_engine("postgresql+psycopg://user@host/name?connect_timeout=3").url
    assert url.query["connect_timeout"] == "3"
    assert database.make_engine("postgresql+psycopg://user@host/name").url.query["connect_timeout"] == "10"
