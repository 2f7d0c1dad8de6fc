"""Definition of a federation, agreed on before its first round (FORMAT 13.1).

The history of a federation is a log as a device's own is, with the same directions for every device. So its
directions, limits and replay are those of FORMAT 6 to 9, and the header of that log says most of this.
"""

import base64
import json
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from permille.choices import EstimatorKind
from permille.digests import canonical_json, digest_of
from permille.errors import InputError, PackageError
from permille.privacy.rules import KEEPER_MINIMUM, Privacy
from permille.zo.header import LogHeader, check_range

FORMAT = "permille-federation"
VERSION = 1
MAX_BYTES = (1 << 20) + 4096
MAX_CONTRIBUTED = 1 << 13
MAX_DEVICES = 1 << 16
MAX_WEIGHT = 16
# The most that a device's gain counts, in nats per token.
GAIN_NATS = 0.25
# A gain is at most the clip over this.
GAIN_SHARE = 10
_GAIN_UNITS = 1024
MAX_LOCAL_STEPS = 1024
# The largest learning rate and epsilon: values of weights lie below one.
MAX_RATE = 10.0


class Rule(StrEnum):
    """Rule that joins the integers of a coordinate: weighted mean, or trimmed mean."""

    MEAN = "mean"
    TRIMMED = "trimmed"


