"""Definition of a federation, fixed before its first round (FORMAT 13.1).

The history of a federation is a log like that of a single device, with the same directions for
every device. So FORMAT 6 to 9 define its directions, limits and replay, and the header of this log
holds most of the definition.
"""

import base64
import json
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from permille.choices import EstimatorKind
from permille.digests import canonical_json, digest_of
from permille.errors import InputError, PackageError
from permille.zo.header import LogHeader, check_range
from permille_rounds.privacy.rules import KEEPER_MINIMUM, Privacy

FORMAT = "permille-federation"
VERSION = 1
# A header of 1 MiB (FORMAT 8.1), and room for the other fields.
MAX_BYTES = (1 << 20) + 4096
# The largest integer of a device. With 2**16 devices of weight 16, sums stay within 2**33, so the shifts of
# `rounds.divided` cannot overflow.
MAX_CONTRIBUTED = 1 << 13
MAX_DEVICES = 1 << 16
MAX_WEIGHT = 16
# FORMAT 13.1: the range of each number that does not depend on another field.
_LIMITS = {
    "guard_bits": (0, 8),
    "rate_shift": (-8, 8),
    "max_weight": (1, MAX_WEIGHT),
    "trim_percent": (0, 50),
    "minimum": (1, MAX_DEVICES),
    "batch_rows": (1, 1024),
    "row_tokens": (8, 8192),
}
# The largest gain that a device reports (`Contribution.gain`), in nats per token. Larger gains are clipped.
GAIN_NATS = 0.25
# With a clip, the largest gain in integer units is the clip divided by this.
GAIN_SHARE = 10
_GAIN_UNITS = 1024  # the largest gain in integer units, without a clip
MAX_LOCAL_STEPS = 1024
MAX_STEPS = (1 << 16) - 1  # FORMAT 13.2: a contribution counts its steps in a u16
# The largest learning rate and epsilon. Weights lie below one, so larger values make no sense.
MAX_RATE = 10.0


class Rule(StrEnum):
    """The rule that combines the devices' integers of one coordinate: weighted mean, or trimmed mean."""

    MEAN = "mean"
    TRIMMED = "trimmed"


