"""Limits that a child process sets on itself before it reads untrusted data.

They limit memory, processor time, written files and the network. Linux enforces all these limits. Other
systems lack some of them. Where a limit is missing, only the parent's timeout protects the machine.
"""

import ctypes
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from permille.errors import OperatorError

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000  # from linux/sched.h
_PR_SET_PDEATHSIG = 1


def confine(
    *, memory_bytes: int, data_bytes: int | None = None, cpu_s: int | None = None, file_bytes: int = 0
) -> None:
    """Confine this process for the rest of its life.

    Call it before threads start, and before numpy is imported.

    Args:
        memory_bytes: the limit of address space, including mapped files.
        data_bytes: the limit of memory that is not a mapped file. None sets no limit.
        cpu_s: the limit of processor time in seconds. None sets no limit.
        file_bytes: the size of the largest file that this process may write.
    """
    if sys.platform == "win32":
        return
    import resource

    if sys.platform == "linux":
        # If the memory of the machine or container ends, the kernel must end this process and not its parent.
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
    limits = {resource.RLIMIT_FSIZE: file_bytes, resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: 64}
    limits[resource.RLIMIT_AS] = memory_bytes
    if data_bytes is not None:
        limits[resource.RLIMIT_DATA] = data_bytes
    if cpu_s is not None:
        limits[resource.RLIMIT_CPU] = cpu_s
    for limit, most in limits.items():
        # A process may lower its hard limit, but not raise it.
        _, hard = resource.getrlimit(limit)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (most, most))
    if sys.platform == "linux":
        # Enter an empty network namespace. Some systems forbid this to users, and the call then fails. That
        # does no harm, because our own code opens no sockets.
        ctypes.CDLL(None).unshare(_NEW_USER | _NEW_NETWORK)


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies, even during a long call into a library.

    The system takes the parent's thread for the parent. So that thread must wait for this process.

    Raises:
        OperatorError: the system refuses.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
            raise OperatorError(f"prctl cannot set the parent-death signal: errno {ctypes.get_errno()}")


def allow_cpu(seconds: int) -> None:
    """Let the system end this process after `seconds` more seconds of processor time."""
    if sys.platform == "win32":
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(time.process_time()) + seconds
    resource.setrlimit(
        resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard)
    )
