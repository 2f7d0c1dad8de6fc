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
from typing import TypeVar

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
from pydantic import BaseModel, RootModel, ValidationError

from permille.errors import OperatorError
from permille.federation.contribution import Contribution, encode_contribution
from permille.federation.definition import MAX_BYTES as MAX_DEFINITION_BYTES
from permille.federation.masked import encode_masked
from permille.federation.private_rounds import vector_of
from permille.files import write_atomic
from permille.package.limits import MAX_MANIFEST_BYTES
from permille.schemas import devices, releases, runs
from permille.schemas.federations import CONTRIBUTION_MEDIA_TYPE, FederationOffer, RoundInvitation
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


class _Offers(RootModel[list[FederationOffer]]):
    """List of federations in an answer."""


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

    def sign_contribution(self, contribution: Contribution) -> bytes:
        """Return the signed bytes of a contribution to a round.

        If the federation has a keeper (a second server), the integers are masked, so that neither the service
        nor the keeper alone can read them. Each call draws a new mask.
        """
        rules = contribution.definition
        if rules.privacy is None or rules.privacy.keeper is None:
            return encode_contribution(contribution, self._key)
        place = (rules, contribution.round_number, contribution.start_digest)
        return encode_masked(*place, vector_of(contribution), self._key)

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
        return _parse(devices.Enrolment, self.connection.call("POST", "/v1/enrolments", body=body))

    def unenrol(self) -> None:
        """Remove this device from the service. Its tokens become invalid at once."""
        self._call("DELETE", "/v1/device")

    def release(self, name: str, alias: str) -> releases.Release:
        """Return the release that an alias points to.

        The answer is not signed. Signed metadata decides whether the version may be installed.
        """
        return _parse(releases.Release, self._call("GET", f"/v1/releases/{name}/aliases/{alias}"))

    def manifest(self, package_digest: str) -> bytes:
        """Fetch the bytes of a manifest. The caller checks the digest."""
        return self._call("GET", f"/v1/packages/{package_digest}/manifest", limit_bytes=MAX_MANIFEST_BYTES)

    def signed_file(self, path: str, limit_bytes: int) -> bytes:
        """Fetch the bytes of a metadata file or target. The caller verifies them."""
        return self._call("GET", path, limit_bytes=limit_bytes)

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

    def put(self, path: str, record: BaseModel) -> None:
        """Send a record to a path of the service. Extensions send to their own paths with this."""
        self._call("PUT", path, body=record.model_dump(mode="json"))

    def report_run(self, run_id: str, metrics: runs.RunMetrics) -> None:
        """Send the metrics of a run. Sending them again has no effect."""
        body = {"run_id": run_id, "metrics": metrics.model_dump(mode="json")}
        self._call("POST", "/v1/runs", body=body)

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
        self._call("PUT", f"/v1/runs/{run_id}/log", body=agreed, headers=headers)

    def delete_log(self, run_id: str) -> None:
        """Ask the service to delete an uploaded log."""
        self._call("DELETE", f"/v1/runs/{run_id}/log")

    def federations(self) -> list[FederationOffer]:
        """List the federations that this device may join or has joined. The answer is not signed."""
        return _parse(_Offers, self._call("GET", "/v1/device/federations")).root

    def federation_definition(self, federation_id: str) -> bytes:
        """Fetch the bytes of a definition. The caller checks them against the signed digest."""
        path = f"/v1/federations/{federation_id}/definition"
        return self._call("GET", path, limit_bytes=MAX_DEFINITION_BYTES)

    def join_federation(self, federation_id: str) -> None:
        """Tell the service that the user joined. Repeating the call has no effect."""
        self._call("PUT", f"/v1/federations/{federation_id}/membership")

    def leave_federation(self, federation_id: str) -> None:
        """Tell the service that the user left. This drops the device's contribution to the open round."""
        self._call("DELETE", f"/v1/federations/{federation_id}/membership")

    def federation_history(
        self, federation_id: str, *, after: int, until: int | None, limit_bytes: int
    ) -> bytes:
        """Fetch the history after round `after`, up to `until` or the newest. The caller verifies it."""
        query = f"?after={after}" + ("" if until is None else f"&until={until}")
        path = f"/v1/federations/{federation_id}/history{query}"
        return self._call("GET", path, limit_bytes=limit_bytes)

    def round_invitation(self, federation_id: str) -> RoundInvitation | None:
        """Ask for an invitation to the open round. Return None if there is none for this device."""
        answer = self._call("POST", f"/v1/federations/{federation_id}/invitations")
        return _parse(RoundInvitation, answer) if answer else None

    def contribute(self, federation_id: str, number: int, contribution: bytes) -> None:
        """Send a contribution to a round. The caller must have the user's consent.

        Repeating the call has no effect.
        """
        headers = {"content-type": CONTRIBUTION_MEDIA_TYPE}
        path = f"/v1/federations/{federation_id}/rounds/{number}/contribution"
        self._call("PUT", path, body=contribution, headers=headers)

    def forget_token(self) -> None:
        """Discard the token, so that the next call signs in again."""
        self._token = ""

    def _call(
        self,
        method: str,
        path: str,
        *,
        body: Body = None,
        headers: Mapping[str, str] | None = None,
        limit_bytes: int = JSON_LIMIT_BYTES,
    ) -> bytes:
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
        nonce = _parse(devices.DeviceNonce, answer).nonce
        signature = credentials.identity.sign_nonce(credentials.device_id, nonce)
        body = {**asked, "nonce": nonce, "signature": signature}
        answer = self.connection.call("POST", "/v1/device-tokens", body=body)
        token = _parse(devices.DeviceToken, answer)
        # A header is ASCII, and a line break in the token could add another header.
        if not (token.access_token.isascii() and token.access_token.isprintable()):
            raise ServiceUnavailableError("The service sent a malformed token.")
        self._token = token.access_token
        self._token_until = self._monotonic() + max(0.0, token.expires_in - TOKEN_MARGIN_S)


def _parse(model: type[Model], data: bytes) -> Model:
    try:
        return model.model_validate_json(data, extra="ignore")
    except ValidationError as exc:  # for example the login page of a hotel's network
        said = f"The service sent a malformed {model.__name__.lower()}: {first_error(exc)}"
        raise ServiceUnavailableError(said) from exc
