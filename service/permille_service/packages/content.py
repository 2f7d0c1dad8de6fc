"""Serving a blob: strong ETag, conditional requests, one byte range, caching for ever (RFC 9110, sections
8, 13, 14).

A blob's digest is its content, so its ETag never changes and a cache may keep it. A header that asks for
several ranges, or is malformed, is ignored, as the RFC allows: the whole content is sent.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from permille.schemas.problems import ProblemType
from permille_service.problems import ApiError

CHUNK_BYTES = 256 * 1024
CACHE_CONTROL = "private, max-age=31536000, immutable"
_RANGE = re.compile(r"bytes=(\d{0,19})-(\d{0,19})", re.ASCII)


def blob_response(request: Request, path: Path, digest: str, media_type: str) -> Response:
    """The response to GET or HEAD of the blob in `path`.

    Raises:
        ApiError: `precondition-failed`, `range-not-satisfiable`.
    """
    etag = f'"{digest}"'
    size = path.stat().st_size
    headers = {"ETag": etag, "Cache-Control": CACHE_CONTROL, "Accept-Ranges": "bytes"}
    if_match = request.headers.get("if-match")
    if if_match is not None and not _matches(if_match, etag):
        raise ApiError(
            ProblemType.PRECONDITION_FAILED, f"expected an If-Match of {etag}", headers={"ETag": etag}
        )
    if not_modified(request, etag):
        return Response(status_code=304, headers=headers)
    asked = _asked_range(request, etag, size) if request.method == "GET" else None
    start, stop = asked or (0, size)
    headers["Content-Length"] = str(stop - start)
    if asked:
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    status = 206 if asked else 200
    if request.method == "HEAD":
        return Response(status_code=status, headers=headers, media_type=media_type)
    return StreamingResponse(
        _read(path, start, stop), status_code=status, headers=headers, media_type=media_type
    )


def not_modified(request: Request, etag: str) -> bool:
    """Whether the client says, by If-None-Match, that it has this content."""
    header = request.headers.get("if-none-match")
    return header is not None and _matches(header, etag, weak=True)


def parse_range(header: str, size: int) -> tuple[int, int] | None:
    """The half-open byte range that a Range header asks for; None when the header is to be ignored.

    Raises:
        ApiError: `range-not-satisfiable`: the range is well formed and lies outside of `size` bytes.
    """
    found = _RANGE.fullmatch(header.strip())
    if found is None or found.group(1) == found.group(2) == "":
        return None
    first, last = found.groups()
    if first == "":
        length = min(int(last), size)
        start, stop = size - length, size
    else:
        start, stop = int(first), min(int(last) + 1, size) if last else size
        if last and int(last) < int(first):
            return None
    if start >= stop:
        raise ApiError(
            ProblemType.RANGE_NOT_SATISFIABLE,
            f"expected a range within {size} bytes, got {header[:60]!r}",
            headers={"Content-Range": f"bytes */{size}"},
        )
    return start, stop


def _asked_range(request: Request, etag: str, size: int) -> tuple[int, int] | None:
    header = request.headers.get("range")
    if header is None:
        return None
    if_range = request.headers.get("if-range")
    if if_range is not None and if_range.strip() != etag:
        return None  # the client's part belongs to other content: send all
    return parse_range(header, size)


def _matches(header: str, etag: str, *, weak: bool = False) -> bool:
    candidates = [candidate.strip() for candidate in header.split(",")]
    if weak:
        candidates = [candidate.removeprefix("W/") for candidate in candidates]
    return "*" in candidates or etag in candidates


def _read(path: Path, start: int, stop: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(start)
        left = stop - start
        while left and (chunk := file.read(min(CHUNK_BYTES, left))):
            left -= len(chunk)
            yield chunk
