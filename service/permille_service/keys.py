"""Private keys: made at the first start, kept below the data folder, readable by their owner alone."""

import os
import secrets
from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from permille.errors import OperatorError
from permille.files import write_atomic

KEY_BYTES = 32
NONCE_BYTES = 12


def signing_key(folder: Path) -> Ed25519PrivateKey:
    """The Ed25519 key that signs releases. Raises OperatorError when its file is not as it was made."""
    raw = _load_or_make(
        folder / "release-signing.key", lambda: Ed25519PrivateKey.generate().private_bytes_raw()
    )
    return Ed25519PrivateKey.from_private_bytes(raw)


class Seal:
    """Encrypts what the database must keep but not show: answers that hold a new secret."""

    def __init__(self, folder: Path) -> None:
        self._cipher = AESGCM(_load_or_make(folder / "answers.key", lambda: secrets.token_bytes(KEY_BYTES)))

    def close(self, data: bytes, context: str) -> bytes:
        """Encrypt; only `open` with the same context reads it."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, data, context.encode())

    def open(self, sealed: bytes, context: str) -> bytes:
        """Decrypt. Raises cryptography's InvalidTag for other bytes, context or key."""
        return self._cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], context.encode())


def _load_or_make(path: Path, make: Callable[[], bytes]) -> bytes:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        _write_first(path, make())
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise OperatorError(f"expected {path} to be readable by its owner alone (0600), got {mode:04o}")
    data = path.read_bytes()
    if len(data) != KEY_BYTES:
        raise OperatorError(f"expected {KEY_BYTES} bytes in {path}, got {len(data)}")
    return data


def _write_first(path: Path, data: bytes) -> None:
    """Write unless another starting process was first."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    write_atomic(temporary, data, mode=0o600)
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
