"""Enrolment of this device with a server.

- An invitation contains the first digits of the digest of the operator's root metadata. The server must
  answer with that metadata, so an attacker on the network cannot replace the keys in it.
- Each newer root must be signed by the keys of the root before it. Only another enrolment by the user
  replaces the first root.
- The device signs its enrolment, which proves that it holds the key.
- Enrolling the same key again gives the same device.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from permille.digests import digest_of
from permille.errors import InputError, OperatorError, PackageError
from permille.files import write_atomic
from permille_agent.link.api import (
    Credentials,
    DeviceApi,
    Identity,
    load_identity,
    load_or_create_identity,
)
from permille_agent.link.client import AccessRefusedError, Connection, RequestRefusedError, check_server
from permille_agent.state.home import Home, read_record, write_record

INVITATION = re.compile(r"[A-Za-z0-9_-]{22}\.([0-9a-f]{32})", re.ASCII)
CA_LIMIT_BYTES = 1 << 20
COMMAND = "permille-agent enroll SERVER INVITATION"


@dataclass(frozen=True, slots=True, kw_only=True)
class Enrolment:
    """Contents of `enrolment.json`.

    Attributes:
        server: base URL of the server.
        release: name of the release that the device follows.
        alias: alias of the release. The device installs the version that the alias points to, unless a
            rollout offers another.
        root: signed root metadata that the invitation named, as text.
        private_ca: whether `ca.pem` in the home folder verifies the server's certificate.
    """

    server: str
    device_id: str
    tenant_id: str
    name: str
    release: str
    alias: str
    root: str
    private_ca: bool

    def document(self) -> dict[str, str]:
        """Return the fields that commands show, with the root's digits as in an invitation."""
        return {
            "server": self.server,
            "device_id": self.device_id,
            "name": self.name,
            "release": self.release,
            "alias": self.alias,
            "root": _root_digits(self.root),
        }


Connect = Callable[[str, Path | None], Connection]


def connect(server: str, ca_file: Path | None) -> Connection:
    """Open a connection with the defaults of `client.py`."""
    return Connection(server, ca_file=ca_file)


def load_enrolment(home: Home) -> Enrolment | None:
    """Return the enrolment in the home folder, or None.

    Raises:
        OperatorError: the file is damaged.
    """
    return read_record(home.enrolment, Enrolment)


def require_enrolment(home: Home) -> tuple[Enrolment, Identity]:
    """Return the enrolment and the device's key.

    Raises:
        OperatorError: the device is not enrolled.
    """
    enrolment, identity = load_enrolment(home), load_identity(home)
    if enrolment is None or identity is None:
        raise OperatorError(f"This device is not enrolled. Run `{COMMAND}` first.")
    return enrolment, identity


@contextmanager
def open_api(home: Home, *, connection: Connect = connect) -> Iterator[DeviceApi]:
    """Open the API as the enrolled device, and close its connection after use.

    For example:

        with open_api(home) as api:
            deliver(home, api)

    Raises:
        OperatorError: the device is not enrolled.
    """
    enrolment, identity = require_enrolment(home)
    ca_file = home.ca_file if enrolment.private_ca else None
    credentials = Credentials(device_id=enrolment.device_id, identity=identity)
    with connection(enrolment.server, ca_file) as opened:
        yield DeviceApi(opened, credentials)


def enroll(
    home: Home,
    server: str,
    invitation: str,
    *,
    name: str | None = None,
    ca_file: Path | None = None,
    connection: Connect = connect,
) -> Enrolment:
    """Enrol this device. The caller holds the writers' lock.

    Args:
        home: the home folder.
        server: base URL of the server.
        invitation: the whole invitation that the operator sent.
        name: name that operators see. The default is the current name, or one made from the public key.
        ca_file: PEM file of a private certificate authority.
        connection: opens the connection.

    Raises:
        InputError: the invitation is refused, or the device is enrolled with another server.
        PackageError: the server's root differs from the invitation's (`trust-root`).
        RetryableError: the service cannot be reached.
        OperatorError: the service's certificate is not trusted, or a file cannot be written.
    """
    server = check_server(server)
    known = load_enrolment(home)
    if known is not None and known.server != server:
        message = f"This device is enrolled at {known.server}, not {server}"
        raise InputError(f"{message}. Run `permille-agent unenroll` first, or use another --home.")
    if (parts := INVITATION.fullmatch(invitation)) is None:
        form = "22 characters (A-Z a-z 0-9 _ -), a dot and 32 hexadecimal digits"
        raise InputError(f"This is not the whole invitation, which has {form}. Copy all of it.")
    # The key is durable before the service learns it, so a kill cannot leave a device without its key.
    identity = load_or_create_identity(home)
    name = name or (f"device-{identity.public_key[:8]}" if known is None else known.name)
    with connection(server, ca_file) as opened:
        try:
            answer = DeviceApi(opened).enrol(invitation, identity, name)
        except AccessRefusedError as exc:
            raise InputError(
                "The invitation is not valid, or was used before. Ask the operator for a new one."
            ) from exc
        except RequestRefusedError as exc:
            raise InputError(f"The service refuses this device: {exc}") from exc
    # Check the root before it is stored, because afterwards it decides what may be installed.
    if (got := _root_digits(answer.root)) != parts[1]:
        raise PackageError(
            "trust-root", f"The service has the root {got}, but the invitation names {parts[1]}"
        )
    # Write the enrolment last, because this file means that the device is enrolled.
    _keep_ca(home, ca_file)
    enrolment = Enrolment(
        server=server,
        device_id=answer.device_id,
        tenant_id=answer.tenant_id,
        name=name,
        release=answer.release,
        alias=answer.alias,
        root=answer.root,
        private_ca=ca_file is not None,
    )
    write_record(home.enrolment, enrolment)
    return enrolment


def _root_digits(root: str) -> str:
    """Return those digits of a root's digest that an invitation contains."""
    return digest_of(root.encode()).removeprefix("sha256:")[:32]


def _keep_ca(home: Home, ca_file: Path | None) -> None:
    if ca_file is None:
        return
    try:
        with ca_file.open("rb") as file:
            write_atomic(home.ca_file, file.read(CA_LIMIT_BYTES), mode=0o600)
    except OSError as exc:
        raise OperatorError(f"Cannot copy {ca_file} to {home.ca_file}: {exc}") from exc
