"""Private keys, made at their first use, stored below the data folder, readable by their owner only."""

import logging
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from securesystemslib.signer import CryptoSigner, Signer

from permille.errors import OperatorError
from permille.files import write_atomic

logger = logging.getLogger(__name__)
KEY_BYTES = 32
NONCE_BYTES = 12


class TrustKeys:
    """The private keys of TUF roles. Each tenant has a folder, and each key a file named by its id."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "trust"

    def signers(self, tenant_id: str) -> dict[str, Signer]:
        """Return the service's signing keys by key id. Raises OperatorError if a file was changed."""
        found: dict[str, Signer] = {}
        for path in sorted((self._folder / tenant_id).glob("*.key")):
            key = Ed25519PrivateKey.from_private_bytes(_read_private(path))
            signer = CryptoSigner(key)
            # A renamed or swapped file would sign as another role.
            if signer.public_key.keyid != path.stem:
                raise OperatorError(f"{path} holds the key {signer.public_key.keyid}, not {path.stem}.")
            found[path.stem] = signer
        return found

    def make(self, tenant_id: str) -> CryptoSigner:
        """Make a key and store it, before any metadata names it."""
        key = Ed25519PrivateKey.generate()
        signer = CryptoSigner(key)
        path = self._folder / tenant_id / f"{signer.public_key.keyid}.key"
        _write(path, key.private_bytes_raw())
        return signer

    def drop(self, tenant_id: str, key_ids: Iterable[str]) -> None:
        """Delete keys. The caller checks that no role names them."""
        for key_id in key_ids:
            (self._folder / tenant_id / f"{key_id}.key").unlink(missing_ok=True)


class RoundKeys:
    """The private keys that sign the heads of federations. Workers have no access to them.

    Each tenant has a folder, and each key a file named by the public key.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "rounds"

    def make(self, tenant_id: str) -> Ed25519PublicKey:
        """Make a key and store it, before any definition names it. Return the public key."""
        key = Ed25519PrivateKey.generate()
        public = key.public_key()
        path = self._path(tenant_id, public)
        _write(path, key.private_bytes_raw())
        return public

    def read(self, tenant_id: str, public: Ed25519PublicKey) -> Ed25519PrivateKey:
        """Return the private key. Raises OperatorError if its file is missing or was changed."""
        path = self._path(tenant_id, public)
        try:
            return Ed25519PrivateKey.from_private_bytes(_read_private(path))
        except FileNotFoundError as exc:
            raise OperatorError(f"{path}, the key that signs a federation's rounds, is missing.") from exc

    def _path(self, tenant_id: str, public: Ed25519PublicKey) -> Path:
        return self._folder / tenant_id / f"{public.public_bytes_raw().hex()}.key"


class Seal:
    """Encryption of secrets in the database, such as answers that hold a new token."""

    def __init__(self, folder: Path) -> None:
        path = folder / "answers.key"
        if not path.exists():
            _write_first(path, secrets.token_bytes(KEY_BYTES))
        self._cipher = AESGCM(_read_private(path))

    def close(self, data: bytes, context: str) -> bytes:
        """Encrypt data. `open` needs the same context."""
        # A random nonce is safe for some billions of answers under one key, which a service never reaches.
        nonce = secrets.token_bytes(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, data, context.encode())

    def open(self, sealed: bytes, context: str) -> bytes:
        """Decrypt data. Raises cryptography's InvalidTag if the bytes, the context or the key differ."""
        return self._cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], context.encode())


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(path, data, mode=0o600)
    except OSError as exc:
        raise OperatorError(f"the folder of keys cannot be written: {exc.strerror}") from exc


def _read_private(path: Path) -> bytes:
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
    """Remove the group's rights. Kubernetes' `fsGroup` gives all files of a volume to a group."""
    try:
        path.chmod(0o600)
    except OSError as exc:
        raise OperatorError(
            f"{path} can be read by its group ({mode:04o}) and belongs to another user. "
            f"Keep keys on a volume that the API's user may change (PERMILLE_PRIVATE_DIR)."
        ) from exc
    logger.warning("%s could be read by its group (%04o): it is 0600 now", path, mode)


def _write_first(path: Path, data: bytes) -> None:
    """Write a file, unless another process that starts at the same time has written it first."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    write_atomic(temporary, data, mode=0o600)
    try:
        # A link fails where a rename would replace the key that the other process already uses.
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
