"""The device routes of the service over real HTTP, in a thread, with faults.

`traffic` keeps every byte that a device sends, so that a test can look for bytes that must not be sent.
"""

import base64
import json
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from permille.package.blobs import BlobFolder
from permille.package.limits import MAX_MANIFEST_BYTES
from permille.package.manifest import Manifest
from permille.schemas.devices import enrolment_message, token_message
from permille.schemas.runs import RunMetrics
from permille.trust.metadata import root_digest
from permille.trust.repository import Repository
from permille.trust.roles import rollout_path
from permille_agent.link.api import encode_bytes

CODE = "q83vASNFZ4mrze8BI0VniQ"
RELEASE_NAME = "tiny-llama"
ANY_DEVICE = "d"


def new_id(prefix: str, text: str | None = None) -> str:
    return f"{prefix}_{text or uuid.uuid4().hex[:26]}"


@dataclass
class Fault:
    """Fault in place of the answer to the next `times` requests. `path` is a pattern of their path.

    Attributes:
        status: Answer with this status and with `headers` and `body`.
        cut_after: Send this number of bytes of a blob, then drop the connection.
        flip_byte: Invert the byte of a blob at this index.
        slow: Wait this number of seconds before every 4 KiB of a blob.
        extra: Append these bytes to a blob.
        ignore_range: Answer a range request with the whole blob.
        endless: Answer with bytes until the client hangs up (1 GiB at most).
    """

    path: str
    times: int = 1
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    cut_after: int | None = None
    flip_byte: int | None = None
    slow: float = 0.0
    extra: bytes = b""
    ignore_range: bool = False
    endless: bool = False


class DeviceService:
    """State of the service. `url` is its address."""

    def __init__(self, blobs: BlobFolder) -> None:
        self.blobs = blobs
        self.repository = Repository.create(now=datetime.now(UTC))
        self.metadata: dict[str, bytes] = {}
        self.keep_metadata()
        self.invitations = {CODE}
        self.devices: dict[str, str] = {}
        self.revoked: set[str] = set()
        self.nonces: dict[str, str] = {}
        self.tokens: dict[str, str] = {}
        self.release: dict[str, Any] | None = None
        self.runs: dict[str, dict[str, Any]] = {}
        self.logs: dict[str, bytes] = {}
        self.deleted_logs: list[str] = []
        self.facts: list[dict[str, Any]] = []
        self.rollout_reports: list[dict[str, Any]] = []
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str, int]] = []
        self.ranges: list[str] = []
        self.traffic: list[bytes] = []
        self.blob_bytes_sent = 0
        self.endless_bytes_sent = 0
        self.forced_root: str | None = None
        self.url = ""

    def asked(self, what: str) -> list[str]:
        """Return the paths of the requests that contain `what`."""
        return [path for _, path, _ in self.requests if what in path]

    def publish(
        self,
        digest: str,
        version: int,
        *,
        name: str = RELEASE_NAME,
        alias: str = "stable",
    ) -> None:
        """Sign a version for one alias, and let all aliases point at it."""
        manifest = self.blobs.read(digest, limit=MAX_MANIFEST_BYTES)
        self.repository.publish(name, version, manifest, aliases=[alias])
        self.keep_metadata()
        self.point(digest, version)

    def point(self, digest: str, version: int) -> None:
        """Answer every alias with this version, whatever the signed metadata says."""
        self.release = {
            "name": RELEASE_NAME,
            "version": version,
            "manifest_digest": digest,
            "size_bytes": Manifest.from_bytes(self.blobs.read(digest, limit=MAX_MANIFEST_BYTES)).size_bytes,
            "yanked": False,
        }

    def offer(self, offer: dict[str, Any] | None, alias: str = "stable") -> None:
        """Sign the record of a rollout for the devices of an alias. With None, end the rollout."""
        if offer is None:
            self.repository.drop(rollout_path(RELEASE_NAME, alias))
        else:
            self.repository.list_rollout(RELEASE_NAME, alias, offer)
        self.keep_metadata()

    def keep_metadata(self) -> None:
        """Serve the changed metadata of the repository."""
        self.metadata.update(self.repository.changed)
        self.repository.changed.clear()

    @property
    def invitation(self) -> str:
        """Return an invitation as the operator sends it: a code and the digest of the newest root."""
        return f"{CODE}.{self.repository.root_digest}"

    def take_fault(self, path: str) -> Fault | None:
        """Return the fault for this request, if any, and count it down."""
        for fault in self.faults:
            if fault.times > 0 and re.search(fault.path, path):
                fault.times -= 1
                return fault
        return None


@contextmanager
def serving(blobs: Path) -> Iterator[DeviceService]:
    """Serve the packages in the folder `blobs` until the block ends."""
    service = DeviceService(BlobFolder(blobs))
    handler = type("BoundHandler", (_Handler,), {"service": service})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    service.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.02), daemon=True)
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


