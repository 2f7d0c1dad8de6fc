"""Cursor pagination: pages are cut by id, so that rows added meanwhile neither repeat nor hide others."""

import base64
import binascii
from dataclasses import dataclass
from typing import Generic, TypeVar

from sqlalchemy import ColumnElement, Select
from sqlalchemy.orm import InstrumentedAttribute, Session

from permille.errors import InputError

Row = TypeVar("Row")
MAX_LIMIT = 200


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
    if not 1 <= limit <= MAX_LIMIT:
        raise InputError(f"expected a limit of 1 to {MAX_LIMIT}, got {limit}")
    if cursor is not None:
        before: ColumnElement[bool] = key < decode_cursor(cursor)
        query = query.where(before)
    rows = session.scalars(query.order_by(key.desc()).limit(limit + 1)).all()
    items = tuple(rows[:limit])
    more = len(rows) > limit
    return Page(items=items, next_cursor=encode_cursor(getattr(items[-1], key.key)) if more else None)


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
