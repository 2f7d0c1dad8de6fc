"""Exit codes of `permille` and `permille-agent`, and the error of a command that ends with one.

`permille` ends with these codes:

0  done
1  the job failed, or something unexpected happened
2  the command line is wrong
3  the input was refused and must be corrected
4  the named object does not exist
5  the service is busy or cannot be reached; try again later
6  no access: the token is missing or wrong, or its role does not suffice
8  the personal model is trained, but could not be written
130  interrupted
"""

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of the process."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    REFUSED = 3
    NOT_FOUND = 4
    RETRY = 5
    ACCESS = 6
    NOT_WRITTEN = 8
    INTERRUPTED = 130


class ExitCode(IntEnum):
    """Exit codes of `permille-agent`, which scripts may rely on."""

    OK = 0
    BUG = 1  # as Python exits after an uncaught exception
    USAGE = 2  # as typer exits after wrong arguments
    INPUT_REFUSED = 3
    PACKAGE_REFUSED = 4
    TRY_LATER = 5
    OPERATOR = 6
    KEPT_BASE = 7
    INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class CommandError(Exception):
    """Failure of a command, with a message, an exit code, and the problem in the service's answer, if any."""

    def __init__(self, message: str, code: Exit, problem: dict[str, object] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.problem = problem