# A sum over fewer devices says much of each: both sides agree to it by a flag of its own.
FEW_DEVICES: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """A federation: its directions, its rounds, its rule, and what a device trains with.

    Attributes:
        log: header of the history, on the pooled state's unit; round r owns its steps rK to rK + K - 1.
        round_key: Ed25519 public key that signs heads, base64url without padding.
        steps: K, the local steps of a round.
        guard_bits: F; a device's coefficients stand on the unit `2**(e + F)`.
        rate_shift: g; the pooled state moves by `2**g` times what the rule gives.
        clip: bound on the Euclidean norm of a device's vector, or None.
        trim_percent: of the devices, at each end of a coordinate, for `Rule.TRIMMED`; 50: the median.
        max_weight: largest weight of a device, 1 where all count the same.
        minimum: devices below which a round is void.
        batch_rows: texts of a device's batch.
        row_tokens: the most tokens of a text that are trained on.
        local_steps: along a gradient, Adam's steps on every weight whose sum one step of the log holds.
        privacy: noise in the sums of the devices' integers, or None.

    Raises:
        InputError: a field is outside the limits of FORMAT 13.1, or does not fit another.
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
        """Say that a sum without noise may be published of fewer devices than hide one of them."""
        return self.privacy is None and self.minimum < FEW_DEVICES

    def __post_init__(self) -> None:
        check_range("steps", self.steps, 1, self.log.total_steps)
        check_range("guard_bits", self.guard_bits, 0, 8)
        check_range("rate_shift", self.rate_shift, -8, 8)
        check_range("max_weight", self.max_weight, 1, MAX_WEIGHT)
        gradient = self.log.estimator is EstimatorKind.GRADIENT
        check_range("local_steps", self.local_steps, 1, MAX_LOCAL_STEPS if gradient else 1)
        check_range("trim_percent", self.trim_percent, 0, 50)
        check_range("minimum", self.minimum, 1, MAX_DEVICES)
        check_range("batch_rows", self.batch_rows, 1, 1024)
        check_range("row_tokens", self.row_tokens, 8, 8192)
        if self.clip is not None:
            check_range("clip", self.clip, GAIN_SHARE, (1 << 31) - 1)
        for name, number in (("learning_rate", self.log.learning_rate), ("epsilon", self.log.epsilon)):
            if number > MAX_RATE:
                raise InputError(f"expected {name} of at most {MAX_RATE:g}, got {number:g}")
        decode_key(self.round_key)
        if self.log.total_steps % self.steps:
            raise InputError(f"expected whole rounds of {self.steps} steps, got {self.log.total_steps} steps")
        if (self.rule is Rule.TRIMMED) != (self.trim_percent > 0):
            raise InputError(f"expected trim_percent for trimmed and only there, got {self.trim_percent}")
        if self.rule is Rule.TRIMMED and self.max_weight > 1:
            raise InputError("expected equal weights: order statistics compare single integers")
        self.device_log()
        if self.privacy is not None:
            self._check_privacy(self.privacy)

    @property
    def rounds(self) -> int:
        """The most rounds there can be."""
        return self.log.total_steps // self.steps

    @property
    def key(self) -> Ed25519PublicKey:
        """The key that signs this federation's heads."""
        return decode_key(self.round_key)

    @property
    def gain_bound(self) -> int:
        """G: a gain of `GAIN_NATS` or more is so many units (FORMAT 13.2)."""
        return _GAIN_UNITS if self.clip is None else self.clip // GAIN_SHARE

    @property
    def digest(self) -> str:
        """sha256 of the canonical bytes: the federation's name."""
        return digest_of(self.to_bytes())

    def device_log(self) -> LogHeader:
        """Return the header of one device's steps, on the unit of its integers.

        Raises:
            InputError: that unit is out of range.
        """
        return replace(self.log, step_unit_exponent=self.log.step_unit_exponent + self.guard_bits)

    def to_bytes(self) -> bytes:
        """Canonical JSON (FORMAT 13.1)."""
        fields = asdict(self) | {"log": json.loads(self.log.to_bytes()), "format": FORMAT, "version": VERSION}
        return canonical_json(fields)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Definition":
        """Read a definition, refusing every byte string that `to_bytes` would not have made.

        Raises:
            PackageError: `round-definition`, with what is wrong.
        """
        if len(data) > MAX_BYTES:
            raise PackageError("round-definition", f"expected at most {MAX_BYTES} bytes, got {len(data)}")
        try:
            fields = json.loads(data)
            del fields["format"], fields["version"]  # to_bytes knows the only value of each
            log = LogHeader.from_bytes(canonical_json(fields["log"]))
            privacy = None if fields["privacy"] is None else Privacy.from_json(fields["privacy"])
            definition = cls(**fields | {"log": log, "rule": Rule(fields["rule"]), "privacy": privacy})
            canonical = definition.to_bytes()
        except (ValueError, TypeError, KeyError, RecursionError, InputError, PackageError) as exc:
            raise PackageError("round-definition", f"expected a definition, got {exc!r:.300}") from exc
        if canonical != data:
            raise PackageError("round-definition", "expected the canonical bytes of a definition, got others")
        return definition

    def _check_privacy(self, privacy: Privacy) -> None:
        privacy.check_clip(self.clip)
        check_range("participations", privacy.participations, 1, self.rounds)
        if privacy.keeper is not None:
            check_range("minimum", self.minimum, KEEPER_MINIMUM, MAX_DEVICES)
        if self.rule is not Rule.MEAN or self.max_weight > 1:
            raise InputError(
                "expected the mean and equal weights with privacy, "
                f"got {self.rule} and weights to {self.max_weight}"
            )


def check_signature(key: Ed25519PublicKey, signature: bytes, signed: bytes, whose: str) -> None:
    """Refuse what this key did not sign.

    Raises:
        PackageError: `round-signature`.
    """
    try:
        key.verify(signature, signed)
    except InvalidSignature as exc:
        raise PackageError("round-signature", f"The signature is not that of {whose}.") from exc


def encode_key(key: Ed25519PublicKey) -> str:
    """A public key as definitions write it: base64url without padding."""
    return base64.urlsafe_b64encode(key.public_bytes_raw()).rstrip(b"=").decode("ascii")


def decode_key(text: str) -> Ed25519PublicKey:
    """Read what `encode_key` wrote, and nothing else. Raises InputError."""
    try:
        raw = base64.b64decode(text + "=", altchars=b"-_", validate=True)
        key = Ed25519PublicKey.from_public_bytes(raw)
    except ValueError as exc:
        raise InputError(f"expected base64url of 32 bytes as a key, got {exc}") from exc
    if encode_key(key) != text:
        raise InputError(f"expected base64url of 32 bytes as a key, got {text!r:.100}")
    return key
