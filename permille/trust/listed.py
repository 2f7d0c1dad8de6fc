"""A team's list, in a form that needs no TUF: workers compare it with the rows of releases."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A version that is listed: its package's digest, and the aliases under which devices may take it."""

    digest: str
    aliases: frozenset[str]