# A sum over fewer devices reveals much about each device. Operators and devices must allow such sums by a
# flag.
FEW_DEVICES: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """A federation: its directions, its rounds, its rule, and the training of its devices.

    Attributes:
        log: the header of the history, in units of the pooled state. With K steps in a round, round r has
            the steps r K to r K + K - 1 of the history.
        round_key: the Ed25519 public key that verifies heads, base64url without padding.
        steps: K, the local steps of a round.
        guard_bits: F. The coefficients of a device are in units of `2**(e + F)`, where e is the step unit
            exponent of `log`.
        rate_shift: g. The pooled state moves by `2**g` times the result of the rule.
        clip: the bound on the Euclidean norm of a device's vector, or None.
        trim_percent: for `Rule.TRIMMED`, the percentage of devices whose values are dropped at each end
            of a coordinate. With 50, the median remains.
        max_weight: the largest weight of a device; 1 if all devices count equally.
        minimum: smallest number of devices of a round. With fewer, the round is void.
        batch_rows: the number of texts in a device's batch.
        row_tokens: the largest number of tokens of a text that a device trains on.
        local_steps: for the estimator `gradient`, the number of Adam steps whose sum makes one step of the
            log.
        privacy: the noise in the sums of the devices' integers, or None.

    Raises:
        InputError: a field is outside the limits of FORMAT 13.1, or does not fit another field.
    """

    log: LogHeader
    round_key: str
    steps: int
    guard_bits: int = 2
    rate_shift: int = 0
    rule: Rule = Rule.MEAN
    clip: int | None = None
    trim_percent: int = 0
    max_weight: int = 1
    minimum: int = 1
    batch_rows: int = 4
    row_tokens: int = 128
    local_steps: int = 1
    privacy: Privacy | None = None

    @property
    def exposes_few(self) -> bool:
        """True if sums without noise may cover so few devices that they reveal much about each."""
        return self.privacy is None and self.minimum < FEW_DEVICES

    def __post_init__(self) -> None:
        check_range("steps", self.steps, 1, min(MAX_STEPS, self.log.total_steps))
        gradient = self.log.estimator is EstimatorKind.GRADIENT
        check_range("local_steps", self.local_steps, 1, MAX_LOCAL_STEPS if gradient else 1)
        for name, (least, most) in _LIMITS.items():
            check_range(name, getattr(self, name), least, most)
        if self.clip is not None:
            check_range("clip", self.clip, GAIN_SHARE, (1 << 31) - 1)
        for name, number in (("learning_rate", self.log.learning_rate), ("epsilon", self.log.epsilon)):
            if number > MAX_RATE:
                raise InputError(f"{name} must be at most {MAX_RATE:g}, not {number:g}.")
        decode_key(self.round_key)
        # Each round has the same number of steps, so that its number gives its first step.
        if self.log.total_steps % self.steps:
            raise InputError(
                f"total_steps must be a multiple of the {self.steps} steps of a round, "
                f"not {self.log.total_steps}."
            )
        # The two fields must agree. Otherwise the same rule could be written in two ways, with two digests.
        if (self.rule is Rule.TRIMMED) != (self.trim_percent > 0):
            raise InputError(
                "trim_percent must be above 0 for the rule trimmed, and 0 for the rule mean, "
                f"not {self.trim_percent}."
            )
        if self.rule is Rule.TRIMMED and self.max_weight > 1:
            raise InputError("The rule trimmed compares single integers. Set max_weight to 1.")
        check_range("log.basis_steps", self.log.basis_steps, 0, 0)  # rounds take random directions only
        self.device_log()  # raises if the unit of the devices is out of range
        if self.privacy is not None:
            self._check_privacy(self.privacy)

    @property
    def rounds(self) -> int:
        """The largest number of rounds that the federation can have."""
        return self.log.total_steps // self.steps

    @property
    def key(self) -> Ed25519PublicKey:
        """The public key that verifies this federation's heads."""
        return decode_key(self.round_key)

    @property
    def gain_bound(self) -> int:
        """G, the number of units of a gain of `GAIN_NATS` or more (FORMAT 13.2)."""
        return _GAIN_UNITS if self.clip is None else self.clip // GAIN_SHARE

    @property
    def digest(self) -> str:
        """The SHA-256 of the canonical bytes, which is the federation's name."""
        return _digest_of(self)

    def device_log(self) -> LogHeader:
        """Return the header of one device's steps, in the unit of its integers.

        Raises:
            InputError: that unit is out of range.
        """
        return replace(self.log, step_unit_exponent=self.log.step_unit_exponent + self.guard_bits)

    def to_bytes(self) -> bytes:
        """Return the canonical JSON (FORMAT 13.1)."""
        fields = asdict(self) | {"log": json.loads(self.log.to_bytes()), "format": FORMAT, "version": VERSION}
        return canonical_json(fields)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Definition":
        """Parse canonical bytes, and refuse all others.

        Raises:
            PackageError: `round-definition`.
        """
        if len(data) > MAX_BYTES:
            raise PackageError("round-definition", f"expected at most {MAX_BYTES} bytes, got {len(data)}")
        try:
            fields = json.loads(data)
            # Other values of these two fail below, in the comparison with the canonical bytes.
            del fields["format"], fields["version"]
            log = LogHeader.from_bytes(canonical_json(fields["log"]))
            privacy = None if fields["privacy"] is None else Privacy.from_json(fields["privacy"])
            definition = cls(**fields | {"log": log, "rule": Rule(fields["rule"]), "privacy": privacy})
            canonical = definition.to_bytes()
        except (ValueError, TypeError, KeyError, RecursionError, InputError, PackageError) as exc:
            raise PackageError("round-definition", f"The definition is malformed: {exc!r:.300}") from exc
        if canonical != data:
            raise PackageError("round-definition", "expected the canonical bytes of a definition, got others")
        return definition

    def _check_privacy(self, privacy: Privacy) -> None:
        privacy.check_clip(self.clip)
        check_range("participations", privacy.participations, 1, self.rounds)
        if privacy.keeper is not None:
            check_range("minimum", self.minimum, KEEPER_MINIMUM, MAX_DEVICES)
        # FORMAT 13.6: the bound on one device's influence holds only for a plain sum.
        if self.rule is not Rule.MEAN or self.max_weight > 1:
            raise InputError(
                f"Privacy needs the rule mean and a max_weight of 1, not {self.rule} and {self.max_weight}."
            )


# A round uses the digest several times for each device. With hundreds of tensors, it takes milliseconds.
@lru_cache(maxsize=8)
def _digest_of(definition: Definition) -> str:
    return digest_of(definition.to_bytes())


def check_signature(key: Ed25519PublicKey, signature: bytes, signed: bytes, whose: str) -> None:
    """Check a signature.

    Args:
        whose: the owner of the key, for the message.

    Raises:
        PackageError: `round-signature`.
    """
    try:
        key.verify(signature, signed)
    except InvalidSignature as exc:
        raise PackageError("round-signature", f"The signature is not that of {whose}.") from exc


def encode_key(key: Ed25519PublicKey) -> str:
    """Return a public key in the form of definitions: base64url without padding."""
    return base64.urlsafe_b64encode(key.public_bytes_raw()).rstrip(b"=").decode("ascii")


def decode_key(text: str) -> Ed25519PublicKey:
    """Parse a key in the canonical form of `encode_key`. Raises InputError."""
    try:
        raw = base64.b64decode(text + "=", altchars=b"-_", validate=True)
        key = Ed25519PublicKey.from_public_bytes(raw)
    except ValueError as exc:
        raise InputError(f"expected base64url of 32 bytes as a key, got {exc}") from exc
    # base64 has several texts for the same bytes, and a definition has one byte string.
    if encode_key(key) != text:
        raise InputError(f"expected base64url of 32 bytes as a key, got {text!r:.100}")
    return key
