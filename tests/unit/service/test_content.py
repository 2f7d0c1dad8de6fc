"""Tests of byte ranges according to RFC 9110."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response
from starlette.testclient import TestClient

from permille.package.blobs import BlobFolder
from permille_service import problems
from permille_service.content import blob_response
from permille_service.settings import Downloads

TEN = b"0123456789"


def answer(folder: Path, content: bytes, header: str) -> Any:
    """Return the response to GET of a blob with this Range header."""
    settings = SimpleNamespace(downloads=Downloads.SERVE, blob_bucket=None)
    service: Any = SimpleNamespace(blobs=BlobFolder(folder), settings=settings)
    stored: Any = SimpleNamespace(
        digest=service.blobs.put_bytes(content),
        size_bytes=len(content),
        media_type="application/octet-stream",
    )
    app = FastAPI()

    @app.get("/")
    def blob(request: Request) -> Response:
        return blob_response(request, service, stored)

    problems.install(app)
    return TestClient(app).get("/", headers=[(b"Range", header.encode())])


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("bytes=0-0", b"0"),
        ("bytes=0-", TEN),
        ("bytes=3-5", b"345"),
        ("bytes=3-500", b"3456789"),
        ("bytes=-3", b"789"),
        ("bytes=-300", TEN),
    ],
)
def test_a_range_is_sent_alone(tmp_path: Path, header: str, expected: bytes) -> None:
    found = answer(tmp_path, TEN, header)
    assert (found.status_code, found.content) == (206, expected)
    start = TEN.index(expected)
    assert found.headers["content-range"] == f"bytes {start}-{start + len(expected) - 1}/10"
    assert found.headers["content-length"] == str(len(expected))


@pytest.mark.parametrize(
    "header", ["bytes=5-3", "bytes=-", "bytes=0-1,3-4", "items=0-1", "bytes=a-b", "bytes=٣-٥", ""]
)
def test_other_headers_are_ignored(tmp_path: Path, header: str) -> None:
    found = answer(tmp_path, TEN, header)
    assert (found.status_code, found.content) == (200, TEN)


@pytest.mark.parametrize(
    ("header", "size"), [("bytes=10-", 10), ("bytes=99-100", 10), ("bytes=-0", 10), ("bytes=0-", 0)]
)
def test_a_range_outside_of_the_content_is_not_satisfiable(tmp_path: Path, header: str, size: int) -> None:
    found = answer(tmp_path, TEN[:size], header)
    assert (found.status_code, found.headers["content-type"]) == (416, "application/problem+json")
    assert found.headers["content-range"] == f"bytes */{size}"
