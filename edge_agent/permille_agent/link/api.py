"""Typed calls of the REST API that a device makes, and the identity of the device.

The identity is an Ed25519 key that never leaves the home folder. The server learns the public key at
enrolment. Later, the device signs a nonce of the server and gets a token, which it keeps in memory only.

Unknown fields of an answer are ignored. A missing field is an error. `client.py` sends the requests.
"""

import base64
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from pydantic import BaseModel, ValidationError

from permille.errors import OperatorError
from permille.files import write_atomic
from permille.package.limits import MAX_MANIFEST_BYTES
from permille.schemas import devices, releases, runs
from permille.version import __version__
from permille.zo.packed_state import MAGIC as STATE_MAGIC
from permille_agent.link.client import (
    JSON_LIMIT_BYTES,
    AccessRefusedError,
    Body,
    Connection,
    RequestRefusedError,
    ServiceUnavailableError,
)
from permille_agent.state.home import Home, first_error

Model = TypeVar("Model", bound=BaseModel)

TOKEN_MARGIN_S = 60.0  # a token is replaced this long before it expires


class Identity:
    """The key pair of a device. The private key has no accessor and does not appear in the `repr`."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    @property
    def public_key(self) -> str:
        """The public key as base64url of its 32 raw bytes, without padding."""
        return encode_bytes(self._key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw))

    def sign_enrolment(self, invitation: str) -> str:
        """Return the signature of an enrolment as base64url."""
        return encode_bytes(self._key.sign(devices.enrolment_message(invitation, self.public_key)))

    def sign(self, encode: Callable[[Ed25519PrivateKey], bytes]) -> bytes:
        """Return the message that `encode` signs with the key. Extensions sign their messages with this."""
        return encode(self._key)

    def sign_nonce(self, device_id: str, nonce: str) -> str:
        """Return the signature of a token request's nonce as base64url."""
        return encode_bytes(self._key.sign(devices.token_message(device_id, nonce)))


def load_identity(home: Home) -> Identity | None:
    """Read the device's key in the home folder. Return None before the first enrolment.

    Raises:
        OperatorError: other users can read the file, or it is not an Ed25519 key.
    """
    path = home.identity_key
    try:
        if path.stat().st_mode & 0o077:
            raise OperatorError(f"Other users can read {path}. Run `chmod 600 {path}`.")
        key = load_pem_private_key(path.read_bytes(), password=None)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise OperatorError(f"Cannot read {path}: {exc}") from exc
    except (ValueError, TypeError, UnsupportedAlgorithm) as exc:
        raise OperatorError(
            f"{path} holds no Ed25519 private key: {exc}. Move it away, and run `permille-agent enroll` with "
            "a new invitation."
        ) from exc
    if not isinstance(key, Ed25519PrivateKey):
        raise OperatorError(
            f"{path} holds no Ed25519 private key, but a {type(key).__name__}. Move it away, and run "
            "`permille-agent enroll` with a new invitation."
        )
    return Identity(key)


def load_or_create_identity(home: Home) -> Identity:
    """Read the device's key in the home folder, or create it with mode 0600.

    Raises:
        OperatorError: other users can read the file, it is not an Ed25519 key, or it cannot be written.
    """
    if (identity := load_identity(home)) is not None:
        return identity
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        write_atomic(home.identity_key, pem, mode=0o600)
    except OSError as exc:
        raise OperatorError(f"Cannot write {home.identity_key}: {exc}") from exc
    return Identity(key)


def encode_bytes(data: bytes) -> str:
    """Encode bytes as base64url without padding.

    Example:
        >>> encode_bytes(b"permille")
        'cGVybWlsbGU'
    """
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Id of the enrolled device, and the key that signs its requests for tokens."""

    device_id: str
    identity: Identity


class BlobSource(Protocol):
    """A source of a package's files: the service, or what an extension names. Callers check all bytes."""

    @property
    def connection(self) -> Connection:
        """The connection, for waits between attempts."""

    def manifest(self, package_digest: str) -> bytes:
        """See `DeviceApi`."""

    def blob(
        self, package_digest: str, blob_digest: str, *, start: int, etag: str
    ) -> AbstractContextManager[httpx.Response]:
        """See `DeviceApi`."""

    def blob_range(self, package_digest: str, blob_digest: str, begin: int, end: int) -> bytes:
        """See `DeviceApi`."""

    def forget_token(self) -> None:
        """See `DeviceApi`."""


