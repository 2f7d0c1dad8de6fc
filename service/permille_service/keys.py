"""The private keys of the service.

Each key is generated when it is first needed, and stored once the request that needs it cannot be refused any
more. Its file lies below `keys_dir` of the settings, and only the owner of the file can read it.
"""

import logging
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from securesystemslib.signer import CryptoSigner, Signer

from permille.errors import OperatorError
from permille.files import write_atomic

logger = logging.getLogger(__name__)
KEY_BYTES = 32
NONCE_BYTES = 12


class TrustKeys:
    """The private keys of TUF roles.

    Each tenant has a folder. The file of a key is named after the key's id.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "trust"

    def signers(self, tenant_id: str) -> dict[str, Signer]:
        """Return the tenant's signing keys by key id. Raises OperatorError if a file was changed."""
        found: dict[str, Signer] = {}
        for path in sorted((self._folder / tenant_id).glob("*.key")):
            key = Ed25519PrivateKey.from_private_bytes(read_private(path))
            signer = CryptoSigner(key)
            # A file that was renamed or swapped would sign for the wrong role.
            if signer.public_key.keyid != path.stem:
                raise OperatorError(
                    f"{path} holds the key {signer.public_key.keyid}, not {path.stem}. Rename it back, or "
                    "restore it from a backup."
                )
            found[path.stem] = signer
        return found

    def keep(self, tenant_id: str, key: Ed25519PrivateKey) -> None:
        """Store a new key. Call this before the end of the transaction whose metadata names the key."""
        path = self._folder / tenant_id / f"{CryptoSigner(key).public_key.keyid}.key"
        write_private(path, key.private_bytes_raw())

    def drop(self, tenant_id: str, key_ids: Iterable[str]) -> None:
        """Delete keys. The caller must have checked that no role names them."""
        for key_id in key_ids:
            (self._folder / tenant_id / f"{key_id}.key").unlink(missing_ok=True)


class Seal:
    """Encryption of secrets in the database, such as answers that hold a new token."""

    def __init__(self, folder: Path) -> None:
        path = folder / "answers.key"
        if not path.exists():
            _write_first(path, secrets.token_bytes(KEY_BYTES))
        self._cipher = AESGCM(read_private(path))

    def close(self, data: bytes, context: str) -> bytes:
        """Encrypt data. `open` needs the same context."""
        # Random nonces are safe for some billions of answers under one key. A service never makes so many.
        nonce = secrets.token_bytes(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, data, context.encode())

    def open(self, sealed: bytes, context: str) -> bytes:
        """Decrypt data. Raises cryptography's InvalidTag if the bytes, the context or the key differ."""
        return self._cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], context.encode())


def write_private(path: Path, data: bytes) -> None:
    """Write a key durably. Raises OperatorError if the folder cannot be written."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(path, data, mode=0o600)
    except OSError as exc:
        raise OperatorError(f"the folder of keys cannot be written: {exc.strerror}") from exc


def read_private(path: Path) -> bytes:
    """Read a key. Raises OperatorError if other users can read it, or if it is damaged."""
    mode = path.stat().st_mode & 0o777
    if mode & 0o007:
        raise OperatorError(f"Other users can read {path} (mode {mode:04o}). Run: chmod 600 {path}")
    if mode & 0o070:
        _take_from_group(path, mode)
    data = path.read_bytes()
    if len(data) != KEY_BYTES:
        raise OperatorError(f"{path} is damaged: it has {len(data)} bytes instead of {KEY_BYTES}.")
    return data


def _take_from_group(path: Path, mode: int) -> None:
    """Remove the group's access to a key.

    The `fsGroup` of Kubernetes gives a group access to whole volumes.
    """
    try:
        path.chmod(0o600)
    except OSError as exc:
        raise OperatorError(
            f"The group of {path} can read it (mode {mode:04o}), and the API may not change this. "
            f"Set PERMILLE_PRIVATE_DIR to a folder whose files the API's user owns."
        ) from exc
    logger.warning("the group of %s could read it (mode %04o); its mode is 0600 now", path, mode)


def _write_first(path: Path, data: bytes) -> None:
    """Write a file, unless another process that starts at the same time has already written it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    write_atomic(temporary, data, mode=0o600)
    try:
        # A link fails if the file exists. A rename would replace a key that the other process already uses.
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
