"""Responses with the bytes of a blob: ETag, conditional requests and one byte range (RFC 9110).

A digest identifies the content, so the ETag of a blob never changes, and caches may keep the blob for ever.
A Range header that is malformed or has several ranges is ignored, as the RFC allows. The answer then has the
whole content.

The API checks permissions and conditions. The setting `downloads` selects who sends the bytes:

- `serve`: the API sends them, from the folder or from the bucket.
- `accel`: nginx sends them from the folder. The API only answers with an X-Accel-Redirect header.
- `redirect`: the bucket sends the blobs of packages. The API redirects to a signed URL, valid for some
  minutes.
"""

import re
from itertools import chain
from typing import Any, Final

from fastapi import Request, Response
from starlette.datastructures import MutableHeaders
from starlette.responses import FileResponse, RedirectResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from permille.package.blobs import BlobFolder
from permille.schemas.problems import ProblemType
from permille.store.tables import ArtifactBlob
from permille_service.context import Service
from permille_service.problems import ApiError, documented
from permille_service.settings import Downloads

Responses = dict[int | str, dict[str, Any]]

ACCEL_PREFIX: Final = "/permille-blobs/"
"""Internal location in the configuration of nginx that maps to the folder of the blobs."""
CACHE_CONTROL: Final = "private, max-age=31536000, immutable"
NOT_MODIFIED: Final[Responses] = {304: {"description": "the client has this content already"}}
_RANGE: Final = re.compile(r"bytes=(\d{0,19})-(\d{0,19})", re.ASCII)


def body_of(description: str, *media_types: str) -> dict[str, Any]:
    """Return the OpenAPI description of an answer whose body has one of these media types."""
    content = {
        name: {
            "schema": {"type": "object"} if name.endswith("json") else {"type": "string", "format": "binary"}
        }
        for name in media_types
    }
    return {"description": description, "content": content}


def content_responses(description: str, *media_types: str) -> Responses:
    """Return the `responses` of a route that serves blobs of these types."""
    return {
        200: body_of(description, *media_types),
        206: body_of("the requested range", *media_types),
        **NOT_MODIFIED,
        **documented(ProblemType.PRECONDITION_FAILED, ProblemType.RANGE_NOT_SATISFIABLE),
    }


def check_stored(blobs: BlobFolder, blob: ArtifactBlob) -> None:
    """Check that the store has a blob in its full length. Its bytes are not read: the receiver hashes them.

    Raises:
        ApiError: `unavailable`: the store lacks the blob, or has another number of bytes.
        RetryableError: the bucket does not answer.
    """
    found = blobs.entry(blob.digest)
    # A row of the database names the blob. So the store has lost it, for example on a full disk, or the store
    # is still being copied from elsewhere. This is not the client's mistake.
    if found is None:
        raise ApiError(ProblemType.UNAVAILABLE, f"the blob {blob.digest} is not in the blob store")
    if found.size_bytes != blob.size_bytes:
        raise ApiError(
            ProblemType.UNAVAILABLE,
            f"the blob {blob.digest} is damaged: the blob store has {found.size_bytes} bytes instead of "
            f"{blob.size_bytes}",
        )


