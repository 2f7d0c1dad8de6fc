"""Random names: row ids, and secrets.

A row's id is a prefix that names the table and a ULID (48 bits of milliseconds, 80 random bits, Crockford's
base 32 in lower case), so that ids sort by the time they were made, those of one process strictly. Secrets
have 128 bits and more; they are made here, shown once, and kept as their sha256 only. A fast hash is enough:
what is hashed is random, not a password.
"""

import hashlib
import secrets
import threading
import time
from enum import StrEnum

OPERATOR_TOKEN_PREFIX = "pmo_"  # noqa: S105 - tells secret scanners and people what a token is
DEVICE_TOKEN_PREFIX = "pmd_"  # noqa: S105
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
    """Numbers that grow also within a millisecond: parts of a job that are made at once keep their order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0

    def next(self) -> int:
        fresh = (time.time_ns() // 1_000_000) << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)
        with self._lock:
            after = self._last + 1 + secrets.randbits(_STEP_BITS)
            self._last = max(fresh, after)
            return self._last


_CLOCK = _Clock()


def new_id(prefix: Prefix) -> str:
    """Make a fresh id such as `job_01jd3k...`, above all ids that this process made before."""
    number = _CLOCK.next()
    digits = [_ALPHABET[number >> shift & 31] for shift in range(5 * (_ULID_LENGTH - 1), -1, -5)]
    return f"{prefix}_{''.join(digits)}"


def new_operator_token() -> str:
    """Make an operator's bearer token."""
    return OPERATOR_TOKEN_PREFIX + secrets.token_urlsafe(_TOKEN_BYTES)


def new_device_token() -> str:
    """Make a device's access token."""
    return DEVICE_TOKEN_PREFIX + secrets.token_urlsafe(_TOKEN_BYTES)


def new_code() -> str:
    """Make an invitation's code or a nonce: 128 bits, 22 characters of base64url."""
    return secrets.token_urlsafe(_CODE_BYTES)


def hash_secret(secret: str) -> str:
    """The sha256 hex under which a secret is looked up."""
    return hashlib.sha256(secret.encode()).hexdigest()
