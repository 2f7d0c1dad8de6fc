"""Signed releases (FORMAT 5): which package a name means, since when, until when, said by whom.

Ed25519 over a context and canonical JSON. The reader pins keys; what is unsigned, foreign, expired, older
than what was seen before, or another package under a version that was seen, is refused. The clock is an
argument.
"""

import hashlib
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from permille.digests import canonical_json, is_digest
from permille.errors import PackageError

CONTEXT = b"permille-release-1\0"
KEY_BYTES = 32
SIGNATURE_BYTES = 64
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """What a signature speaks about. `version` only grows under a name; `expires_at` in Unix seconds.

    Raises:
        PackageError: `release-malformed`.
    """

    name: str
    version: int
    manifest_digest: str
    expires_at: int

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise PackageError("release-malformed", f"expected a release's name, got {self.name!r:.80}")
        for what, number in (("version", self.version), ("expires_at", self.expires_at)):
            if type(number) is not int or not 1 <= number < 2**53:
                raise PackageError("release-malformed", f"expected {what} from 1, got {number!r:.40}")
        if not is_digest(self.manifest_digest):
            got = f"{self.manifest_digest!r:.80}"
            raise PackageError("release-malformed", f"expected a manifest's digest, got {got}")

    def signed_bytes(self) -> bytes:
        """The bytes under the signature."""
        return CONTEXT + canonical_json(
            {
                "name": self.name,
                "version": self.version,
                "manifest_digest": self.manifest_digest,
                "expires_at": self.expires_at,
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedRelease:
    """A release, the id of the key that signed it, and 64 bytes of signature."""

    release: Release
    key_id: str
    signature: bytes


def generate_key() -> Ed25519PrivateKey:
    """A new signing key from the system's randomness."""
    return Ed25519PrivateKey.generate()


def public_bytes(key: Ed25519PrivateKey) -> bytes:
    """The 32 bytes that a device pins."""
    return key.public_key().public_bytes_raw()


def key_id_of(public_key: bytes) -> str:
    """Name of a public key: the first 32 hex digits of its SHA-256."""
    return hashlib.sha256(public_key).hexdigest()[:32]


def sign_release(key: Ed25519PrivateKey, release: Release) -> SignedRelease:
    """Sign; the same key and release give the same bytes."""
    signature = key.sign(release.signed_bytes())
    return SignedRelease(release=release, key_id=key_id_of(public_bytes(key)), signature=signature)


def signed_release_from_json(fields: Mapping[str, object]) -> SignedRelease:
    """A signed release as the API sends it; fields that the signature does not cover are ignored.

    Raises:
        PackageError: `release-malformed`.
    """
    name, version = fields.get("name"), fields.get("version")
    digest, expires_at = fields.get("manifest_digest"), fields.get("expires_at")
    key_id, signature = fields.get("key_id"), fields.get("signature")
    texts = (name, digest, key_id, signature)
    if not all(isinstance(x, str) for x in texts) or type(version) is not int or type(expires_at) is not int:
        raise PackageError(
            "release-malformed", f"expected a signed release's fields, got {sorted(fields)!r:.200}"
        )
    release = Release(name=str(name), version=version, manifest_digest=str(digest), expires_at=expires_at)
    return SignedRelease(release=release, key_id=str(key_id), signature=decode_base64url(str(signature)))


def verify_release(
    signed: SignedRelease,
    pinned_keys: Mapping[str, bytes],
    now: int,
    last_version: int | None,
    *,
    name: str | None = None,
    last_digest: str | None = None,
) -> Release:
    """The release, if it may be believed.

    Args:
        pinned_keys: 32-byte public keys by key id.
        now: Unix seconds.
        last_version: highest version seen under this name, None for the first.
        name: the release that was asked for.
        last_digest: manifest digest that came with `last_version`.

    Raises:
        PackageError: `release-key`, `release-signature`, `release-name`, `release-expired`,
        `release-rollback`
            or `release-changed`.
    """
    release = signed.release
    _check_signature(signed, pinned_keys)
    if name is not None and release.name != name:
        raise PackageError("release-name", f"expected release {name!r:.80}, got {release.name!r}")
    if now >= release.expires_at:
        raise PackageError("release-expired", f"expected expiry after {now}, got {release.expires_at}")
    if last_version is not None and release.version < last_version:
        raise PackageError(
            "release-rollback", f"expected version {last_version} or newer, got {release.version}"
        )
    if last_digest is not None and release.version == last_version and release.manifest_digest != last_digest:
        raise PackageError(
            "release-changed",
            f"expected {last_digest} of version {last_version}, got {release.manifest_digest}",
        )
    return release


def _check_signature(signed: SignedRelease, pinned_keys: Mapping[str, bytes]) -> None:
    public_key = pinned_keys.get(signed.key_id)
    if public_key is None or key_id_of(public_key) != signed.key_id:
        raise PackageError("release-key", f"expected a pinned key, got {signed.key_id!r:.80}")
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signed.signature, signed.release.signed_bytes())
    except (InvalidSignature, ValueError) as exc:
        raise PackageError("release-signature", f"expected a signature by {signed.key_id}") from exc


def encode_base64url(data: bytes) -> str:
    """base64url without padding."""
    return urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def decode_base64url(text: str) -> bytes:
    """Inverse of `encode_base64url`, taking no other spelling.

    Raises:
        PackageError: `release-malformed`.
    """
    try:
        data = urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4))
    except ValueError as exc:
        raise PackageError("release-malformed", "expected base64url") from exc
    if encode_base64url(data) != text:
        raise PackageError("release-malformed", "expected base64url without padding")
    return data