Answer = tuple[int, Any]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    service: ClassVar[DeviceService]

    def do_GET(self) -> None:
        self._handle()

    do_POST = do_PUT = do_DELETE = do_GET

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Print nothing."""

    def _handle(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("content-length", "0")))
        sent = f"{self.requestline}\r\n{self.headers}".encode("latin-1", "replace") + self.body
        self.service.traffic.append(sent)
        fault = self.service.take_fault(self.path)
        if fault is not None and fault.status:
            self._send(fault.status, fault.body, "application/problem+json", fault.headers)
            return
        if fault is not None and fault.endless:
            self._send_endlessly()
            return
        for pattern, method, respond in _ROUTES:
            match = re.fullmatch(pattern, self.path)
            if match and method == self.command:
                self.device_id = self._principal()
                if self.device_id is None and not re.match("/v1/(enrolments|device-tokens)", self.path):
                    self._problem(401, "unauthenticated")
                    return
                respond(self, fault, *match.groups())
                return
        self._problem(404, "not-found")

    def _enrol(self, _fault: Fault | None) -> None:
        service, asked = self.service, json.loads(self.body)
        public_key, (code, _, digits) = asked["public_key"], asked["invitation"].partition(".")
        known = public_key in service.devices
        signed = _is_signed(
            public_key, asked["signature"], enrolment_message(asked["invitation"], public_key)
        )
        if not signed or (not known and code not in service.invitations):
            self._problem(403, "forbidden")
            return
        service.invitations.discard(code)
        device_id = service.devices.setdefault(public_key, new_id("dev"))
        ids = {"device_id": device_id, "tenant_id": new_id("ten", "0" * 26)}
        follows = {"release": RELEASE_NAME, "alias": "stable", "server_time": "2026-01-01T00:00:00Z"}
        roots = [data for file, data in service.metadata.items() if file.endswith(".root.json")]
        root = service.forced_root
        if root is None:
            root = next(data.decode() for data in roots if root_digest(data) == digits)
        answer = {**ids, **follows, "root": root, "a_field_of_a_later_version": True}
        self._json(200 if known else 201, answer)

    def _nonce(self, _fault: Fault | None) -> None:
        device_id = json.loads(self.body)["device_id"]
        known = set(self.service.devices.values()) - self.service.revoked
        if device_id not in known and device_id != ANY_DEVICE:
            self._problem(404, "not-found")
            return
        nonce = encode_bytes(uuid.uuid4().bytes)
        self.service.nonces[nonce] = device_id
        self._json(201, {"nonce": nonce, "expires_at": "2099-01-01T00:00:00Z"})

    def _token(self, _fault: Fault | None) -> None:
        service, asked = self.service, json.loads(self.body)
        keys = {device_id: key for key, device_id in service.devices.items()}
        if service.nonces.pop(asked["nonce"], None) != asked["device_id"] or asked["device_id"] not in keys:
            self._problem(401, "unauthenticated")
            return
        message = token_message(asked["device_id"], asked["nonce"])
        if not _is_signed(keys[asked["device_id"]], asked["signature"], message):
            self._problem(401, "unauthenticated")
            return
        token = str(uuid.uuid4())
        service.tokens[token] = asked["device_id"]
        self._json(201, {"access_token": token, "token_type": "Bearer", "expires_in": 3600})

    def _unenrol(self, _fault: Fault | None) -> None:
        devices = self.service.devices
        self.service.devices = {key: known for key, known in devices.items() if known != self.device_id}
        self._send(204, b"")

    def _release(self, _fault: Fault | None, name: str, _alias: str) -> None:
        if self.service.release is None or name != RELEASE_NAME:
            self._problem(404, "not-found")
            return
        self._json(200, self.service.release)

    def _metadata(self, _fault: Fault | None, file: str) -> None:
        if file not in self.service.metadata:
            self._problem(404, "not-found")
            return
        self._send(200, self.service.metadata[file], "application/json")

    def _target(self, fault: Fault | None, digits: str) -> None:
        self._manifest(fault, f"sha256:{digits}")

    def _manifest(self, _fault: Fault | None, digest: str) -> None:
        if not self.service.blobs.has(digest):
            self._problem(404, "not-found")
            return
        self._send(200, self.service.blobs.read(digest, limit=MAX_MANIFEST_BYTES), "application/json")

    def _blob(self, fault: Fault | None, _package: str, digest: str) -> None:
        if not self.service.blobs.has(digest):
            self._problem(404, "not-found")
            return
        fault = fault or Fault(path="")
        data, etag = bytearray(self.service.blobs.path(digest).read_bytes()), f'"{digest}"'
        start, end = self._asked_range(etag, len(data)) if not fault.ignore_range else (0, len(data))
        if start > len(data):
            self._problem(416, "range-not-satisfiable")
            return
        if fault.flip_byte is not None:
            data[fault.flip_byte] ^= 0xFF
        part = bytes(data[start:end]) + fault.extra
        status = 206 if (start, end) != (0, len(data)) else 200
        self.requests_noted(status)
        self.send_response(status)
        self.send_header("etag", etag)
        self.send_header("content-length", str(len(part)))
        if status == 206:
            self.send_header("content-range", f"bytes {start}-{end - 1}/{len(data)}")
        self.end_headers()
        self._send_slowly(part, fault)

    def _run(self, _fault: Fault | None) -> None:
        asked = json.loads(self.body)
        RunMetrics.model_validate(asked["metrics"])
        known = asked["run_id"] in self.service.runs
        self.service.runs[asked["run_id"]] = asked["metrics"]
        self._json(200 if known else 201, asked)

    def _put_log(self, _fault: Fault | None, run_id: str) -> None:
        self.service.logs[run_id] = self.body
        self._json(202, {"job_id": new_id("job")})

    def _facts(self, _fault: Fault | None) -> None:
        self.service.facts.append(json.loads(self.body))
        self._send(204, b"")

    def _rollout_report(self, _fault: Fault | None, _rollout: str) -> None:
        self.service.rollout_reports.append(json.loads(self.body))
        self._send(204, b"")

    def _delete_log(self, _fault: Fault | None, run_id: str) -> None:
        if self.service.logs.pop(run_id, None) is None:
            self._problem(404, "not-found")
            return
        self.service.deleted_logs.append(run_id)
        self._send(204, b"")

    def requests_noted(self, status: int) -> None:
        self.service.requests.append((self.command, self.path, status))

    def _principal(self) -> str | None:
        token = self.headers.get("authorization", "").removeprefix("Bearer ")
        device_id = self.service.tokens.get(token)
        known = set(self.service.devices.values()) - self.service.revoked
        return device_id if device_id in known else None

    def _asked_range(self, etag: str, size: int) -> tuple[int, int]:
        asked = self.headers.get("range", "")
        self.service.ranges.append(asked)
        if not asked or self.headers.get("if-range", etag) != etag:
            return 0, size
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start, end = int(first), int(last) + 1 if last else size
        return (start, min(end, size)) if start < size else (size + 1, size)

    def _send_slowly(self, part: bytes, fault: Fault) -> None:
        end = len(part) if fault.cut_after is None else min(fault.cut_after, len(part))
        for start in range(0, end, 4096):
            if fault.slow:
                time.sleep(fault.slow)
            piece = part[start : min(start + 4096, end)]
            # Count before the write: a test reads this as soon as the client has the last byte.
            self.service.blob_bytes_sent += len(piece)
            try:
                self.wfile.write(piece)
            except OSError:
                self.close_connection = True
                return
        if fault.cut_after is not None:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True

    def _send_endlessly(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.close_connection = True
        piece = b" " * (1 << 16)
        try:
            while self.service.endless_bytes_sent < 1 << 30:
                self.wfile.write(piece)
                self.service.endless_bytes_sent += len(piece)
        except OSError:
            return

    def _json(self, status: int, document: object) -> None:
        self._send(status, json.dumps(document).encode(), "application/json")

    def _problem(self, status: int, slug: str) -> None:
        document = {
            "type": f"https://permille.dev/problems/{slug}",
            "title": slug,
            "status": status,
            "detail": f"refused: {slug}",
            "instance": self.path,
        }
        self._send(status, json.dumps(document).encode(), "application/problem+json")

    def _send(
        self, status: int, data: bytes, media_type: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        self.requests_noted(status)
        self.send_response(status)
        for name, value in {"content-type": media_type, **(headers or {})}.items():
            if value:
                self.send_header(name, value)
        if status != 204:
            self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _is_signed(public_key: str, signature: str, message: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(base64.urlsafe_b64decode(public_key + "==")).verify(
            base64.urlsafe_b64decode(signature + "=="), message
        )
    except (InvalidSignature, ValueError):
        return False
    return True


_ROUTES: list[tuple[str, str, Callable[..., None]]] = [
    (r"/v1/enrolments", "POST", _Handler._enrol),
    (r"/v1/device-tokens/nonces", "POST", _Handler._nonce),
    (r"/v1/device-tokens", "POST", _Handler._token),
    (r"/v1/device", "DELETE", _Handler._unenrol),
    (r"/v1/releases/([^/]+)/aliases/([^/]+)", "GET", _Handler._release),
    (r"/v1/packages/([^/]+)/manifest", "GET", _Handler._manifest),
    (r"/v1/trust/metadata/([^/]+)", "GET", _Handler._metadata),
    (r"/v1/trust/targets/releases/[^/]+/([0-9a-f]{64})\.[0-9]+\.json", "GET", _Handler._target),
    (r"/v1/packages/([^/]+)/blobs/([^/]+)", "GET", _Handler._blob),
    (r"/v1/device/facts", "PUT", _Handler._facts),
    (r"/v1/device/rollouts/([^/]+)/report", "PUT", _Handler._rollout_report),
    (r"/v1/runs", "POST", _Handler._run),
    (r"/v1/runs/([^/]+)/log", "PUT", _Handler._put_log),
    (r"/v1/runs/([^/]+)/log", "DELETE", _Handler._delete_log),
]
