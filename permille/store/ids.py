"""Random names: ids of rows, and secrets.

The id of a row is a prefix that names the table, and a ULID: 48 bits of milliseconds and 80 random
bits in lower-case Crockford base 32. Ids therefore sort by their time of creation. Within one
process, each new id sorts after all earlier ones.

A secret has at least 128 random bits. It is shown once, and the database keeps only its SHA-256. A
slow password hash is not needed, since random secrets cannot be guessed from a dictionary.
"""

import hashlib
import secrets
import threading
import time
from enum import StrEnum

OPERATOR_TOKEN_PREFIX = "pmo_"  # noqa: S105 - tells secret scanners and people what a token is
DEVICE_TOKEN_PREFIX = "pmd_"  # noqa: S105
# A token can be tried from anywhere for years, so it has 256 bits. An invitation code is valid for a day at
# most, so 128 bits are enough.
_TOKEN_BYTES = 32
_CODE_BYTES = 16
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_RANDOM_BITS = 80
_STEP_BITS = 64
_ULID_LENGTH = 26


class Prefix(StrEnum):
    """Kind of object that an id names."""

    TENANT = "tenant"
    OPERATOR = "operator"
    MODEL = "model"
    CORPUS = "corpus"
    JOB = "job"
    SPARSIFICATION = "sparse"
    MASK = "mask"
    QUANTIZATION = "quant"
    PACKAGE = "pkg"
    RELEASE = "rel"
    INVITATION = "inv"
    DEVICE = "dev"
    UPLOAD = "upload"
    FEDERATION = "fed"
    GROUP = "group"
    ROLLOUT = "rollout"
    WEBHOOK = "hook"
    DELIVERY = "msg"


class _Clock:
    """A source of numbers that increase even within one millisecond. The parts of a job therefore keep
    their order.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0

    def next(self) -> int:
        fresh = (time.time_ns() // 1_000_000) << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)
        with self._lock:
            # Add a random step, so that an id does not reveal the next id.
            after = self._last + 1 + secrets.randbits(_STEP_BITS)
            self._last = max(fresh, after)
            return self._last


_CLOCK = _Clock()


def new_id(prefix: Prefix) -> str:
    """Return a new id such as `job_01jd3k...`. It sorts after all ids that this process made before.

    Example:
        >>> first, second = new_id(Prefix.JOB), new_id(Prefix.JOB)
        >>> first.startswith("job_") and first < second
        True
    """
    number = _CLOCK.next()
    digits = [_ALPHABET[number >> shift & 31] for shift in range(5 * (_ULID_LENGTH - 1), -1, -5)]
    return f"{prefix}_{''.join(digits)}"


def new_operator_token() -> str:
    """Return a new bearer token of an operator."""
    return OPERATOR_TOKEN_PREFIX + secrets.token_urlsafe(_TOKEN_BYTES)


def new_device_token() -> str:
    """Return a new access token of a device."""
    return DEVICE_TOKEN_PREFIX + secrets.token_urlsafe(_TOKEN_BYTES)


def new_code() -> str:
    """Return a new invitation code or nonce: 128 bits as 22 characters of base64url."""
    return secrets.token_urlsafe(_CODE_BYTES)


def hash_secret(secret: str) -> str:
    """Return the hexadecimal SHA-256 under which a secret is stored.

    Example:
        >>> hash_secret("pmo_example")[:16]
        '9211bcbd50f5d77e'
    """
    return hashlib.sha256(secret.encode()).hexdigest()
