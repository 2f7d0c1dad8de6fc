"""Masked contributions for a round with a keeper, and the request to the keeper (FORMAT 13.7).

A device adds a random mask to its integers, and encrypts the seed of the mask for the keeper. The
encrypted seed is called a seal. The service sees masked integers, which are uniformly random. The
keeper sees the seals and never the integers. Neither alone learns the vector of a device. The sum
that they compute together contains the keeper's noise.

FORMAT calls the request a question.

Shapes: V = integers of a device's vector, which are K q coefficients and the gain.
"""

import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
from numpy.typing import NDArray

from permille.digests import digest_bytes, digest_of
from permille.errors import InputError, PackageError
from permille_rounds.contribution import (
    SIGNATURE_BYTES,
    Contribution,
    RoundStart,
    decode_contribution,
)
from permille_rounds.definition import MAX_BYTES, MAX_DEVICES, Definition, check_signature
from permille_rounds.privacy.rules import KEEPER_MINIMUM
from permille_rounds.privacy.seals import SEAL_BYTES, SEED_BYTES, mask_of, seal_context, seal_seed

MAGIC: Final = b"PMLMSK1\n"

# FORMAT 13.7. A contribution: magic, definition, round, start, seal, its signature.
_HEAD = struct.Struct(f"<8s32sI32s{SEAL_BYTES}s{SIGNATURE_BYTES}s")
# A request to the keeper: magic, round, size of the definition. An entry: device key, seal, its signature.
_ASKED = struct.Struct("<8sII")
_ENTRY = struct.Struct(f"<32s{SEAL_BYTES}s{SIGNATURE_BYTES}s")
_ASKED_MAGIC = b"PMLOPN1\n"
_ANSWER_MAGIC = b"PMLSUM1\n"
_REFUSAL_MAGIC = b"PMLNOS1\n"
_ANSWER_HEAD_BYTES = len(_ANSWER_MAGIC) + 32
_KEY_BYTES = 32
MAX_REQUEST_BYTES: Final = _ASKED.size + MAX_BYTES + MAX_DEVICES * _ENTRY.size


