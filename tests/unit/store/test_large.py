"""Tests that lists, fleet, metrics, retention and sweeps scan no whole table, on either database."""

from collections.abc import Iterator

import pytest
from sqlalchemy import Connection, Engine, Index, UniqueConstraint, event, text

from permille.store.database import Database
from permille.store.migrations.schema import migrate
from permille.store.tables import Base
from tests.large_store import CASES, LARGE, stock
from tests.unit.store import postgres
from tests.unit.store.conftest import BACKENDS
from tests.unit.store.plans import assert_by_index, explained

_REMOVABLE = ("jobs", "artifacts", "models", "uploads")


@pytest.fixture(scope="module", params=BACKENDS)
def stocked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """Yield a database with 2,000 rows of everything. Tests may remove only rows that no other test needs."""
    if request.param == "sqlite":
        yield from _stocked(f"sqlite:///{tmp_path_factory.mktemp('large')}/permille.db")
        return
    with postgres.postgres_server() as server:
        yield from _stocked(server.url)


def _stocked(url: str) -> Iterator[Database]:
    migrate(url)
    db = Database(url)
    stock(db, 2000)
    yield db
    db.close()


@pytest.fixture
def _indexes_preferred() -> Iterator[None]:
    """Let PostgreSQL scan a table only if no index fits. Otherwise, it would scan such small tables."""

    def prefer(connection: Connection) -> None:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SET LOCAL enable_seqscan = off"))

    event.listen(Engine, "begin", prefer)
    yield
    event.remove(Engine, "begin", prefer)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("_indexes_preferred")
def test_statements_over_large_tables_go_by_index(stocked: Database, name: str) -> None:
    with explained(*LARGE) as plans:
        CASES[name].run(stocked)
    by_index = [table for table in LARGE if table not in CASES[name].whole]
    assert_by_index(plans, *CASES[name].by, tables=by_index)


def test_what_may_refer_to_a_row_that_goes_is_found_by_index() -> None:
    for table in Base.metadata.tables.values():
        found = [one for one in table.constraints if isinstance(one, UniqueConstraint)]
        indexes: list[Index | UniqueConstraint] = [*table.indexes, *found]
        leading = {one.columns[0].name for one in (*indexes, table.primary_key)}
        for key in table.foreign_keys:
            if key.column.table.name in _REMOVABLE:
                assert key.parent.name in leading, f"{table.name}.{key.parent.name} has no index"
