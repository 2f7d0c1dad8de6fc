"""Debian's `docker-registry` as a process, behind a gate that causes the faults that a test asks for."""

import base64
import http.client
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx

from permille_registry.address import Address
from tests.ports import free_port

LOGIN = base64.b64encode(b"anna:secret").decode()
# bcrypt of "secret", as `htpasswd -nbB anna secret` writes it.
_HTPASSWD = "anna:$2b$04$N9rWNM2vwDkmNvG8bpvkFeqEW.kVTCeTDUXEF7qARWv3iNKwWmNZS\n"


@dataclass
class Fault:
    """Fault of the next `times` requests whose line `METHOD /path?query` matches the pattern `matches`.

    Attributes:
        after: Let this number of matching requests pass first.
        status: Answer with this status, `headers` and `body`, and do not ask the registry.
        cut_request: Pass on this number of bytes of the request's body, then drop the connection.
        stall: Do not answer until the gate closes. Set `stalled` when this begins.
        cut_after: Send this number of bytes of the answer's body, then drop the connection.
        pause_after: As `cut_after`, but hold the connection until the gate closes.
        flip_byte: Invert the byte of the answer's body at this index.
        endless: Answer with zeros until the client hangs up (1 GiB at most).
    """

    matches: str
    times: int = 1
    after: int = 0
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    cut_request: int | None = None
    stall: bool = False
    cut_after: int | None = None
    pause_after: int | None = None
    flip_byte: int | None = None
    endless: bool = False


@dataclass
class Gate:
    """The gate. `requests` holds the line, the headers and the size of the body of each request."""

    host: str = ""
    faults: list[Fault] = field(default_factory=list)
    requests: list[tuple[str, Mapping[str, str], int]] = field(default_factory=list)
    sent_bytes: int = 0
    endless_bytes: int = 0
    stalled: threading.Event = field(default_factory=threading.Event)
    closed: threading.Event = field(default_factory=threading.Event)

    def address(self, name: str = "models/assistant") -> Address:
        """Return the address of a repository behind the gate."""
        return Address.parse(f"oci://{self.host}/{name}")

    def lines(self, pattern: str) -> list[str]:
        """Return the lines of the requests that match."""
        return [line for line, _, _ in self.requests if re.search(pattern, line)]

    def take_fault(self, line: str) -> Fault | None:
        """Return the fault of this request, if any, and count it down."""
        for fault in self.faults:
            if fault.times > 0 and re.search(fault.matches, line):
                if fault.after > 0:
                    fault.after -= 1
                    continue
                fault.times -= 1
                return fault
        return None


@contextmanager
def registry(folder: Path, *, login: bool = False) -> Iterator[str]:
    """Run a registry with its data in a folder. Yield its host and port. With `login`, it wants LOGIN."""
    program = shutil.which("docker-registry")
    assert program, "install docker-registry: bash scripts/system-packages.sh"
    folder.mkdir(parents=True, exist_ok=True)
    host = f"127.0.0.1:{free_port()}"
    (folder / "htpasswd").write_text(_HTPASSWD)
    access = f"auth: {{htpasswd: {{realm: tests, path: {folder / 'htpasswd'}}}}}\n" if login else ""
    (folder / "config.yml").write_text(
        f"version: 0.1\nlog: {{level: error, accesslog: {{disabled: true}}}}\n"
        f"storage: {{filesystem: {{rootdirectory: {folder / 'data'}}}, delete: {{enabled: true}}}}\n"
        f"http: {{addr: '{host}', secret: of-tests}}\n{access}"
    )
    with (folder / "log").open("wb") as log:
        # The registry takes settings from variables that begin with REGISTRY_, and that of logins does.
        process = subprocess.Popen([program, "serve", folder / "config.yml"], stdout=log, stderr=log, env={})
    try:
        for _ in range(600):
            try:
                httpx.get(f"http://{host}/v2/", trust_env=False)
                break
            except httpx.TransportError:
                assert process.poll() is None, (folder / "log").read_text()
                time.sleep(0.05)
        yield host
    finally:
        process.kill()
        process.wait()


@contextmanager
def gate(target: str) -> Iterator[Gate]:
    """Open a gate before the registry at `target`."""
    state = Gate()
    handler = type("BoundHandler", (_Handler,), {"target": target, "state": state})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign] # tests kill clients on purpose
    state.host = f"127.0.0.1:{server.server_port}"
    threading.Thread(target=lambda: server.serve_forever(poll_interval=0.02), daemon=True).start()
    try:
        yield state
    finally:
        state.closed.set()
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    target: str
    state: Gate

    def do_GET(self) -> None:
        line = f"{self.command} {self.path}"
        size = int(self.headers.get("content-length", 0))
        self.state.requests.append((line, {k.lower(): v for k, v in self.headers.items()}, size))
        fault = self.state.take_fault(line)
        if fault is not None and fault.cut_request is not None:
            self._cut(fault.cut_request, hold=fault.stall)
            return
        body = self.rfile.read(size)
        if fault is not None and fault.stall:
            self._hold()
        elif fault is not None and fault.endless:
            self._send_endlessly()
        elif fault is not None and fault.status:
            self._send(fault.status, fault.headers, fault.body, None)
        else:
            connection = http.client.HTTPConnection(self.target, timeout=60)
            # Programs in Go send a header line for each type that they accept.
            headers = {name: ", ".join(self.headers.get_all(name, ())) for name in self.headers}
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            self._send(answer.status, dict(answer.getheaders()), answer.read(), fault)
            connection.close()

    do_HEAD = do_PUT = do_POST = do_PATCH = do_DELETE = do_GET

    def _cut(self, size: int, *, hold: bool) -> None:
        with socket.create_connection(self.target.split(":")) as onward:  # type: ignore[arg-type]
            head = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
            onward.sendall(f"{self.requestline}\r\n{head}\r\n".encode() + self.rfile.read(size))
            time.sleep(0.2)
        if hold:
            self._hold()
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _hold(self) -> None:
        self.state.stalled.set()
        self.state.closed.wait(120)
        self.close_connection = True

    def _send_endlessly(self) -> None:
        self.send_response_only(200)
        self.end_headers()
        self.close_connection = True
        try:
            while self.state.endless_bytes < 1 << 30:
                self.wfile.write(bytes(1 << 16))
                self.state.endless_bytes += 1 << 16
        except OSError:
            return

    def _send(self, status: int, headers: Mapping[str, str], body: bytes, fault: Fault | None) -> None:
        self.send_response_only(status)
        named = {name.lower(): value for name, value in headers.items()}
        if self.command != "HEAD" and status != 204:
            named["content-length"] = str(len(body))
        for name, value in named.items():
            if name not in ("connection", "transfer-encoding"):
                self.send_header(name, value)
        self.end_headers()
        if fault is not None and fault.flip_byte is not None and body:
            at = fault.flip_byte % len(body)
            body = body[:at] + bytes([body[at] ^ 255]) + body[at + 1 :]
        end = None if fault is None else fault.cut_after if fault.cut_after is not None else fault.pause_after
        if self.command != "HEAD":
            self.wfile.write(body[:end])
            self.wfile.flush()
            self.state.sent_bytes += len(body[:end])
        if fault is not None and fault.pause_after is not None:
            self._hold()
        if end is not None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: object) -> None:
        """Print nothing."""
