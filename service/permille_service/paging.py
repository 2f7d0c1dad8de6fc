"""Pages of lists: how they are asked for, and how a page of rows becomes a page of records.

A cursor is the key of a page's last row; in lists by time (`MomentCursor`) its microseconds and its key.
"""

from collections.abc import Callable
from typing import Annotated, TypeVar

from fastapi import Query

from permille.schemas.fields import Page
from permille.store import paging

Row = TypeVar("Row")
Record = TypeVar("Record")

Limit = Annotated[int, Query(ge=1, le=paging.MAX_LIMIT, description="rows of a page")]
Cursor = Annotated[
    str | None,
    Query(pattern=r"^[A-Za-z0-9_.-]{1,200}$", description="`next_cursor` of the page before"),
]
MomentCursor = Annotated[
    str | None,
    Query(pattern=r"^[0-9]{1,17}\.[A-Za-z0-9_-]{1,180}$", description="`next_cursor` of the page before"),
]
DEFAULT_LIMIT = 50


def store_cursor(cursor: str | None) -> str | None:
    """The store's cursor of an API cursor, which is the key of the last row of the page before."""
    return None if cursor is None else paging.encode_cursor(cursor)


def page_of(page: paging.Page[Row], present: Callable[[Row], Record]) -> Page[Record]:
    """The records of a page of rows."""
    cursor = page.next_cursor
    return Page(
        items=[present(row) for row in page.items],
        next_cursor=None if cursor is None else paging.decode_cursor(cursor),
    )
