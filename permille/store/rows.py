"""Read, lock and add single rows, and read lists page by page, newest first.

A page ends at a cursor, which is the key of its last row. Rows that are added between two requests
therefore do not shift the pages: no row is repeated or skipped. If the service did not make the ids of
the rows, the rows are ordered by time first, since such ids do not sort by time.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any, Generic, TypeVar

from sqlalchemy import Float, Integer, Select, bindparam, func, inspect, or_, select
from sqlalchemy.orm import InstrumentedAttribute, Session
from sqlalchemy.types import TypeEngine

from permille.errors import InputError, PackageError
from permille.store.errors import ConflictError, require
from permille.store.tables import EPOCH, MICROSECOND, Base, Instant, Named, microseconds_of

_log = logging.getLogger(__name__)
Row = TypeVar("Row")
Record = TypeVar("Record")
NamedRow = TypeVar("NamedRow", bound=Named)
NewRow = TypeVar("NewRow", bound=Base)
# The largest number of rows of a page. This bounds the memory that one request may take.
MAX_LIMIT = 200
# The errors of values that no record can have. Errors of the database and the disk are not among them.
_DAMAGES = (ArithmeticError, AttributeError, InputError, LookupError, PackageError, TypeError, ValueError)
_LONGEST_TIME = 17  # decimal digits of the microseconds since 1970: up to the year 5138
_LONGEST_NUMBER = 9  # decimal digits: every number of this length fits 32 bits, as some keys have


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The part of a list to read: the number of rows, and the cursor of the previous page."""

    limit: int = 50
    cursor: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Page(Generic[Row]):
    """Some rows, newest first, and the cursor of the next page (None after the last page)."""

    items: tuple[Row, ...]
    next_cursor: str | None


FIRST = Window()


def get(session: Session, table: type[NamedRow], *, tenant_id: str, row_id: str) -> NamedRow:
    """Read one row of a tenant. Raises NotFoundError.

    Example:

        model = rows.get(
            session, tables.Model, tenant_id=operator.tenant_id, row_id="model_01jd3k..."
        )
    """
    found: NamedRow | None = session.scalar(_row_of(table), {"tenant_id": tenant_id, "row_id": row_id})
    return require(found, f"There is no {table.noun} {row_id!r}.")


def add(session: Session, row: NewRow) -> NewRow:
    """Insert a row now, so that later statements of this transaction may refer to it. Return it."""
    # The tables declare foreign keys without `relationship`, so SQLAlchemy cannot order the inserts itself.
    session.add(row)
    session.flush()
    return row


def check_room(session: Session, table: type[Named], *, tenant_id: str, most: int) -> None:
    """Check that a tenant has fewer than `most` rows of a table. Raises ConflictError."""
    count = session.scalar(select(func.count()).where(table.tenant_id == tenant_id)) or 0
    if count >= most:
        raise ConflictError(
            f"The tenant has {count} of {most} possible {table.__tablename__.replace('_', ' ')}. Delete one."
        )


def lock(
    session: Session, table: type[NamedRow], *, tenant_id: str, row_id: str, to_remove: bool = False
) -> NamedRow:
    """Read and lock one row of a tenant, as it is now. Raises NotFoundError.

    Args:
        to_remove: take the lock of a deletion. Other transactions that lock the row wait, and then
            do not find it.
    """
    # We never change a key, so inserts of rows that refer to this one need not wait (PostgreSQL).
    locked = _row_of(table).with_for_update(key_share=not to_remove)
    query = locked.execution_options(populate_existing=True)
    found: NamedRow | None = session.scalar(query, {"tenant_id": tenant_id, "row_id": row_id})
    return require(found, f"There is no {table.noun} {row_id!r}.")


@cache
def _row_of(table: type[NamedRow]) -> Select[NamedRow]:
    """Return the statement that reads one row. It is cached: building a statement costs more than
    running it.
    """
    return select(table).where(table.tenant_id == bindparam("tenant_id"), table.id == bindparam("row_id"))


