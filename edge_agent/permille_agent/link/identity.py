"""The identity of this device: an Ed25519 key, made here, which never leaves the home folder.

The server learns the public key at enrolment. Afterwards the device proves who it is by signing a nonce of
the server.
"""

import base64
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from permille.errors import OperatorError
from permille.files import write_atomic
from permille.schemas.devices import token_message
from permille_agent.state.home import Home


class Identity:
    """A device's key pair. The private key has no accessor and no useful `repr`."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    @property
    def public_key(self) -> str:
        """base64url without padding of the 32 raw bytes, as it travels."""
        return encode_bytes(self._key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw))

    def sign_nonce(self, device_id: str, nonce: str) -> str:
        """base64url signature that buys a token."""
        return encode_bytes(self._key.sign(token_message(device_id, nonce)))


def load_identity(home: Home) -> Identity | None:
    """The key in the home folder, or None before the first enrolment.

    Raises:
        OperatorError: others may read the file, or it holds no Ed25519 key.
    """
    path = home.identity_key
    try:
        if path.stat().st_mode & 0o077:
            raise OperatorError(f"expected {path} to be readable by its owner only: chmod 600 {path}")
        key = load_pem_private_key(path.read_bytes(), password=None)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as exc:
        raise OperatorError(f"expected an Ed25519 private key in {path}: {exc}") from exc
    if not isinstance(key, Ed25519PrivateKey):
        raise OperatorError(f"expected an Ed25519 private key in {path}, got {type(key).__name__}")
    return Identity(key)


def load_or_create_identity(home: Home) -> Identity:
    """The key in the home folder; made on first use with mode 0600.

    Raises:
        OperatorError: as `load_identity`, or the file cannot be written.
    """
    if (identity := load_identity(home)) is not None:
        return identity
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    _write_key(home.identity_key, pem)
    return Identity(key)


def encode_bytes(data: bytes) -> str:
    """base64url without padding."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def decode_bytes(text: str) -> bytes:
    """Undo `encode_bytes`.

    Raises:
        ValueError: the text is not base64url.
    """
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)


def _write_key(path: Path, pem: bytes) -> None:
    try:
        write_atomic(path, pem, mode=0o600)
    except OSError as exc:
        raise OperatorError(f"expected to write {path}: {exc}") from exc
