"""A local server with the hub's routes for one repository. A test sets `HF_ENDPOINT` to its address.

    with hub_site(Path("model"), {"modeling.py": b"..."}) as site:
        run_with_environment(HF_ENDPOINT=site.url)
        site.asked          # paths of files that were downloaded

The headers of errors are those by which clients of the hub tell errors apart.
"""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

REPOSITORY, COMMIT = "owner/name", "0123456789abcdef0123456789abcdef01234567"
GATED = "owner/gated"
REFUSING = {"owner/forbidden": 403, "owner/broken": 500}
"""Repositories that answer every request with this status."""
PORTAL, CIRCLE = "owner/portal", "owner/circle"
"""Repositories that answer with a page on which to sign in, and with redirects to the same address."""


@dataclass(slots=True, kw_only=True)
class HubSite:
    """Files of the server, and a record of what clients asked for.

    Attributes:
        url: Address without a slash at the end.
        files: Files of the repository.
        claimed: Sizes that the server states instead of the real ones.
        asked: Paths of the files whose content was asked for, in order.
        ranges: `Range` headers of these requests.
        sent: Bytes that the server sends instead of the real ones, without stating a length.
        stall_after: Number of bytes of a file after which the server stops sending until `go_on` is set.
        stalled: Set when the server stopped sending.
    """

    url: str = ""
    files: Mapping[str, bytes]
    claimed: Mapping[str, int] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)
    sent: Mapping[str, bytes] = field(default_factory=dict)
    stall_after: int | None = None
    stalled: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)


@contextmanager
def hub_site(model: Path, others: Mapping[str, bytes]) -> Iterator[HubSite]:
    """Serve the files of the folder `model` and the files `others` on loopback."""
    files = {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()}
    site = HubSite(files=files | dict(others))
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(site))
    site.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield site
    finally:
        site.go_on.set()
        server.shutdown()
        server.server_close()


def _handler(site: HubSite) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            _answer(self, site)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    return Handler


def _answer(request: BaseHTTPRequestHandler, site: HubSite) -> None:
    path = unquote(urlsplit(request.path).path)
    repository, _, rest = path.removeprefix("/api/models").removeprefix("/").partition("/")
    name, _, rest = rest.partition("/")
    repository = f"{repository}/{name}"
    if repository == GATED:
        _refuse(request, 401, "GatedRepo")
    elif repository in REFUSING:
        _refuse(request, REFUSING[repository], "")
    elif repository == PORTAL:
        _send(request, b"<html>Sign in", "text/html")
    elif repository == CIRCLE:
        _refuse(request, 302, "", Location=request.path)
    elif repository != REPOSITORY:
        _refuse(request, 401, "RepoNotFound")
    elif COMMIT not in rest:
        _refuse(request, 404, "RevisionNotFound")
    elif path.startswith("/api/models/"):
        sizes = {name: len(data) for name, data in site.files.items()} | dict(site.claimed)
        listed: Any = [
            {"type": "file", "path": name, "rfilename": name, "oid": _digest(data)[:40], "size": sizes[name]}
            for name, data in site.files.items()
        ]
        if "/tree/" not in path:
            listed = {"id": REPOSITORY, "sha": COMMIT, "siblings": listed, "private": False, "tags": []}
        _send(request, json.dumps(listed).encode(), "application/json")
    elif (file := rest.removeprefix(f"resolve/{COMMIT}/")) in site.files:
        _send_file(request, site, file)
    else:
        _refuse(request, 404, "EntryNotFound")


def _refuse(request: BaseHTTPRequestHandler, status: int, code: str, **headers: str) -> None:
    request.send_response(status)
    for name, value in headers.items():
        request.send_header(name, value)
    for name in ("X-Error-Code", "X-Error-Message"):
        if code:
            request.send_header(name, code)
    request.send_header("Content-Length", "0")
    request.end_headers()


def _send(request: BaseHTTPRequestHandler, data: bytes, kind: str) -> None:
    request.send_response(200)
    request.send_header("Content-Type", kind)
    request.send_header("Content-Length", str(len(data)))
    request.end_headers()
    if request.command == "GET":
        request.wfile.write(data)


def _send_file(request: BaseHTTPRequestHandler, site: HubSite, file: str) -> None:
    data, ranged = site.files[file], request.headers.get("Range", "")
    first = int(ranged.removeprefix("bytes=").partition("-")[0]) if ranged else 0
    request.send_response(206 if ranged else 200)
    request.send_header("X-Repo-Commit", COMMIT)
    request.send_header("ETag", f'"{_digest(data)}"')
    request.send_header("Accept-Ranges", "bytes")
    # The hub states the size of large files by this header, because it stores them elsewhere.
    if request.command == "HEAD":
        request.send_header("X-Linked-Size", str(site.claimed.get(file, len(data))))
    if ranged:
        request.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
    if file in site.sent and request.command == "GET":
        request.close_connection = True
        data = site.sent[file]
    else:
        request.send_header("Content-Length", str(len(data) - first))
    request.end_headers()
    if request.command != "GET":
        return
    site.asked.append(file)
    site.ranges += [ranged] if ranged else []
    if site.stall_after is not None and len(data) > site.stall_after:
        request.wfile.write(data[first : site.stall_after])
        request.wfile.flush()
        site.stalled.set()
        site.go_on.wait(60)
        request.close_connection = True
        return
    request.wfile.write(data[first:])


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
