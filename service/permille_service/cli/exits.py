"""Exit codes of `permille`, for scripts.

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


def exit_of_status(status: int) -> Exit:
    """Return the exit code for an HTTP error status.

    Example:
        >>> exit_of_status(404)
        <Exit.NOT_FOUND: 4>
    """
    if status in (401, 403):
        return Exit.ACCESS
    if status in (404, 410):
        return Exit.NOT_FOUND
    if status in (429, 502, 503, 504):
        return Exit.RETRY
    return Exit.FAILED if status >= 500 else Exit.REFUSED


class CommandError(Exception):
    """Failure of a command, with a message, an exit code, and the problem in the service's answer, if any."""

    def __init__(self, message: str, code: Exit, problem: dict[str, object] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.problem = problem
