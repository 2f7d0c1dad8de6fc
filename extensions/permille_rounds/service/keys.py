"""The private keys of federations, below `keys_dir` of the settings."""

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from permille.errors import OperatorError
from permille_service.keys import read_private, write_private


class RoundKeys:
    """The private keys that sign the heads of federations. Workers have no access to them.

    The head of a federation names its newest round. Each tenant has a folder, and the file of a key is named
    after its public key.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "rounds"

    def keep(self, tenant_id: str, key: Ed25519PrivateKey) -> None:
        """Store a new key. Call this before the end of the transaction that adds its federation."""
        write_private(self._path(tenant_id, key.public_key()), key.private_bytes_raw())

    def read(self, tenant_id: str, public: Ed25519PublicKey) -> Ed25519PrivateKey:
        """Return the private key. Raises OperatorError if its file is missing or was changed."""
        path = self._path(tenant_id, public)
        try:
            return Ed25519PrivateKey.from_private_bytes(read_private(path))
        except FileNotFoundError as exc:
            raise OperatorError(
                f"{path}, the key that signs a federation's rounds, is missing. Restore it from a backup."
            ) from exc

    def _path(self, tenant_id: str, public: Ed25519PublicKey) -> Path:
        return self._folder / tenant_id / f"{public.public_bytes_raw().hex()}.key"
