"""Privacy guarantees of a federation: `privacy` of its definition (FORMAT 13.6)."""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Final
from urllib.parse import urlsplit

from permille.digests import JSON
from permille.errors import InputError
from permille.privacy.zcdp import dp_epsilon_of, rho_of
from permille.zo.header import check_range

# Fewer devices than these a keeper does not sum.
KEEPER_MINIMUM: Final = 32
# Largest deviation of one integer's noise. With 2**16 devices, 16 deviations fit into 32 bits.
LARGEST_DEVIATION: Final = 1 << 26


class PrivacyMode(StrEnum):
    """Party that draws the noise and sees single vectors: the service, or nobody."""

    CENTRAL = "central"
    KEEPER = "keeper"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeper:
    """The second party that lifts masks.

    Attributes:
        key: its X25519 public key, base64url without padding.
        url: where it answers; https, or http to this very machine.

    Raises:
        InputError: a field is none of these.
    """

    key: str
    url: str

    def __post_init__(self) -> None:
        try:
            raw = base64.urlsafe_b64decode(self.key + "=")
        except (ValueError, binascii.Error) as exc:
            raise InputError(f"expected the keeper's key in base64url, got {self.key!r:.60}") from exc
        if len(raw) != 32 or base64.urlsafe_b64encode(raw).decode().rstrip("=") != self.key:
            raise InputError(f"expected 32 bytes of a keeper's key in base64url, got {self.key!r:.60}")
        try:
            parts = urlsplit(self.url)
            secure = parts.scheme == "https" or (
                parts.scheme == "http" and parts.hostname in ("127.0.0.1", "localhost", "::1")
            )
        except ValueError as exc:
            raise InputError(f"expected a keeper's url, got {self.url!r:.200}") from exc
        if not secure or not parts.hostname or len(self.url) > 200 or parts.query or parts.fragment:
            raise InputError(f"expected a keeper's url of https, got {self.url!r:.200}")

    @property
    def public_bytes(self) -> bytes:
        """The 32 bytes of the key."""
        return base64.urlsafe_b64decode(self.key + "=")


@dataclass(frozen=True, slots=True, kw_only=True)
class Privacy:
    """Noise in the integers of every round, and how often a device may take part.

    Attributes:
        noise_hundredths: 100 z; each integer of a sum gets noise of the parameter `(z C)**2`, C the clip.
        participations: the most rounds of one device.
        delta_exponent: d; all promises are of (epsilon, 10**-d)-differential privacy.
        keeper: in mode keeper and only there.

    Raises:
        InputError: a field is outside the limits of FORMAT 13.6.
    """

    mode: PrivacyMode
    noise_hundredths: int
    participations: int
    delta_exponent: int
    keeper: Keeper | None = None

    def __post_init__(self) -> None:
        check_range("noise_hundredths", self.noise_hundredths, 1, 1_000_000)
        check_range("participations", self.participations, 1, 1 << 24)
        check_range("delta_exponent", self.delta_exponent, 3, 12)
        if (self.mode is PrivacyMode.KEEPER) != (self.keeper is not None):
            raise InputError(f"expected a keeper in mode keeper and only there, got mode {self.mode}")

    @classmethod
    def from_json(cls, fields: Mapping[str, JSON]) -> "Privacy":
        """Read the record of a definition.

        Raises:
            InputError, TypeError, ValueError, KeyError: a key or what it holds is wrong.
        """
        found = dict(fields)
        mode, keeper = PrivacyMode(str(found.pop("mode"))), found.pop("keeper")
        if isinstance(keeper, Mapping):
            texts = {name: str(text) for name, text in keeper.items()}  # what was none is not canonical
            return cls(mode=mode, keeper=Keeper(**texts), **found)  # type: ignore[arg-type]
        return cls(mode=mode, **found)  # type: ignore[arg-type]

    @property
    def noise_multiplier(self) -> float:
        """z, the noise over the clip."""
        return self.noise_hundredths / 100

    def variance(self, clip: int) -> Fraction:
        """The parameter of the noise of one integer, exactly."""
        return Fraction(self.noise_hundredths * clip, 100) ** 2

    def dp_epsilon(self, participations: int) -> float:
        """Return the budget that a device has spent after a number of rounds."""
        if participations == 0:
            return 0.0
        return dp_epsilon_of(rho_of(self.noise_multiplier, participations), 10.0**-self.delta_exponent)

    def check_clip(self, clip: int | None) -> None:
        """Refuse a clip under which sums would not be private, or not fit into 32 bits.

        Raises:
            InputError: there is none, or its noise is too wide.
        """
        if clip is None:
            raise InputError("expected a clip with privacy: noise hides what is bounded, got none")
        if self.noise_hundredths * clip > 100 * LARGEST_DEVIATION:
            most = 100 * LARGEST_DEVIATION // self.noise_hundredths
            raise InputError(f"expected a clip of at most {most} under this noise, got {clip}")
