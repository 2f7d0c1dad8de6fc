"""Reading rows of a tenant: one by its id, or a page of them, newest first.

A page is cut by id, or by time and id where others made the ids. So rows added meanwhile neither repeat nor
hide others. A cursor is the key of a page's last row.
"""

from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any, Generic, TypeVar

from sqlalchemy import Select, bindparam, or_, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from permille.errors import InputError
from permille.store.errors import NotFoundError
from permille.store.tables import EPOCH, MICROSECOND, Named, microseconds_of

Row = TypeVar("Row")
NamedRow = TypeVar("NamedRow", bound=Named)
MAX_LIMIT = 200
_LONGEST_TIME = 17  # decimal digits: up to the year 5138


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Page of a list: the number of rows, and the last row of the previous page."""

    limit: int = 50
    cursor: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Page(Generic[Row]):
    """Some rows, newest first, and the cursor of what follows (None: nothing does)."""

    items: tuple[Row, ...]
    next_cursor: str | None


FIRST = Window()


def get(session: Session, table: type[NamedRow], *, tenant_id: str, row_id: str) -> NamedRow:
    """Read one row. Raises NotFoundError.

    Example:
        model = rows.get(session, tables.Model, tenant_id=operator.tenant_id, row_id="model_01jd3k...")
    """
    return _find(session, _row_of(table), table, tenant_id, row_id)


def lock(
    session: Session, table: type[NamedRow], *, tenant_id: str, row_id: str, to_remove: bool = False
) -> NamedRow:
    """Read one row for change, as it is now. Raises NotFoundError.

    Args:
        to_remove: transactions that lock the row at the same time wait, and then find none.
    """
    # A change of the key is none of ours: rows that refer to this one need not wait (PostgreSQL).
    query = _row_of(table).with_for_update(key_share=not to_remove)
    return _find(session, query.execution_options(populate_existing=True), table, tenant_id, row_id)


@cache
def _row_of(table: type[NamedRow]) -> Select[NamedRow]:
    """Made once a table: making a statement costs more than running it."""
    return select(table).where(table.tenant_id == bindparam("tenant_id"), table.id == bindparam("row_id"))


def _find(
    session: Session, query: Select[Any], table: type[NamedRow], tenant_id: str, row_id: str
) -> NamedRow:
    found: NamedRow | None = session.scalar(query, {"tenant_id": tenant_id, "row_id": row_id})
    if found is None:
        raise NotFoundError(f"no {table.noun} {row_id!r}")
    return found


def list_all(
    session: Session, table: type[NamedRow], *, tenant_id: str, window: Window = FIRST
) -> Page[NamedRow]:
    """List a tenant's rows of a table."""
    return fetch_page(session, select(table).where(table.tenant_id == tenant_id), window, table.id)


def fetch_page(
    session: Session,
    query: Select[Row],
    window: Window,
    key: InstrumentedAttribute[str],
    made_at: InstrumentedAttribute[datetime] | None = None,
) -> Page[Row]:
    """Run `query` (unordered, tenant filter included) from the cursor on.

    Args:
        key: a unique column of the row; ids of ours sort by the time they were made.
        made_at: the time that orders the rows, where their key does not say so.

    Raises:
        InputError: no page gave such a cursor.
    """
    if made_at is None:
        query = query.order_by(key.desc())
        if window.cursor is not None:
            query = query.where(key < window.cursor)
    else:
        query = query.order_by(made_at.desc(), key.desc())
        if window.cursor is not None:
            at, last = _parse_moment(window.cursor)
            # The first condition alone would do, but only the second lets SQLite begin at the cursor.
            query = query.where(or_(made_at < at, key < last), made_at <= at)
    rows = session.scalars(query.limit(window.limit + 1)).all()
    items = tuple(rows[: window.limit])
    if len(rows) <= window.limit:
        return Page(items=items, next_cursor=None)
    cursor = str(getattr(items[-1], key.key))
    if made_at is not None:
        cursor = f"{microseconds_of(getattr(items[-1], made_at.key))}.{cursor}"
    return Page(items=items, next_cursor=cursor)


def _parse_moment(cursor: str) -> tuple[datetime, str]:
    """The time and the key of a cursor `<microseconds>.<key>`. Raises InputError."""
    number, point, key = cursor.partition(".")
    if not (point and number.isascii() and number.isdecimal() and len(number) <= _LONGEST_TIME):
        raise InputError(f"{cursor[:80]!r} is no cursor that a page returned.")
    return EPOCH + int(number) * MICROSECOND, key
