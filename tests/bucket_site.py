"""A bucket for tests: moto's S3 server behind a gate that causes the faults that a test asks for."""

import hashlib
import hmac
import http.client
import logging
import re
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, quote

import pytest

from permille.store.blobs.bucket import Bucket
from permille.store.settings import BucketAddress

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "secret-of-tests"}


@dataclass
class Fault:
    """Fault of the next `times` requests whose line `METHOD /path?query` matches the pattern `matches`.

    Attributes:
        status: Answer with this status and an S3 error.
        code: The code of that error.
        cut_after: Send this number of bytes of the body, then drop the connection.
        flip_byte: Invert the byte of the body at this index.
        stall: Hold the request until the gate closes.
        lose: Pass the request on, then drop the connection without an answer.
        agent: Apply the fault only to clients whose User-Agent contains this text.
    """

    matches: str
    times: int = 1
    status: int = 0
    code: str = "InternalError"
    cut_after: int | None = None
    flip_byte: int | None = None
    stall: bool = False
    lose: bool = False
    agent: str = ""


@dataclass(frozen=True)
class Request:
    """A request that came through the gate."""

    line: str
    headers: Mapping[str, str]
    body: bytes


@dataclass
class Gate:
    """A gate that passes requests on to the bucket's server and applies faults.

    The gate checks the signatures of presigned URLs, because moto does not check them. The clock of this
    check is `late_s` seconds ahead.
    """

    bucket: str
    endpoint: str = ""
    faults: list[Fault] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    harmed: int = 0
    late_s: float = 0.0
    stalled: threading.Event = field(default_factory=threading.Event)
    closed: threading.Event = field(default_factory=threading.Event)

    @property
    def address(self) -> str:
        """Return the bucket's address in the form of the setting."""
        return f"s3://{self.bucket}/permille?endpoint={self.endpoint}&region=us-east-1"

    def open(self, **options: Any) -> Bucket:
        """Return a client that retries once."""
        options = {"attempts": 2, "reach_s": 60.0, **options}
        return Bucket(BucketAddress.parse(self.address), **options)

    def sent(self, pattern: str) -> list[Request]:
        """Return the requests whose line `METHOD /path?query` matches."""
        return [request for request in self.requests if re.search(pattern, request.line)]

    def fault_of(self, line: str, agent: str) -> Fault | None:
        """Return the fault for this request, if any, and count it down."""
        for fault in list(self.faults):
            if fault.times > 0 and fault.agent in agent and re.search(fault.matches, line):
                fault.times -= 1
                self.harmed += 1
                return fault
        return None


@contextmanager
def bucket_server() -> Iterator[str]:
    """Run moto's server. Yield its host and port."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # By default it logs every request.
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"{host}:{port}"
    finally:
        server.stop()


@contextmanager
def gate(server: str) -> Iterator[Gate]:
    """Make a new bucket and yield its gate."""
    found = Gate(bucket=f"blobs-{uuid.uuid4().hex[:12]}")

    class Handler(_Handler):
        target, state = server, found

    listener = _Listener(("127.0.0.1", 0), Handler)
    found.endpoint = f"http://127.0.0.1:{listener.server_port}"
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        connection = http.client.HTTPConnection(server)
        connection.request("PUT", f"/{found.bucket}")
        assert connection.getresponse().status == 200
        connection.close()
        try:
            yield found
        finally:
            found.closed.set()
            listener.shutdown()
            listener.server_close()


class _Listener(ThreadingHTTPServer):
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        """Print nothing. Tests kill clients on purpose."""


class _Handler(BaseHTTPRequestHandler):
    target: str
    state: Gate
    protocol_version = "HTTP/1.1"

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        line = f"{self.command} {self.path}"
        self.state.requests.append(Request(line, {k.lower(): v for k, v in self.headers.items()}, body))
        fault = self.state.fault_of(line, self.headers.get("user-agent", ""))
        if fault is not None and fault.stall:
            self.state.stalled.set()
            self.state.closed.wait(60)
            self.close_connection = True
            return
        if fault is not None and fault.status:
            text = f"<Error><Code>{fault.code}</Code><Message>no</Message></Error>".encode()
            self._answer(fault.status, {"content-type": "application/xml"}, text)
            return
        if "X-Amz-Signature" in line and not _is_signed(self.state.requests[-1], self.state.late_s):
            self._answer(403, {}, b"<Error><Code>SignatureDoesNotMatch</Code></Error>")
            return
        connection = http.client.HTTPConnection(self.target, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
        connection.request(self.command, self.path, body, headers)
        answer = connection.getresponse()
        if fault is not None and fault.lose:
            self.close_connection = True
        else:
            self._answer(answer.status, dict(answer.getheaders()), answer.read(), fault)
        connection.close()

    def _answer(
        self, status: int, headers: Mapping[str, str], body: bytes, fault: Fault | None = None
    ) -> None:
        self.send_response_only(status)
        sized = {name.lower(): value for name, value in headers.items()}
        sized.pop("connection", None)
        sized.pop("transfer-encoding", None)
        if self.command != "HEAD" and status != 204:
            sized["content-length"] = str(len(body))
        for name, value in sized.items():
            self.send_header(name, value)
        self.end_headers()
        if fault is not None and fault.flip_byte is not None and body:
            at = fault.flip_byte % len(body)
            body = body[:at] + bytes([body[at] ^ 255]) + body[at + 1 :]
        if fault is not None and fault.cut_after is not None:
            self.wfile.write(body[: fault.cut_after])
            self.wfile.flush()
            self.close_connection = True
            return
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def _is_signed(request: Request, late_s: float) -> bool:
    """Return True if the query has a valid signature of our key (AWS Signature Version 4)."""
    method, target = request.line.split(" ", 1)
    path, _, query = target.partition("?")
    given = dict(parse_qsl(query, keep_blank_values=True))
    signature, names = given.pop("X-Amz-Signature"), given["X-Amz-SignedHeaders"]
    key_id, scope = given["X-Amz-Credential"].split("/", 1)
    signed_at = datetime.strptime(given["X-Amz-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
    if time.time() + late_s > signed_at + int(given["X-Amz-Expires"]):
        return False
    canonical_query = "&".join(f"{quote(k, safe='')}={quote(v, safe='')}" for k, v in sorted(given.items()))
    headers = "".join(f"{name}:{request.headers[name]}\n" for name in names.split(";"))
    canonical = "\n".join([method, path, canonical_query, headers, names, "UNSIGNED-PAYLOAD"])
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    key = b"AWS4" + CREDENTIALS["AWS_SECRET_ACCESS_KEY"].encode()
    for part in (*scope.split("/"), "\n".join(["AWS4-HMAC-SHA256", given["X-Amz-Date"], scope, digest])):
        key = hmac.digest(key, part.encode(), "sha256")
    return key_id == CREDENTIALS["AWS_ACCESS_KEY_ID"] and hmac.compare_digest(key.hex(), signature)


def settle() -> float:
    """Return a Unix time that is later than all writes so far. The times of a bucket are whole seconds."""
    return time.time() + 2
