"""The Ed25519 key that signs releases: made at the first start, kept below the data folder, readable by its
owner alone.
"""

import os
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from permille.errors import OperatorError
from permille.files import write_atomic

KEY_BYTES = 32
FILE_NAME = "release-signing.key"


def load_or_make(folder: Path) -> Ed25519PrivateKey:
    """Read the signing key of `folder`, or make one.

    Raises:
        OperatorError: the file is not 32 bytes, or others than its owner may read it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / FILE_NAME
    if not path.exists():
        _make(path)
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise OperatorError(f"expected {path} to be readable by its owner alone (0600), got {mode:04o}")
    data = path.read_bytes()
    if len(data) != KEY_BYTES:
        raise OperatorError(f"expected {KEY_BYTES} bytes in {path}, got {len(data)}")
    return Ed25519PrivateKey.from_private_bytes(data)


def _make(path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    raw = key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    write_atomic(temporary, raw, mode=0o600)
    try:
        os.link(temporary, path)  # the first of several starting processes wins
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
