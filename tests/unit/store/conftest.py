"""A fresh, migrated database with a tenant and a clock that tests move. On PostgreSQL too, if installed."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import text

from permille.store import access
from permille.store.database import Database, make_engine
from permille.store.schema import migrate
from tests.unit.store import postgres

BACKENDS = ("sqlite", "postgresql") if postgres.AVAILABLE else ("sqlite",)


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.at = datetime(2030, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        """The time."""
        return self.at

    def forward(self, seconds: float) -> None:
        """Move on."""
        self.at += timedelta(seconds=seconds)


@pytest.fixture
def clock() -> Clock:
    """The time of the database under test."""
    return Clock()


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A PostgreSQL database that tests may empty."""
    with postgres.postgres_url() as found:
        yield found


@pytest.fixture(params=BACKENDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/permille.db"
    found = str(request.getfixturevalue("postgres_url"))
    engine = make_engine(found)
    with engine.begin() as connection:
        connection.execute(text("DROP SCHEMA public CASCADE"))
        connection.execute(text("CREATE SCHEMA public"))
    engine.dispose()
    return found


@pytest.fixture
def db(url: str, clock: Clock) -> Iterator[Database]:
    """A migrated database that runs on `clock`."""
    migrate(url)
    database = Database(url, clock=clock)
    yield database
    database.close()


@pytest.fixture
def tenant_id(db: Database) -> str:
    """A tenant."""
    with db.write() as session:
        return access.create_tenant(session, name="acme").id


@pytest.fixture
def other_tenant_id(db: Database) -> str:
    """Another tenant."""
    with db.write() as session:
        return access.create_tenant(session, name="globex").id
