"""Query plans of a database. They reveal full table scans without a measurement of time."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, event

from permille.store.tables import Base

_PARTIAL = [
    str(index.name)
    for table in Base.metadata.tables.values()
    for index in table.indexes
    if index.dialect_options["sqlite"]["where"] is not None
]
_STATEMENT = re.compile(r"SELECT|UPDATE|DELETE")


@contextmanager
def explained(*tables: str) -> Iterator[list[str]]:
    """Collect the query plans of the block's statements that contain one of the tables."""
    plans: list[str] = []
    about = re.compile(rf"\b({'|'.join(tables)})\b")

    def explain(
        connection: Connection, cursor: Any, statement: str, values: Any, _context: object, many: bool
    ) -> None:
        if not many and _STATEMENT.match(statement) and about.search(statement):
            word = "EXPLAIN QUERY PLAN" if connection.dialect.name == "sqlite" else "EXPLAIN"
            cursor.execute(f"{word} {statement}", values)
            plans.append("\n".join(str(row[-1]) for row in cursor.fetchall()))

    event.listen(Engine, "before_cursor_execute", explain)
    try:
        yield plans
    finally:
        event.remove(Engine, "before_cursor_execute", explain)


def assert_by_index(plans: list[str], *indexes: str, tables: Sequence[str] = ("jobs",)) -> None:
    """Assert that no plan scans a whole table, and that each of these indexes is in a plan.

    Scans of whole partial indexes are allowed. So are scans of covering indexes, which count all rows.
    """
    names, some = "|".join(tables), "|".join(_PARTIAL)
    scan = re.compile(
        rf"Seq Scan on ({names})\b|SCAN ({names})\b(?! USING (COVERING INDEX|INDEX ({some})\b))"
    )
    for plan in plans:
        assert not scan.search(plan), plan
    for name in indexes:
        assert any(re.search(rf"\b{name}\b", plan) for plan in plans), (name, plans)
