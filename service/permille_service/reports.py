"""Serving what a job left as evidence: a JSON report and its picture, both blobs."""

from typing import Any

from fastapi import Request, Response

from permille.errors import PackageError
from permille.schemas.problems import ProblemType
from permille_service.context import Service
from permille_service.packages.content import blob_response
from permille_service.problems import ApiError

Responses = dict[int | str, dict[str, Any]]

PICTURE_RESPONSES: Responses = {
    200: {
        "description": "the picture",
        "content": {"image/png": {"schema": {"type": "string", "format": "binary"}}},
    },
    304: {"description": "the content is the one that the client has"},
}
REPORT_RESPONSES: Responses = {
    200: {"description": "the report", "content": {"application/json": {"schema": {"type": "object"}}}},
    304: {"description": "the content is the one that the client has"},
}


def report_response(request: Request, service: Service, digest: str, media_type: str) -> Response:
    """The response with a stored report. Raises ApiError (`not-found`) when its blob is gone."""
    try:
        found = service.blobs.has(digest)
    except PackageError:
        found = False
    if not found:
        raise ApiError(ProblemType.NOT_FOUND, "this report is no longer stored")
    return blob_response(request, service.blobs.path(digest), digest, media_type)
