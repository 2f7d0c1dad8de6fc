"""Files of packages from a registry.

Signed metadata and releases still come from the service. The registry gets no token of the service. Callers
accept only bytes whose digests the signed metadata states. The connection has the rules and limits of the
agent's client: for example, it follows one redirect to https, without the login.
"""

import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx

from permille.errors import OperatorError
from permille.package.limits import MAX_MANIFEST_BYTES
from permille_agent.link.client import AccessRefusedError, Connection, RequestRefusedError
from permille_agent.link.enrolment import connect
from permille_agent.state.home import Home, read_record
from permille_registry.access import TOKEN_LIMIT_BYTES, Access
from permille_registry.address import Address

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRegistry:
    """Contents of `registry.json`.

    Attributes:
        address: the repository, such as `oci://registry.example.org/models/assistant`.
        ca_file: PEM file of the registry's own certificate authority, or "".
    """

    address: str
    ca_file: str = ""


class RegistryBlobs:
    """The blobs of one repository. It is a `BlobSource`."""

    def __init__(self, address: Address, connection: Connection, ca_file: Path | None) -> None:
        self.connection = connection
        self._address = address
        self._ca_file = ca_file
        self._access = Access(address, "pull", self._fetch_token)

    def manifest(self, package_digest: str) -> bytes:
        """Fetch the bytes of a manifest, which is a blob, too."""
        return self._read(package_digest, {}, MAX_MANIFEST_BYTES)

    @contextmanager
    def blob(
        self,
        package_digest: str,  # noqa: ARG002 - a registry finds a blob by its own digest
        blob_digest: str,
        *,
        start: int,
        etag: str,  # noqa: ARG002 - the digest is the identity of the bytes, whatever their ETag
    ) -> Iterator[httpx.Response]:
        """Fetch a blob from byte `start`."""
        asked = {"range": f"bytes={start}-"} if start else {}
        path = self._address.blob(blob_digest)
        with ExitStack() as stack:
            yield self._allowed(
                blob_digest,
                lambda: stack.enter_context(self.connection.stream(path, {**asked, **self._access.headers})),
            )

    def blob_range(
        self,
        package_digest: str,  # noqa: ARG002 - as above
        blob_digest: str,
        begin: int,
        end: int,
    ) -> bytes:
        """Fetch the bytes `begin:end` of a blob."""
        return self._read(blob_digest, {"range": f"bytes={begin}-{end - 1}"}, end - begin)

    def forget_token(self) -> None:
        """Discard the token of the registry."""
        self._access.headers = {}

    def _read(self, digest: str, headers: Mapping[str, str], limit_bytes: int) -> bytes:
        path = self._address.blob(digest)
        return self._allowed(
            digest,
            lambda: self.connection.read(path, {**headers, **self._access.headers}, limit_bytes=limit_bytes),
        )

    def _allowed(self, digest: str, ask: Callable[[], Answer]) -> Answer:
        """Call `ask`, and once more with the headers that a challenge of the registry asks for.

        Raises:
            OperatorError: the registry refuses access, or lacks the blob. An `AccessRefusedError` would mean
                that the service has revoked the device.
        """
        try:
            try:
                return ask()
            except AccessRefusedError as exc:
                self._access.take_up(exc.challenge)
            return ask()
        except AccessRefusedError as exc:
            raise self._access.refuse() from exc
        except RequestRefusedError as exc:
            raise OperatorError(
                f"{self._address} has no {digest}. The operator can push it with `permille releases push`. "
                f"`permille-agent registry off` returns to the service. ({exc})"
            ) from exc

    def _fetch_token(self, url: str, headers: Mapping[str, str]) -> bytes:
        whole = urllib.parse.urlsplit(url)
        with connect(f"{whole.scheme}://{whole.netloc}", self._ca_file) as tokens:
            path = whole._replace(scheme="", netloc="").geturl()
            return tokens.call("GET", path, headers=headers, limit_bytes=TOKEN_LIMIT_BYTES)


@contextmanager
def _open(chosen: ChosenRegistry) -> Iterator[RegistryBlobs]:
    address = Address.parse(chosen.address)
    ca_file = Path(chosen.ca_file) if chosen.ca_file else None
    with connect(address.url, ca_file) as connection:
        yield RegistryBlobs(address, connection, ca_file)


def read_choice(home: Home) -> ChosenRegistry | None:
    """Return the registry that the user has chosen, or None. Raises OperatorError."""
    return read_record(home.registry, ChosenRegistry)


def blobs(home: Home) -> AbstractContextManager[RegistryBlobs] | None:
    """Return the chosen registry as a context manager, or None. Raises OperatorError."""
    chosen = read_choice(home)
    return None if chosen is None else _open(chosen)
