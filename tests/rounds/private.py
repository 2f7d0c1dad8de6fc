"""Small federations with a promise of privacy, and their keeper."""

import base64
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from permille_rounds.contribution import Contribution
from permille_rounds.definition import Definition
from permille_rounds.masked import Masked, decode_masked, encode_masked
from permille_rounds.privacy.rules import Keeper, Privacy, PrivacyMode
from permille_rounds.private_rounds import vector_of
from permille_rounds.rounds import History
from tests.rounds.federations import make_definition

KEEPER_KEY = X25519PrivateKey.from_private_bytes(bytes(range(32)))
KEEPER = Keeper(
    key=base64.urlsafe_b64encode(KEEPER_KEY.public_key().public_bytes_raw()).decode().rstrip("="),
    url="http://127.0.0.1:1",
)


def make_private(*, mode: PrivacyMode = PrivacyMode.CENTRAL, **changes: Any) -> Definition:
    """Return a federation with a clip of 1000, noise of four times the clip, and three rounds per device."""
    keeper = KEEPER if mode is PrivacyMode.KEEPER else None
    record: dict[str, Any] = {"noise_hundredths": 400, "participations": 3, "delta_exponent": 6}
    record["keeper"] = keeper
    record |= changes.pop("privacy", {})
    fields: dict[str, Any] = {"clip": 1000, "minimum": 32 if keeper else 1} | changes
    return make_definition(privacy=Privacy(mode=mode, **record), **fields)


def device_key(index: int) -> Ed25519PrivateKey:
    """Return the key of a device."""
    return Ed25519PrivateKey.from_private_bytes(index.to_bytes(32, "little"))


def make_masked(history: History, contributions: list[Contribution]) -> tuple[list[Masked], int]:
    """Return the devices' masked messages, encoded and decoded, and the size of a message in bytes."""
    rules = history.definition
    made, size = [], 0
    for index, each in enumerate(contributions):
        key = device_key(index)
        data = encode_masked(rules, history.number, history.digest, vector_of(each), key)
        made.append(decode_masked(data, rules, key.public_key()))
        size = len(data)
    return made, size


def norm_squared(vector_V: np.ndarray) -> int:
    """Return the squared norm in unlimited integers."""
    return sum(c * c for c in vector_V.tolist())