def blob_response(
    request: Request, service: Service, blob: ArtifactBlob, *, may_redirect: bool = False
) -> Response:
    """Return the response to GET or HEAD of a stored blob.

    Args:
        may_redirect: whether the client can follow a redirect to another host.

    Raises:
        ApiError: `unavailable`: the store lacks the blob or a part of it.
            `precondition-failed`: If-Match names another ETag.
            `range-not-satisfiable`: the range is outside of the blob.
        RetryableError: the bucket does not answer.
        OperatorError: the bucket refuses the service's credentials.
    """
    blobs, downloads = service.blobs, service.settings.downloads
    digest, size, media_type = blob.digest, blob.size_bytes, blob.media_type
    # The answer may be cached for a year, so it must not have a part of the blob as the whole.
    check_stored(blobs, blob)
    etag = f'"{digest}"'
    headers = {"ETag": etag, "Cache-Control": CACHE_CONTROL}
    if_match = request.headers.get("if-match")
    if if_match is not None and not _matches(if_match, etag):
        raise ApiError(
            ProblemType.PRECONDITION_FAILED,
            f"If-Match names another version. The ETag of this blob is {etag}.",
            headers={"ETag": etag},
        )
    if_none_match = request.headers.get("if-none-match")
    # RFC 9110, 13.1.2: If-None-Match compares weakly, If-Match strongly.
    if if_none_match is not None and _matches(if_none_match, etag, weak=True):
        return Response(status_code=304, headers=headers)
    gets = request.method == "GET"
    # RFC 9110, 14.2: a Range header is ignored unless the method is GET.
    asked = _asked_range(request, etag, size) if gets else None
    if may_redirect and gets and downloads is Downloads.REDIRECT:
        address = blobs.opened_by(digest, media_type)
        if address is not None:
            headers["Cache-Control"] = "no-store"  # the signed URL expires after some minutes
            return RedirectResponse(address, 307, headers)
    if service.settings.blob_bucket is not None:
        headers |= {"Accept-Ranges": "bytes", "Content-Type": media_type}
        if gets:
            return _stream_from_bucket(blobs, digest, size, asked, headers)
        return Response(headers={**headers, "Content-Length": str(size)})
    path = blobs.path(digest)
    # A request with If-Match gets the file from the API. nginx would check the header again, and refuse the
    # request, because it has no ETag for the file (`etag off`).
    if gets and downloads is Downloads.ACCEL and if_match is None:
        headers["X-Accel-Redirect"] = ACCEL_PREFIX + path.relative_to(blobs.root).as_posix()
        return Response(headers=headers, media_type=media_type)
    return _Blob(path, headers=headers, media_type=media_type, ranged=asked is not None)


def _stream_from_bucket(
    blobs: BlobFolder, digest: str, size: int, asked: range | None, headers: dict[str, str]
) -> Response:
    part, status = range(size), 200
    if asked is not None:
        part, status = asked, 206
        headers["Content-Range"] = f"bytes {asked.start}-{asked.stop - 1}/{size}"
    headers["Content-Length"] = str(len(part))
    body = blobs.stream(digest, part.start, part.stop)
    first = next(body, b"")  # an error here is answered with a problem; a later error cuts off the body
    return StreamingResponse(chain((first,), body), status, headers)


class _Blob(FileResponse):
    """A file response that ignores the Range header, unless `_asked_range` has accepted it (`ranged`)."""

    def __init__(self, *arguments: Any, ranged: bool, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._ranged = ranged

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the file or the requested range."""
        if not self._ranged:
            headers = MutableHeaders(scope=scope)
            del headers["range"]
            scope = {**scope, "headers": headers.raw}
        await super().__call__(scope, receive, send)


def _asked_range(request: Request, etag: str, size: int) -> range | None:
    """Return the requested range, or None if the whole content must be sent.

    Raises:
        ApiError: `range-not-satisfiable`: the range is well formed, but outside of the content.
    """
    header = request.headers.get("range", "")
    found = _RANGE.fullmatch(header.strip())
    if found is None or found.group(1) == found.group(2) == "":
        return None
    if request.headers.get("if-range", etag).strip() != etag:
        return None  # If-Range names other content, so send the whole content
    first, last = found.groups()
    # RFC 9110, 14.1.1: a range whose end lies before its start is malformed, so it is ignored.
    if first and last and int(last) < int(first):
        return None
    if size == 0 or (int(first) >= size if first else int(last) == 0):
        raise ApiError(
            ProblemType.RANGE_NOT_SATISFIABLE,
            f"The blob has {size} bytes, so the range {header[:60]!r} is outside of it.",
            headers={"Content-Range": f"bytes */{size}"},
        )
    # `bytes=-500` means the last 500 bytes.
    if not first:
        return range(max(0, size - int(last)), size)
    return range(int(first), min(size, int(last) + 1) if last else size)


def _matches(header: str, etag: str, *, weak: bool = False) -> bool:
    candidates = [candidate.strip() for candidate in header.split(",")]
    if weak:
        candidates = [candidate.removeprefix("W/") for candidate in candidates]
    return "*" in candidates or etag in candidates
