"""The errors of permille. Their classes say what the caller can do next.

Bugs raise the errors of Python. These are never converted to a `PermilleError`.
"""


class PermilleError(Exception):
    """Base of all errors that a caller is expected to handle."""


class RetryableError(PermilleError):
    """A temporary failure of a network, a lock or a busy server. Try the same call again later.

    Attributes:
        retry_after_s: the seconds after which the other side allows the next call; None: it did not say.
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class PackageError(PermilleError):
    """A package, release or log is invalid. Reject it and keep what you have.

    Attributes:
        code: the stable name of the rule that was broken. `FORMAT.md` lists the codes of the formats.
    """

    def __init__(self, code: str, message: str) -> None:
        # The text contains the code, too, so that logs and pages show it.
        super().__init__(f"{code}: {message}")
        self.code = code


class InputError(PermilleError):
    """The caller's input is wrong. Correct it and call again."""


class OperatorError(PermilleError):
    """The machine or its configuration is at fault, such as a full disk. A person must act."""
