"""Row ids: a prefix that names the table and a ULID, so that ids sort by the time they were made.

A ULID is 48 bits of milliseconds and 80 random bits in Crockford's base 32 (lower case here: 26 characters).
"""

import secrets
import time
from enum import StrEnum

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_RANDOM_BITS = 80
_ULID_LENGTH = 26


class Prefix(StrEnum):
    """What an id names."""

    TENANT = "tenant"
    OPERATOR = "operator"
    MODEL = "model"
    CORPUS = "corpus"
    JOB = "job"
    MASK = "mask"
    QUANTIZATION = "quant"
    PACKAGE = "pkg"
    RELEASE = "rel"
    INVITATION = "inv"
    DEVICE = "dev"


def new_id(prefix: Prefix) -> str:
    """Make a fresh id such as `job_01jd3k...`."""
    number = (time.time_ns() // 1_000_000) << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)
    digits = [_ALPHABET[number >> shift & 31] for shift in range(5 * (_ULID_LENGTH - 1), -1, -5)]
    return f"{prefix}_{''.join(digits)}"