def list_all(
    session: Session, table: type[NamedRow], *, tenant_id: str, window: Window = FIRST
) -> Page[NamedRow]:
    """List all rows of a tenant in one table, a page at a time."""
    return fetch_page(session, select(table).where(table.tenant_id == tenant_id), window, table.id)


def fetch_page(
    session: Session,
    query: Select[Row],
    window: Window,
    key: InstrumentedAttribute[str] | InstrumentedAttribute[int],
    made_at: InstrumentedAttribute[datetime] | None = None,
) -> Page[Row]:
    """Return the page of a query that begins at the window's cursor.

    Args:
        query: unordered, with the filter of the tenant.
        key: a unique column. Ids that the service made sort by their time.
        made_at: the column of the row's time, if the keys do not sort by time.

    Raises:
        InputError: the cursor is not one that a page returned.
    """
    if made_at is None:
        query = query.order_by(key.desc())
        if window.cursor is not None:
            query = query.where(key < _parse_key(window.cursor, key))
    else:
        query = query.order_by(made_at.desc(), key.desc())
        if window.cursor is not None:
            at, last = _parse_moment(window.cursor)
            # Together, the conditions select earlier rows, and rows of the same time with a lower key. In
            # this form, SQLite can begin at the cursor.
            query = query.where(or_(made_at < at, key < last), made_at <= at)
    # One more row than asked for tells whether there is a next page.
    rows = session.scalars(query.limit(window.limit + 1)).all()
    items = tuple(rows[: window.limit])
    if len(rows) <= window.limit:
        return Page(items=items, next_cursor=None)
    cursor = str(getattr(items[-1], key.key))
    if made_at is not None:
        cursor = f"{microseconds_of(getattr(items[-1], made_at.key))}.{cursor}"
    return Page(items=items, next_cursor=cursor)


def records_of(found: Iterable[Row], present: Callable[[Row], Record]) -> list[Record]:
    """Return the records of rows. Leave out and log a row that has none, such as a job in an unknown state.

    The service stores no such row, but a person may have changed one by hand. It must not hide the others.
    """
    return [record for row in found for record in _record_of(row, present)]


def damaged(row: Base) -> dict[str, type]:
    """Return the columns whose value should be a number or a time and is not, with their types.

    SQLite stores text in any column. Every database stores numbers that are no time, such as 2**62.
    """
    kinds = {column.key: _kind(column.type) for column in inspect(type(row)).columns}
    found = {name: (kind, getattr(row, name)) for name, kind in kinds.items() if kind is not None}
    return {
        name: kind
        for name, (kind, value) in found.items()
        if value is not None and not isinstance(value, (kind, int) if kind is float else kind)
    }


def _kind(column: TypeEngine[Any]) -> type | None:
    """Return the type of the numbers or times of a column, or None."""
    if isinstance(column, Instant):
        return datetime
    return column.python_type if isinstance(column, Integer | Float) else None


def _record_of(row: Row, present: Callable[[Row], Record]) -> tuple[Record, ...]:
    try:
        return (present(row),)
    except _DAMAGES as exc:
        mapped, why = inspect(row, raiseerr=False), " ".join(str(exc).split())
        which = row if mapped is None else f"{mapped.class_.__name__} {mapped.identity}"
        _log.error("a list leaves out the damaged row %s: %s", which, why)
        return ()


def _parse_key(cursor: str, key: InstrumentedAttribute[str] | InstrumentedAttribute[int]) -> str | int:
    """Return the key of a cursor, as a number if the key's column has numbers. Raises InputError."""
    if key.type.python_type is str:
        return cursor
    if not (cursor.isascii() and cursor.isdecimal() and len(cursor) <= _LONGEST_NUMBER):
        raise InputError(f"{cursor[:80]!r} is not a cursor that a page returned.")
    return int(cursor)


def _parse_moment(cursor: str) -> tuple[datetime, str]:
    """Return the time and the key of a cursor `<microseconds>.<key>`. Raises InputError."""
    number, point, key = cursor.partition(".")
    if not (point and number.isascii() and number.isdecimal() and len(number) <= _LONGEST_TIME):
        raise InputError(f"{cursor[:80]!r} is not a cursor that a page returned.")
    return EPOCH + int(number) * MICROSECOND, key
