"""Cursor pagination: pages are cut by id, or by time and id. So rows added meanwhile neither repeat nor hide
others.
"""

import base64
import binascii
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Generic, TypeVar

from sqlalchemy import ColumnElement, Select, and_, or_
from sqlalchemy.orm import InstrumentedAttribute, Session

from permille.errors import InputError

Row = TypeVar("Row")
MAX_LIMIT = 200
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_LONGEST_TIME = 17  # decimal digits: up to the year 5138


@dataclass(frozen=True, slots=True, kw_only=True)
class Page(Generic[Row]):
    """Some rows, newest first, and the cursor of what follows (None: nothing does)."""

    items: tuple[Row, ...]
    next_cursor: str | None


def fetch_page(
    session: Session,
    query: Select[Row],
    key: InstrumentedAttribute[str],
    *,
    limit: int,
    cursor: str | None,
) -> Page[Row]:
    """Run `query` (unordered, tenant filter included) from `cursor` on.

    Args:
        key: a unique column of the row; ids sort by the time they were made.
        limit: 1 to 200 rows.

    Raises:
        InputError: limit out of range, or a cursor that no page gave.
    """
    _check_limit(limit)
    if cursor is not None:
        before: ColumnElement[bool] = key < decode_cursor(cursor)
        query = query.where(before)
    rows = session.scalars(query.order_by(key.desc()).limit(limit + 1)).all()
    items = tuple(rows[:limit])
    more = len(rows) > limit
    return Page(items=items, next_cursor=encode_cursor(getattr(items[-1], key.key)) if more else None)


def fetch_newest(
    session: Session,
    query: Select[Row],
    time_key: InstrumentedAttribute[datetime],
    key: InstrumentedAttribute[str],
    *,
    limit: int,
    cursor: str | None,
) -> Page[Row]:
    """As `fetch_page`, the newest first, for rows whose ids do not sort by time: others made them.

    Args:
        time_key: when the row was made.
        key: a unique column; it orders rows of the same time.

    Raises:
        InputError: as `fetch_page`.
    """
    _check_limit(limit)
    if cursor is not None:
        at, before = _decode_moment(cursor)
        query = query.where(or_(time_key < at, and_(time_key == at, key < before)))
    rows = session.scalars(query.order_by(time_key.desc(), key.desc()).limit(limit + 1)).all()
    items = tuple(rows[:limit])
    next_cursor = None
    if len(rows) > limit:
        last = items[-1]
        next_cursor = encode_cursor(f"{_microseconds(getattr(last, time_key.key))}.{getattr(last, key.key)}")
    return Page(items=items, next_cursor=next_cursor)


def encode_cursor(key: str) -> str:
    """Make the opaque cursor of the rows after `key`."""
    return base64.urlsafe_b64encode(key.encode()).decode().rstrip("=")


def decode_cursor(cursor: str) -> str:
    """Read a cursor. Raises InputError when it is none of ours."""
    try:
        padded = cursor + "=" * (-len(cursor) % 4)
        return base64.b64decode(padded.encode("ascii"), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError, ValueError) as exc:
        raise InputError(f"expected a cursor that a page returned, got {cursor[:80]!r}") from exc


def _decode_moment(cursor: str) -> tuple[datetime, str]:
    """The time and the key of a cursor `<microseconds>.<key>`. Raises InputError."""
    number, point, key = decode_cursor(cursor).partition(".")
    if not (point and number.isascii() and number.isdecimal() and len(number) <= _LONGEST_TIME):
        raise InputError(f"expected a cursor that a page returned, got {cursor[:80]!r}")
    return _EPOCH + int(number) * _MICROSECOND, key


def _microseconds(at: datetime) -> int:
    return (at - _EPOCH) // _MICROSECOND


def _check_limit(limit: int) -> None:
    if not 1 <= limit <= MAX_LIMIT:
        raise InputError(f"expected a limit of 1 to {MAX_LIMIT}, got {limit}")
