"""Secrets of 128 bits and more: made here, shown once, kept as their sha256 only.

A fast hash is enough: what is hashed is random, not a password.
"""

import hashlib
import secrets

OPERATOR_TOKEN_PREFIX = "pmo_"  # noqa: S105 - tells secret scanners and people what a token is
DEVICE_TOKEN_PREFIX = "pmd_"  # noqa: S105
_TOKEN_BYTES = 32
_CODE_BYTES = 16


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
