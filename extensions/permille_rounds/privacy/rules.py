"""Privacy rules of a federation: the field `privacy` of its definition (FORMAT 13.6)."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Final
from urllib.parse import urlsplit

from permille.digests import JSON
from permille.errors import InputError
from permille.zo.header import check_range
from permille_rounds.privacy.zcdp import dp_epsilon_of, rho_of

# The fewest devices whose masks a keeper sums.
KEEPER_MINIMUM: Final = 32
# The largest standard deviation of the noise in an integer. Noise practically never exceeds 16 deviations,
# which are 2**30, so it fits into 32 bits.
LARGEST_DEVIATION: Final = 1 << 26
# With this clip, a gain is at most 16,383 (a tenth of the clip), so the gains of 2**16 devices add up to at
# most 2**30 - 2**16. This sum and the noise together fit into 32 bits.
LARGEST_KEEPER_CLIP: Final = 163_839


class PrivacyMode(StrEnum):
    """The party that draws the noise.

    With CENTRAL, the service sees the vectors of single devices. With KEEPER, no party sees them.
    """

    CENTRAL = "central"
    KEEPER = "keeper"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeper:
    """The second party, which computes the sum of the devices' masks.

    Attributes:
        key: the keeper's X25519 public key, base64url without padding.
        url: the keeper's address: https, or http to this machine.

    Raises:
        InputError: the key or the address is invalid.
    """

    key: str
    url: str

    def __post_init__(self) -> None:
        try:
            raw = base64.urlsafe_b64decode(self.key + "=")
        except ValueError as exc:
            raise InputError(f"The keeper's key is not base64url: {self.key!r:.60}.") from exc
        # The decoder ignores invalid characters, so compare with the canonical text.
        if len(raw) != 32 or base64.urlsafe_b64encode(raw).decode().rstrip("=") != self.key:
            raise InputError(
                f"The keeper's key must be 32 bytes in base64url without padding, not {self.key!r:.60}."
            )
        try:
            parts = urlsplit(self.url)
            secure = parts.scheme == "https" or (
                parts.scheme == "http" and parts.hostname in ("127.0.0.1", "localhost", "::1")
            )
        except ValueError as exc:
            raise InputError(f"The keeper's address is not a URL: {self.url!r:.200}.") from exc
        if not secure or not parts.hostname or len(self.url) > 200 or parts.query or parts.fragment:
            raise InputError(
                f"The keeper's address must be https, or http to this machine, not {self.url!r:.200}."
            )

    @property
    def public_bytes(self) -> bytes:
        """The 32 bytes of the key."""
        return base64.urlsafe_b64decode(self.key + "=")


@dataclass(frozen=True, slots=True, kw_only=True)
class Privacy:
    """The noise in the integers of every round, and how often a device may take part.

    Attributes:
        noise_hundredths: 100 z, where z is the noise multiplier. Each integer of a sum gets noise with
            parameter `(z C)**2`, where C is the clip.
        participations: the largest number of rounds in which one device takes part.
        delta_exponent: d. The guarantee is (epsilon, 10**-d)-differential privacy.
        keeper: the keeper in mode keeper, else None.

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
            raise InputError(
                f"The mode keeper needs a keeper, and the mode central takes none. The mode is {self.mode}."
            )

    @classmethod
    def from_json(cls, fields: Mapping[str, JSON]) -> "Privacy":
        """Read the field `privacy` of a definition.

        Raises:
            InputError, TypeError, ValueError, KeyError: a key or its value is wrong.
        """
        found = dict(fields)
        mode, keeper = PrivacyMode(str(found.pop("mode"))), found.pop("keeper")
        if isinstance(keeper, Mapping):
            # `str` hides a wrong type, but then `Definition.from_bytes` refuses the bytes as not canonical.
            texts = {name: str(text) for name, text in keeper.items()}
            return cls(mode=mode, keeper=Keeper(**texts), **found)  # type: ignore[arg-type]
        return cls(mode=mode, **found)  # type: ignore[arg-type]

    @property
    def noise_multiplier(self) -> float:
        """z, the standard deviation of the noise divided by the clip."""
        return self.noise_hundredths / 100

    def variance(self, clip: int) -> Fraction:
        """Return the exact noise parameter of one integer, `(z C)**2`."""
        return Fraction(self.noise_hundredths * clip, 100) ** 2

    def dp_epsilon(self, participations: int) -> float:
        """Return the epsilon that a device has spent after this many rounds."""
        if participations == 0:
            return 0.0
        return dp_epsilon_of(rho_of(self.noise_multiplier, participations), 10.0**-self.delta_exponent)

    def check_clip(self, clip: int | None) -> None:
        """Check the clip of a definition.

        Raises:
            InputError: there is no clip, or the sums for this clip would be too large for 32 bits.
        """
        if clip is None:
            raise InputError("Privacy needs a clip, because noise can only hide what is bounded. Set clip.")
        if self.noise_hundredths * clip > 100 * LARGEST_DEVIATION:
            most = 100 * LARGEST_DEVIATION // self.noise_hundredths
            raise InputError(f"With this noise, clip must be at most {most}, not {clip}.")
        if self.keeper is not None and clip > LARGEST_KEEPER_CLIP:
            raise InputError(f"In mode keeper, clip must be at most {LARGEST_KEEPER_CLIP}, not {clip}.")