class DeviceApi:
    """REST API of the service for a device.

    For example, `open_api` of `enrolment.py` makes one with the device's credentials:

        with open_api(home) as api:
            release = api.release("assistant", "stable")
    """

    def __init__(
        self,
        connection: Connection,
        credentials: Credentials | None = None,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.connection = connection
        self._credentials = credentials
        self._monotonic = monotonic
        self._token = ""
        self._token_until = 0.0

    def enrol(self, invitation: str, identity: Identity, name: str) -> devices.Enrolment:
        """Present an invitation and this device's public key, signed with its private key."""
        body = {
            "invitation": invitation,
            "public_key": identity.public_key,
            "name": name,
            "agent_version": __version__,
            "signature": identity.sign_enrolment(invitation),
        }
        return parse_answer(devices.Enrolment, self.connection.call("POST", "/v1/enrolments", body=body))

    def unenrol(self) -> None:
        """Remove this device from the service. Its tokens become invalid at once."""
        self.call("DELETE", "/v1/device")

    def release(self, name: str, alias: str) -> releases.Release:
        """Return the release that an alias points to.

        The answer is not signed. Signed metadata decides whether the version may be installed.
        """
        return parse_answer(releases.Release, self.call("GET", f"/v1/releases/{name}/aliases/{alias}"))

    def manifest(self, package_digest: str) -> bytes:
        """Fetch the bytes of a manifest. The caller checks the digest."""
        return self.call("GET", f"/v1/packages/{package_digest}/manifest", limit_bytes=MAX_MANIFEST_BYTES)

    def signed_file(self, path: str, limit_bytes: int) -> bytes:
        """Fetch the bytes of a metadata file or target. The caller verifies them."""
        return self.call("GET", path, limit_bytes=limit_bytes)

    def blob(
        self, package_digest: str, blob_digest: str, *, start: int, etag: str
    ) -> AbstractContextManager[httpx.Response]:
        """Fetch a blob from byte `start` if its ETag is still `etag`, else from its beginning."""
        headers = {"range": f"bytes={start}-", "if-range": etag} if start and etag else {}
        path = f"/v1/packages/{package_digest}/blobs/{blob_digest}"
        return self.connection.stream(path, {**headers, **self._authorization()})

    def blob_range(self, package_digest: str, blob_digest: str, begin: int, end: int) -> bytes:
        """Fetch the bytes `begin:end` of a blob. The caller checks their hash.

        Raises:
            OperatorError: the service sends more bytes than that.
        """
        path = f"/v1/packages/{package_digest}/blobs/{blob_digest}"
        part = {"range": f"bytes={begin}-{end - 1}"}
        return self._signed_in(
            lambda: self.connection.read(path, {**part, **self._authorization()}, limit_bytes=end - begin)
        )

    def report_run(self, run_id: str, metrics: runs.RunMetrics) -> None:
        """Send the metrics of a run. Sending them again has no effect."""
        body = {"run_id": run_id, "metrics": metrics.model_dump(mode="json")}
        self.call("POST", "/v1/runs", body=body)

    def upload_log(self, run_id: str, log: bytes, *, check: Callable[[], None]) -> None:
        """Upload the canonical log or the packed state of a run. The caller must have the user's consent.

        Args:
            run_id: id of the run.
            log: the bytes to upload.
            check: raises if the consent was withdrawn. Called before each attempt.
        """

        def agreed() -> bytes:
            check()
            return log

        is_state = log.startswith(STATE_MAGIC)
        headers = {"content-type": runs.STATE_MEDIA_TYPE if is_state else runs.LOG_MEDIA_TYPE}
        self.call("PUT", f"/v1/runs/{run_id}/log", body=agreed, headers=headers)

    def delete_log(self, run_id: str) -> None:
        """Ask the service to delete an uploaded log."""
        self.call("DELETE", f"/v1/runs/{run_id}/log")

    def forget_token(self) -> None:
        """Discard the token, so that the next call signs in again."""
        self._token = ""

    def call(
        self,
        method: str,
        path: str,
        *,
        body: Body = None,
        headers: Mapping[str, str] | None = None,
        limit_bytes: int = JSON_LIMIT_BYTES,
    ) -> bytes:
        """Send a request with the device's token, and return the answer.

        Extensions call their own paths with this. Arguments and errors are those of `Connection.call`.
        """

        def send() -> bytes:
            sent = {**(headers or {}), **self._authorization()}
            return self.connection.call(method, path, body=body, headers=sent, limit_bytes=limit_bytes)

        return self._signed_in(send)

    def _signed_in(self, send: Callable[[], bytes]) -> bytes:
        """Send a request. If an earlier token is refused, sign in again and repeat the request once."""
        had_token = bool(self._token)
        try:
            return send()
        except AccessRefusedError:
            # Without an earlier token, `send` has just got a new one. Another new one would be refused, too.
            if not had_token:
                raise
            self.forget_token()
            return send()

    def _authorization(self) -> dict[str, str]:
        if self._credentials is None:
            raise OperatorError("This device is not enrolled. Run `permille-agent enroll` first.")
        if not self._token or self._monotonic() >= self._token_until:
            self._sign_in(self._credentials)
        return {"authorization": f"Bearer {self._token}"}

    def _sign_in(self, credentials: Credentials) -> None:
        asked = {"device_id": credentials.device_id}
        try:
            answer = self.connection.call("POST", "/v1/device-tokens/nonces", body=asked)
        except RequestRefusedError as exc:
            raise AccessRefusedError(f"The service does not know this device: {exc}") from exc
        nonce = parse_answer(devices.DeviceNonce, answer).nonce
        signature = credentials.identity.sign_nonce(credentials.device_id, nonce)
        body = {**asked, "nonce": nonce, "signature": signature}
        answer = self.connection.call("POST", "/v1/device-tokens", body=body)
        token = parse_answer(devices.DeviceToken, answer)
        # A header is ASCII, and a line break in the token could add another header.
        if not (token.access_token.isascii() and token.access_token.isprintable()):
            raise ServiceUnavailableError("The service sent a malformed token.")
        self._token = token.access_token
        self._token_until = self._monotonic() + max(0.0, token.expires_in - TOKEN_MARGIN_S)


def parse_answer(model: type[Model], data: bytes) -> Model:
    """Parse the JSON of an answer. Unknown fields are ignored.

    Raises:
        ServiceUnavailableError: the answer is malformed.
    """
    try:
        return model.model_validate_json(data, extra="ignore")
    except ValidationError as exc:  # for example the login page of a hotel's network
        said = f"The service sent a malformed {model.__name__.lower()}: {first_error(exc)}"
        raise ServiceUnavailableError(said) from exc
