"""Fixtures: a migrated database on SQLite and on PostgreSQL, tenants, a device, and a settable clock."""

import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import text

from permille.store import access, devices
from permille.store.database import Database, make_engine
from permille.store.migrations.schema import migrate
from permille.store.tables import Base
from tests.unit.store import postgres

BACKENDS = ("sqlite", "postgresql")
SQL_DIFFERS = (
    "test_claims",
    "test_clock",
    "test_collection",
    "test_federations",
    "test_large",
    "test_lock_order",
    "test_logs_at_once",
    "test_parents",
    "test_schema",
)
"""Modules whose statements or locks differ between the databases. `make test` has these on PostgreSQL."""


class Clock:
    """A clock that stands still between calls of `forward`."""

    def __init__(self) -> None:
        self.at = datetime(2030, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        """Return the time."""
        return self.at

    def forward(self, seconds: float) -> None:
        """Advance the clock."""
        self.at += timedelta(seconds=seconds)


@pytest.fixture
def clock() -> Clock:
    """Return the clock of the database under test."""
    return Clock()


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """Yield the URL of a PostgreSQL database that tests may empty."""
    with postgres.postgres_url() as found:
        yield found


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a migrated SQLite database, to copy."""
    path = tmp_path_factory.mktemp("template") / "permille.db"
    migrate(f"sqlite:///{path}")
    return path


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Mark the tests on PostgreSQL as slow, except those of `SQL_DIFFERS`."""
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if parameters.get("backend") == "postgresql" and item.path.stem not in SQL_DIFFERS:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Return the kind of database of the test."""
    return str(request.param)


@pytest.fixture
def url(request: pytest.FixtureRequest, backend: str, tmp_path: Path) -> str:
    """Return the URL of an empty database."""
    if backend == "sqlite":
        return f"sqlite:///{tmp_path}/empty.db"
    found = str(request.getfixturevalue("postgres_url"))
    _execute(found, ["DROP SCHEMA public CASCADE", "CREATE SCHEMA public"])
    return found


@pytest.fixture
def db(
    request: pytest.FixtureRequest, backend: str, template: Path, tmp_path: Path, clock: Clock
) -> Iterator[Database]:
    """Yield a migrated database without rows. It uses `clock`."""
    if backend == "sqlite":
        shutil.copy(template, tmp_path / "permille.db")
        url = f"sqlite:///{tmp_path}/permille.db"
    else:
        url = str(request.getfixturevalue("postgres_url"))
        migrate(url)
        tables = ", ".join(f'"{name}"' for name in Base.metadata.tables)
        _execute(url, [f"TRUNCATE {tables} CASCADE"])
    database = Database(url, clock=clock)
    yield database
    database.close()


def _execute(url: str, statements: list[str]) -> None:
    engine = make_engine(url)
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))
    engine.dispose()


@pytest.fixture
def tenant_id(db: Database) -> str:
    """Return the id of a tenant."""
    with db.write() as session:
        return access.create_tenant(session, name="acme").id


@pytest.fixture
def other_tenant_id(db: Database) -> str:
    """Return the id of another tenant."""
    with db.write() as session:
        return access.create_tenant(session, name="globex").id


@pytest.fixture
def device_id(db: Database, tenant_id: str) -> str:
    """Return the id of a device of the tenant."""
    with db.write() as session:
        _, code = devices.invite(session, tenant_id=tenant_id, release="tiny", alias="stable")
        return devices.enrol(session, code=code, public_key="k", name="n", agent_version="0.1.0").device.id
