"""Calls that only some systems have: locks, modes and positions of files, owners, and used memory.

Library and agent call these functions instead of modules such as `fcntl`, so they can be imported anywhere.
Without such a call, most of these functions do nothing. `lock_file` refuses, because data could be lost.
"""

import os
import re
import sys
import threading
from pathlib import Path

from permille.errors import OperatorError

_STATUS = Path("/proc/self/status")
_SEEKING = threading.Lock()


def lock_file(descriptor: int, *, shared: bool = False, wait: bool = True) -> None:
    """Lock an open file against other processes, until it is closed.

    Args:
        descriptor: the file.
        shared: admit others with a shared lock.
        wait: wait for others that hold a lock.

    Raises:
        BlockingIOError: another process holds a lock, and `wait` is false.
        OperatorError: the system has no such locks.
    """
    try:
        import fcntl
    except ImportError as exc:
        raise OperatorError("This system cannot lock files (no fcntl). On Windows, use WSL.") from exc
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)


def set_mode(descriptor: int, mode: int) -> None:
    """Set the permissions of an open file."""
    if hasattr(os, "fchmod"):
        os.fchmod(descriptor, mode)


def read_at(descriptor: int, size_bytes: int, offset: int) -> bytes:
    """Read bytes of an open file from an offset. At the end of the file, there may be fewer."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, size_bytes, offset)
    with _SEEKING:  # threads share the position of the file
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, size_bytes)


def user_id() -> int | None:
    """Return the number of the user of this process, or None if the system has no numbers."""
    return os.getuid() if hasattr(os, "getuid") else None


def peak_rss_bytes() -> int:
    """Return the peak resident memory of this process, or 0 if the system does not tell."""
    # On Linux, `ru_maxrss` includes the peak of the program that started this one.
    found = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text()) if _STATUS.exists() else None
    if found is not None:
        return int(found[1]) * 1024
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
