"""Parameters of paths and queries: ids, digests, names, and the cursors of pages.

An id begins with the prefix of its table, for example `model_`.
"""

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import Depends, HTTPException, Path, Query, Request
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from starlette.requests import ClientDisconnect

from permille.schemas.fields import (
    DIGEST_PATTERN,
    EXAMPLE_DIGEST,
    EXAMPLE_ULID,
    ID_PATTERN,
    MAX_INTEGER,
    NAME_PATTERN,
    ULID_PATTERN,
    Page,
)
from permille.schemas.problems import ProblemType
from permille.store import rows
from permille.store.rows import Window
from permille_service.problems import ApiError

Row = TypeVar("Row")
Record = TypeVar("Record")
BINARY = {"type": "string", "format": "binary"}
"""The JSON schema of bytes."""


def key_of(prefix: str | None, **options: Any) -> Any:
    """Make a path parameter for an id with this prefix, or for a digest if `prefix` is None."""
    if prefix is None:
        return Path(pattern=DIGEST_PATTERN, examples=[EXAMPLE_DIGEST], **options)
    return Path(pattern=f"^{prefix}_{ULID_PATTERN}$", examples=[f"{prefix}_{EXAMPLE_ULID}"], **options)


ModelId = Annotated[str, key_of("model")]
CorpusId = Annotated[str, key_of("corpus")]
JobId = Annotated[str, key_of("job")]
DeviceId = Annotated[str, key_of("dev")]
InvitationId = Annotated[str, key_of("inv")]
TokenId = Annotated[str, key_of("operator")]
PackageDigest = Annotated[str, key_of(None, alias="digest")]
BlobDigest = Annotated[str, key_of(None)]
# The agent chooses the id of a run (a UUID), so that a report which it sends twice is stored once.
RunId = Annotated[
    str,
    Path(
        pattern=r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
        examples=["5a0d2d3c-1c51-4b71-9a53-0d4f1f2f7c11"],
    ),
]
ReleaseName = Annotated[str, Path(alias="name", pattern=NAME_PATTERN, examples=["tiny-llama"])]
AliasName = Annotated[str, Path(alias="alias", pattern=NAME_PATTERN, examples=["stable"])]
VersionNumber = Annotated[int, Path(alias="version", ge=1, le=MAX_INTEGER, examples=[1])]

OtherVersion = Annotated[int | None, Query(ge=1, le=MAX_INTEGER, description="a version of the release")]
OfModel = Annotated[
    str | None, Query(pattern=f"^model_{ULID_PATTERN}$", description="list only records of this model")
]
OfDevice = Annotated[
    str | None, Query(pattern=f"^dev_{ULID_PATTERN}$", description="list only records of this device")
]
After = Annotated[int, Query(ge=0, le=MAX_INTEGER, description="return only entries with a larger `seq`")]
Limit = Annotated[int, Query(ge=1, le=rows.MAX_LIMIT, description="largest number of rows on the page")]
_CURSOR_TEXT = "`next_cursor` of the previous page"
_Cursor = Annotated[str | None, Query(pattern=ID_PATTERN, description=_CURSOR_TEXT)]
_MomentCursor = Annotated[
    str | None, Query(pattern=r"^[0-9]{1,17}\.[A-Za-z0-9_-]{1,180}$", description=_CURSOR_TEXT)
]
_NumberCursor = Annotated[str | None, Query(pattern=r"^[0-9]{1,9}$", description=_CURSOR_TEXT)]
DEFAULT_LIMIT = 50


# These dependencies are `async`, so that FastAPI does not run each of them in a thread.
async def _window(limit: Limit = DEFAULT_LIMIT, cursor: _Cursor = None) -> Window:
    return Window(limit=limit, cursor=cursor)


async def _moment_window(limit: Limit = DEFAULT_LIMIT, cursor: _MomentCursor = None) -> Window:
    return Window(limit=limit, cursor=cursor)


async def _number_window(limit: Limit = DEFAULT_LIMIT, cursor: _NumberCursor = None) -> Window:
    return Window(limit=limit, cursor=cursor)


Paging = Annotated[Window, Depends(_window)]
MomentPaging = Annotated[Window, Depends(_moment_window)]
"""Paging of lists that are sorted by time. Their cursors begin with a time in microseconds."""
NumberPaging = Annotated[Window, Depends(_number_window)]
"""Paging of lists that are sorted by number: the rounds of a federation, the entries of the audit log."""


async def check_given_once(request: Request) -> None:
    """Refuse a query with a repeated parameter, and a JSON body with a repeated key.

    FastAPI would silently take the last value, and a proxy may have checked the first.
    """
    route = request.scope["route"]
    repeated: Counter[tuple[str, str]] = Counter()
    # Nearly all requests skip this: with at most one parameter, none can repeat.
    if b"&" in request.scope["query_string"]:
        names = _query_names(route.dependant)
        given = (name for name, _ in request.query_params.multi_items() if name in names)
        repeated += Counter(("query", name) for name in given)
    if route.body_field is not None and "json" in request.headers.get("content-type", ""):
        with suppress(ValueError, RecursionError):  # FastAPI refuses a body that is not JSON
            json.loads(await request.body(), object_pairs_hook=partial(_count_keys, repeated))
    errors = [
        {"loc": place, "msg": f"Give it once, not {count} times"}
        for place, count in repeated.items()
        if count > 1
    ]
    if errors:
        raise RequestValidationError(errors)


def _count_keys(repeated: Counter[tuple[str, str]], pairs: list[tuple[str, Any]]) -> None:
    """Count the keys of an object that it has more than once."""
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1:
            repeated["body", name] += count


def named(examples: Mapping[str, object]) -> dict[str, Any]:
    """Return the examples of a body, given by their names, as the OpenAPI document has them."""
    return {name: {"value": body} for name, body in examples.items()}


def raw_body(examples: Mapping[str, Mapping[str, object]], schema: Mapping[str, str]) -> dict[str, Any]:
    """Return the part of the OpenAPI document about a body that a route reads as bytes.

    Args:
        examples: for each media type of the body, examples by their names.
        schema: the JSON schema of the body.
    """
    content = {name: {"schema": schema, "examples": named(bodies)} for name, bodies in examples.items()}
    return {"requestBody": {"required": True, "content": content}}


async def read_body(request: Request) -> bytes:
    """Read a raw body. Raises HTTPException (400) if the client disconnects too early."""
    try:
        return await request.body()
    except ClientDisconnect as exc:
        raise HTTPException(400, "The client disconnected before the end of the body.") from exc


def media_type_of(request: Request, allowed: Collection[str]) -> str:
    """Return the media type of a body. Raises ApiError (`unsupported-media-type`) if it is not allowed."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in allowed:
        raise ApiError(
            ProblemType.UNSUPPORTED_MEDIA_TYPE,
            f"The media type must be {' or '.join(allowed)}, got {media_type[:60]!r}.",
        )
    return media_type


def _query_names(dependant: Dependant) -> frozenset[str]:
    """Return the names of a route's query parameters, including those of its dependencies."""
    own = frozenset(field.alias for field in dependant.query_params)
    return own.union(*map(_query_names, dependant.dependencies))


def page_of(page: rows.Page[Row], present: Callable[[Row], Record]) -> Page[Record]:
    """Turn a page of rows into a page of records."""
    return Page(items=rows.records_of(page.items, present), next_cursor=page.next_cursor)
