"""Serving a blob: strong ETag, conditional requests, one byte range, caching for ever (RFC 9110, sections
8, 13, 14).

Starlette sends the bytes, whole or a range. A blob's digest is its content, so its ETag never changes and a
cache may keep it. A Range header that asks for several ranges, or is malformed, is ignored, as the RFC
allows: the whole content is sent.
"""

import re
from typing import Any, Final

from fastapi import Request, Response
from starlette.datastructures import MutableHeaders
from starlette.responses import FileResponse
from starlette.types import Receive, Scope, Send

from permille.errors import PackageError
from permille.schemas.problems import ProblemType
from permille_service.context import Service
from permille_service.problems import ApiError, documented

Responses = dict[int | str, dict[str, Any]]

CACHE_CONTROL: Final = "private, max-age=31536000, immutable"
NOT_MODIFIED: Final[Responses] = {304: {"description": "the content is the one that the client has"}}
_RANGE: Final = re.compile(r"bytes=(\d{0,19})-(\d{0,19})", re.ASCII)


def content_responses(description: str, *media_types: str) -> Responses:
    """The `responses` of a route that serves blobs of these types."""
    content = {
        name: {
            "schema": {"type": "object"} if name.endswith("json") else {"type": "string", "format": "binary"}
        }
        for name in media_types
    }
    return {
        200: {"description": description, "content": content},
        206: {"description": "the range that was asked for", "content": content},
        **NOT_MODIFIED,
        **documented(ProblemType.PRECONDITION_FAILED, ProblemType.RANGE_NOT_SATISFIABLE),
    }


def blob_response(request: Request, service: Service, digest: str, media_type: str) -> Response:
    """The response to GET or HEAD of a stored blob.

    Raises:
        ApiError: `unavailable`: it is not in the store; `precondition-failed`, `range-not-satisfiable`.
    """
    try:
        size = service.blobs.size(digest)
    except PackageError as exc:
        raise ApiError(ProblemType.UNAVAILABLE, f"the blob {digest} is not in the blob store") from exc
    etag = f'"{digest}"'
    headers = {"ETag": etag, "Cache-Control": CACHE_CONTROL}
    if_match = request.headers.get("if-match")
    if if_match is not None and not _matches(if_match, etag):
        raise ApiError(
            ProblemType.PRECONDITION_FAILED, f"expected an If-Match of {etag}", headers={"ETag": etag}
        )
    if_none_match = request.headers.get("if-none-match")
    if if_none_match is not None and _matches(if_none_match, etag, weak=True):
        return Response(status_code=304, headers=headers)
    asked = request.method == "GET" and _asks_for_range(request, etag, size)
    return _Blob(service.blobs.path(digest), headers=headers, media_type=media_type, ranged=asked)


class _Blob(FileResponse):
    """A file whose Range header is heeded only where it was found to be good."""

    def __init__(self, *arguments: Any, ranged: bool, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._ranged = ranged

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        if not self._ranged:
            headers = MutableHeaders(scope=scope)
            del headers["range"]
            scope = {**scope, "headers": headers.raw}
        await super().__call__(scope, receive, send)


def _asks_for_range(request: Request, etag: str, size: int) -> bool:
    """Whether there is one range to send; whether it is still of this content, Starlette decides.

    Raises:
        ApiError: `range-not-satisfiable`: it is well formed and lies outside of the content.
    """
    header = request.headers.get("range", "")
    found = _RANGE.fullmatch(header.strip())
    if found is None or found.group(1) == found.group(2) == "":
        return False
    if request.headers.get("if-range", etag).strip() != etag:
        return False  # the client's part belongs to other content
    first, last = found.groups()
    if first and last and int(last) < int(first):
        return False
    if size == 0 or (int(first) >= size if first else int(last) == 0):
        raise ApiError(
            ProblemType.RANGE_NOT_SATISFIABLE,
            f"expected a range within {size} bytes, got {header[:60]!r}",
            headers={"Content-Range": f"bytes */{size}"},
        )
    return True


def _matches(header: str, etag: str, *, weak: bool = False) -> bool:
    candidates = [candidate.strip() for candidate in header.split(",")]
    if weak:
        candidates = [candidate.removeprefix("W/") for candidate in candidates]
    return "*" in candidates or etag in candidates
