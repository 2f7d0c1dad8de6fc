"""A version in the signed list, without types of TUF, so that workers can compare it with the rows of
releases.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A listed version: the digest of its package, and the aliases under which devices may install it."""

    digest: str
    aliases: frozenset[str]
