"""Contribution of a device to a round: the signed integers of its local steps (FORMAT 13.2).

Contributions come from untrusted devices. Limits are checked before memory is allocated, and each
contribution has exactly one encoding.

Shapes: T = local steps done, Q = a device's queries.
"""

import struct
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from numpy.typing import NDArray

from permille.digests import digest_bytes
from permille.errors import InputError, PackageError
from permille.zo.header import check_range
from permille.zo.varints import MAX_BYTES, decode_varints, encode_varints, unzigzag, zigzag
from permille_rounds.definition import MAX_CONTRIBUTED, Definition, check_signature

MAGIC = b"PMLCTB1\n"
SIGNATURE_BYTES = 64

# FORMAT 13.2: magic, definition, round, weight, steps done, start, size of the payload.
_HEAD = struct.Struct("<8s32sIBH32sI")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStart:
    """An invitation of a device: the number of the round, and the digest of the state to begin from."""

    round_number: int
    start_digest: str

    def check(self, found: "RoundStart") -> None:
        """Check that a contribution answers this invitation.

        Raises:
            PackageError: `round-binding`.
        """
        if found != self:
            raise PackageError(
                "round-binding",
                f"The contribution is for round {found.round_number} from state {found.start_digest}, but "
                f"the device was invited to round {self.round_number} from state {self.start_digest}.",
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contribution:
    """The local steps of one device in one round.

    Attributes:
        weight: the weight of the device in a weighted mean.
        start_digest: the digest of the pooled state from which the device began.
        c_TQ: the coefficients, int64 [T, Q], in the unit of `definition.device_log()`. T is at most the
            definition's `steps`.
        gain: the base's loss per token minus that of the pooled state, on text of the device that no
            round trains on. It is in units of `GAIN_NATS / gain_bound`, from -`gain_bound` to
            `gain_bound`.

    Raises:
        InputError: a field is outside the limits of FORMAT 13.2.
    """

    definition: Definition
    round_number: int
    weight: int
    start_digest: str
    c_TQ: NDArray[np.int64]
    gain: int = 0

    def __post_init__(self) -> None:
        rules = self.definition
        if not 0 <= self.round_number < rules.rounds:
            raise InputError(f"expected a round below {rules.rounds}, got {self.round_number}")
        if not 1 <= self.weight <= rules.max_weight:
            raise InputError(f"expected a weight from 1 to {rules.max_weight}, got {self.weight}")
        queries, shape = rules.log.queries, self.c_TQ.shape
        if self.c_TQ.dtype != np.int64 or self.c_TQ.ndim != 2 or shape[1] != queries:
            raise InputError(f"expected coefficients int64 [T, {queries}], got {self.c_TQ.dtype} {shape}")
        if not 1 <= len(self.c_TQ) <= rules.steps:
            raise InputError(f"expected 1 to {rules.steps} steps, got {len(self.c_TQ)}")
        low, high = int(self.c_TQ.min()), int(self.c_TQ.max())
        if max(high, -low) > MAX_CONTRIBUTED:
            raise InputError(f"expected coefficients within {MAX_CONTRIBUTED}, got {low} to {high}")
        check_range("gain", self.gain, -rules.gain_bound, rules.gain_bound)

    @property
    def place(self) -> RoundStart:
        """The invitation that the contribution answers."""
        return RoundStart(round_number=self.round_number, start_digest=self.start_digest)


def encode_contribution(contribution: Contribution, key: Ed25519PrivateKey) -> bytes:
    """Return the canonical bytes of a contribution, signed with the device's key."""
    # FORMAT 13.2: the gain follows the coefficients.
    numbers = np.append(contribution.c_TQ.reshape(-1), np.int64(contribution.gain))
    payload = encode_varints(zigzag(numbers))
    head = _HEAD.pack(
        MAGIC,
        digest_bytes(contribution.definition.digest),
        contribution.round_number,
        contribution.weight,
        len(contribution.c_TQ),
        digest_bytes(contribution.start_digest),
        len(payload),
    )
    return head + payload + key.sign(head + payload)


def decode_contribution(data: bytes, definition: Definition, key: Ed25519PublicKey) -> Contribution:
    """Parse the contribution of a device to a round of this federation.

    Args:
        key: the device's public key, known from its enrolment.

    Raises:
        PackageError: `round-content`, `round-binding` or `round-signature` (FORMAT 13.2).
    """
    if len(data) < _HEAD.size + SIGNATURE_BYTES:
        raise PackageError("round-content", f"expected a contribution, got {len(data)} bytes")
    magic, digest, number, weight, steps, start, size = _HEAD.unpack_from(data)
    if magic != MAGIC or size != len(data) - _HEAD.size - SIGNATURE_BYTES:
        raise PackageError(
            "round-content",
            f"expected {MAGIC!r} and a payload of {size} bytes, got {magic!r} and a payload of "
            f"{len(data) - _HEAD.size - SIGNATURE_BYTES} bytes",
        )
    if digest != digest_bytes(definition.digest):
        raise PackageError(
            "round-binding",
            f"The contribution belongs to federation {digest.hex()}, not to {definition.digest}.",
        )
    values = steps * definition.log.queries + 1
    # Each integer takes 1 to MAX_BYTES bytes, so this bounds memory before parsing.
    if not values <= size <= values * MAX_BYTES:
        raise PackageError("round-content", f"expected {values} integers, got {size} bytes")
    # Verify the signature before the payload is parsed.
    check_signature(key, data[-SIGNATURE_BYTES:], data[:-SIGNATURE_BYTES], "the device")
    try:
        numbers = unzigzag(decode_varints(data[_HEAD.size : -SIGNATURE_BYTES]))
        return Contribution(
            definition=definition,
            round_number=number,
            weight=weight,
            start_digest=f"sha256:{start.hex()}",
            c_TQ=numbers[:-1].reshape(steps, definition.log.queries),
            gain=int(numbers[-1]),
        )
    except (PackageError, InputError, ValueError) as exc:
        raise PackageError("round-content", f"expected a contribution of FORMAT 13.2, got {exc}") from exc