class UnopenedSealsError(PackageError):
    """The keeper cannot open the seals of some devices, so it sums nothing.

    Attributes:
        device_keys: the public keys of these devices, rising. The devices signed these seals.
    """

    def __init__(self, device_keys: Sequence[bytes]) -> None:
        super().__init__(
            "round-seal",
            f"The keeper cannot open the seals of {len(device_keys)} devices. The first one has the key "
            f"{device_keys[0].hex()}.",
        )
        self.device_keys = tuple(device_keys)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Masked:
    """A device's masked vector, and the seal from which a keeper derives its mask.

    Attributes:
        device_key: the device's public key, 32 bytes.
        seal_signature: the device's signature of the seal and of its context.
        masked_V: uint32 [V].
    """

    definition: Definition
    round_number: int
    start_digest: str
    device_key: bytes
    seal: bytes
    seal_signature: bytes
    masked_V: NDArray[np.uint32]

    @property
    def place(self) -> RoundStart:
        """The invitation that the contribution answers."""
        return RoundStart(round_number=self.round_number, start_digest=self.start_digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """A request to the keeper for the noisy sum of the masks of these devices.

    Attributes:
        entries: device key, seal and signature of each device, sorted by device key.
    """

    definition: Definition
    round_number: int
    entries: tuple[tuple[bytes, bytes, bytes], ...]

    @property
    def answer_bytes(self) -> int:
        """The length of the answer with a sum."""
        return _ANSWER_HEAD_BYTES + 4 * vector_size(self.definition)

    @property
    def refusal_bytes(self) -> int:
        """The length of the longest answer that names devices."""
        return _ANSWER_HEAD_BYTES + _KEY_BYTES * len(self.entries)

    def to_bytes(self) -> bytes:
        """Return the canonical bytes. Their digest identifies the set of devices."""
        rules = self.definition.to_bytes()
        head = _ASKED.pack(_ASKED_MAGIC, self.round_number, len(rules))
        return head + rules + b"".join(_ENTRY.pack(*entry) for entry in self.entries)


def vector_size(definition: Definition) -> int:
    """Return V, the number of integers that a device sends for a round."""
    return definition.steps * definition.log.queries + 1


def masked_bytes(definition: Definition) -> int:
    """Return the size of a device's masked contribution, in bytes."""
    return _HEAD.size + 4 * vector_size(definition) + SIGNATURE_BYTES


def encode_masked(
    definition: Definition,
    round_number: int,
    start_digest: str,
    vector_V: NDArray[np.int64],
    key: Ed25519PrivateKey,
) -> bytes:
    """Return a device's vector under a fresh mask, signed.

    Two calls give different bytes, so the caller must store the result in order to send it again.

    Args:
        vector_V: int64, within the clip (`private_rounds.vector_of`).
    """
    if definition.privacy is None or definition.privacy.keeper is None:
        raise InputError("This federation has no keeper.")
    device_key = key.public_key().public_bytes_raw()
    context = seal_context(definition.digest, round_number, device_key)
    keeper = X25519PublicKey.from_public_bytes(definition.privacy.keeper.public_bytes)
    # Take a fresh seed for each call: two vectors under the same mask would reveal their difference.
    seed = secrets.token_bytes(SEED_BYTES)
    seal = seal_seed(seed, keeper, context)
    # Conversion and addition are modulo 2**32.
    masked_V = vector_V.astype(np.uint32) + mask_of(seed, len(vector_V))
    head = _HEAD.pack(
        MAGIC,
        digest_bytes(definition.digest),
        round_number,
        digest_bytes(start_digest),
        seal,
        # Sign the seal apart from the vector, so the keeper can check it without seeing the vector.
        key.sign(context + seal),
    )
    body = head + masked_V.astype("<u4").tobytes()
    return body + key.sign(body)


def decode_masked(data: bytes, definition: Definition, key: Ed25519PublicKey) -> Masked:
    """Parse the contribution of a device to a round with a keeper.

    Raises:
        PackageError: `round-content`, `round-binding` or `round-signature` (FORMAT 13.7).
    """
    expected = masked_bytes(definition)
    if len(data) != expected or not data.startswith(MAGIC):
        raise PackageError(
            "round-content", f"expected {expected} bytes of a masked vector, got {len(data)}: {data[:8]!r}"
        )
    _, digest, number, start, seal, seal_signature = _HEAD.unpack_from(data)
    if digest != digest_bytes(definition.digest):
        raise PackageError(
            "round-binding",
            f"The contribution belongs to federation {digest.hex()}, not to {definition.digest}.",
        )
    if number >= definition.rounds:
        raise PackageError("round-content", f"expected a round below {definition.rounds}, got {number}")
    device_key = key.public_bytes_raw()
    check_signature(key, data[-SIGNATURE_BYTES:], data[:-SIGNATURE_BYTES], "the device")
    context = seal_context(definition.digest, number, device_key)
    check_signature(key, seal_signature, context + seal, "the device")
    return Masked(
        definition=definition,
        round_number=number,
        start_digest=f"sha256:{start.hex()}",
        device_key=device_key,
        seal=seal,
        seal_signature=seal_signature,
        masked_V=np.frombuffer(data, dtype="<u4", count=vector_size(definition), offset=_HEAD.size),
    )


def decode_sent(
    data: bytes, definition: Definition, key: Ed25519PublicKey, place: RoundStart
) -> Contribution | Masked:
    """Parse a contribution in the federation's form, and check that it answers the invitation.

    Raises:
        PackageError: as for `decode_contribution`, `decode_masked` and `RoundStart.check`.
    """
    privacy = definition.privacy
    decode = decode_contribution if privacy is None or privacy.keeper is None else decode_masked
    found = decode(data, definition, key)
    place.check(found.place)
    return found


def opening_of(definition: Definition, number: int, masked: Sequence[Masked]) -> Opening:
    """Return the request to the keeper for these devices of a round."""
    # Sort the entries, so that a set of devices has one request and one digest.
    entries = sorted((each.device_key, each.seal, each.seal_signature) for each in masked)
    return Opening(definition=definition, round_number=number, entries=tuple(entries))


def decode_opening(data: bytes) -> Opening:
    """Parse a request to the keeper. The keeper trusts only the signatures of the devices in it.

    Raises:
        PackageError: `round-definition`, `round-content` or `round-signature`; `round-limit` for
            too few or too many devices.
    """
    if len(data) < _ASKED.size or len(data) > MAX_REQUEST_BYTES:
        raise PackageError("round-content", f"expected a set of seals, got {len(data)} bytes")
    magic, number, size = _ASKED.unpack_from(data)
    rest = len(data) - _ASKED.size - size
    if magic != _ASKED_MAGIC or rest < 0 or rest % _ENTRY.size:
        raise PackageError("round-content", f"expected {_ASKED_MAGIC!r} and whole entries, got {magic!r}")
    # The keeper has no list of federations, so the request contains the definition. The signatures below
    # bind the seals to this definition.
    definition = Definition.from_bytes(data[_ASKED.size : _ASKED.size + size])
    if definition.privacy is None or definition.privacy.keeper is None or number >= definition.rounds:
        raise PackageError("round-content", f"expected a round of a federation with a keeper, got {number}")
    entries = tuple(_ENTRY.iter_unpack(data[_ASKED.size + size :]))
    keys = [entry[0] for entry in entries]
    # Keys must increase strictly, so that a set of devices has one encoding, and no device counts twice.
    if any(left >= right for left, right in pairwise(keys)):
        raise PackageError("round-content", "Each device must occur once, in the order of the keys.")
    # A small set would reveal single devices, so the service cannot request one.
    if not max(KEEPER_MINIMUM, definition.minimum) <= len(entries) <= MAX_DEVICES:
        least = max(KEEPER_MINIMUM, definition.minimum)
        raise PackageError(
            "round-limit",
            f"The keeper sums the masks of {least} to {MAX_DEVICES} devices, not of {len(entries)}.",
        )
    for device_key, seal, signature in entries:
        try:
            context = seal_context(definition.digest, number, device_key)
            Ed25519PublicKey.from_public_bytes(device_key).verify(signature, context + seal)
        except (InvalidSignature, ValueError) as exc:
            raise PackageError(
                "round-signature", f"The signature of a seal is not that of device {device_key.hex()}."
            ) from exc
    return Opening(definition=definition, round_number=number, entries=entries)


def encode_answer(opening: Opening, sum_V: NDArray[np.uint32]) -> bytes:
    """Return the keeper's answer: the sum of the masks minus the noise, with the digest of the request."""
    return _ANSWER_MAGIC + digest_bytes(digest_of(opening.to_bytes())) + sum_V.astype("<u4").tobytes()


def decode_answer(data: bytes, opening: Opening) -> NDArray[np.uint32]:
    """Return the sum of the masks minus the noise, uint32 [V].

    Raises:
        PackageError: `round-content` if this is not the answer to the request.
    """
    head = _ANSWER_MAGIC + digest_bytes(digest_of(opening.to_bytes()))
    count = vector_size(opening.definition)
    if len(data) != opening.answer_bytes or not data.startswith(head):
        raise PackageError(
            "round-content", f"This is not the keeper's answer to the request for {count} integers."
        )
    return np.frombuffer(data, dtype="<u4", offset=len(head))


def encode_refusal(question: bytes, device_keys: Sequence[bytes]) -> bytes:
    """Return the keeper's answer if seals do not open: the request's digest and the devices' keys."""
    return _REFUSAL_MAGIC + digest_bytes(digest_of(question)) + b"".join(device_keys)


def decode_refusal(data: bytes, opening: Opening) -> tuple[bytes, ...]:
    """Return the public keys of the devices whose seals the keeper cannot open.

    Raises:
        PackageError: `round-content` if this does not name some of the devices of the request.
    """
    head = _REFUSAL_MAGIC + digest_bytes(digest_of(opening.to_bytes()))
    keys = tuple(data[at : at + _KEY_BYTES] for at in range(len(head), len(data), _KEY_BYTES))
    rising = all(left < right for left, right in pairwise(keys))
    if not data.startswith(head) or not keys or not rising or not {*keys} <= {e[0] for e in opening.entries}:
        raise PackageError("round-content", f"This refusal names none of {len(opening.entries)} devices.")
    return keys
