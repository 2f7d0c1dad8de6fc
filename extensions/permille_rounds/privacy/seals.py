"""Masks for a device's integers, and seals, which give the masks to a keeper (FORMAT 13.7).

A mask is the keystream of ChaCha20 under a fresh seed, with one `u32` per integer. A seal is the seed,
encrypted by HPKE (RFC 9180) for the keeper's key. The seal is bound to federation, round and device, so it
opens nowhere else. Sums are modulo 2**32. `Privacy.check_clip` keeps the sum of the devices' integers and the
noise within 32 bits.
"""

import struct
from typing import Final

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
from numpy.typing import NDArray

from permille.digests import digest_bytes
from permille.errors import PackageError

SEED_BYTES: Final = 32
SEAL_BYTES: Final = 80

_DOMAIN = b"permille-mask-1\0"
_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)


def seal_context(definition_digest: str, round_number: int, device_key: bytes) -> bytes:
    """Return the bytes that bind a seal to a federation's round and a device's public key."""
    return _DOMAIN + digest_bytes(definition_digest) + struct.pack("<I", round_number) + device_key


def seal_seed(seed: bytes, keeper: X25519PublicKey, context: bytes) -> bytes:
    """Encrypt the seed of a mask for the keeper. Return the seal, 80 bytes."""
    return _SUITE.encrypt(seed, keeper, info=context)


def open_seed(seal: bytes, keeper: X25519PrivateKey, context: bytes) -> bytes:
    """Return the seed in a seal.

    Raises:
        PackageError: `round-seal`: the seal is not for this keeper, round and device.
    """
    try:
        seed = _SUITE.decrypt(seal, keeper, info=context)
    except (InvalidTag, ValueError) as exc:
        raise PackageError("round-seal", "The seal does not open for this keeper, round and device.") from exc
    # Anyone can seal a seed of another length to the keeper's public key.
    if len(seed) != SEED_BYTES:
        raise PackageError("round-seal", f"expected a seed of {SEED_BYTES} bytes, got {len(seed)}")
    return seed


def mask_of(seed: bytes, count: int) -> NDArray[np.uint32]:
    """Return the mask of `count` integers, uint32 [count]."""
    # A nonce of zeros is safe here, because each seed is used for only one mask.
    stream = Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor().update(bytes(4 * count))
    return np.frombuffer(stream, dtype="<u4")


def signed_sum(sum_V: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Return the integers nearest to zero that are congruent to these modulo 2**32.

    Example:
        >>> signed_sum(np.array([5, 2**32 - 3], np.uint32))
        array([ 5, -3])
    """
    return sum_V.astype(np.int64) - ((sum_V >= 1 << 31).astype(np.int64) << 32)
