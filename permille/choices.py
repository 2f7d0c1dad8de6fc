"""Closed sets of names: a text that callers hand in becomes a member of its enum, or is refused."""

from enum import StrEnum
from typing import TypeVar

from permille.errors import InputError

Choice = TypeVar("Choice", bound=StrEnum)


def choice_of(kind: type[Choice], name: str, what: str) -> Choice:
    """The member of `kind` that `name` stands for.

    Without it a typo would be compared with `is`, and silently taken for whatever comes last.

    Raises:
        InputError: there is no such member; the message lists those that are.
    """
    try:
        return kind(name)
    except ValueError:
        raise InputError(f"expected {what} of {', '.join(kind)}; got {name!r:.200}") from None
