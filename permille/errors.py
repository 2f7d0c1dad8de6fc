"""The errors of the whole product, split by what the caller does next.

Every message holds what was expected and what came. Nothing here is raised for a bug: bugs raise what Python
raises.
"""


class PermilleError(Exception):
    """Base of all errors that a caller is expected to handle."""


class RetryableError(PermilleError):
    """The same call may succeed later: a network, a lock, a server that is busy."""


class PackageError(PermilleError):
    """The package, release or log is not what it claims to be: reject it and keep what you have.

    Attributes:
        code: stable kebab-case name of the rule that was broken, listed in `FORMAT.md`.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class InputError(PermilleError):
    """The caller's own input is wrong: fix it and call again."""


class OperatorError(PermilleError):
    """The machine or its configuration is at fault (disk, memory, permissions): a person must act."""
