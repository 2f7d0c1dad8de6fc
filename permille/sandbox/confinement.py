"""Limits that a child process sets on itself before it reads foreign data.

They limit memory, time, written files and the network.

Linux holds all of it. Elsewhere what the system does not know is left out, and the parent's time limit stays.
"""

import sys
import time

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000  # of linux/sched.h


def confine(*, memory_bytes: int, cpu_s: int | None = None, file_bytes: int = 0) -> None:
    """Confine this process for the rest of its life. Call it before threads start, so before numpy.

    Args:
        memory_bytes: address space, mapped files included.
        file_bytes: the largest file that it may write.
        cpu_s: seconds of processor time, after which the system kills it; None leaves that to the parent.
    """
    if sys.platform == "win32":
        return
    import resource

    limits = {resource.RLIMIT_FSIZE: file_bytes, resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: 64}
    limits[resource.RLIMIT_AS] = memory_bytes
    if cpu_s is not None:
        limits[resource.RLIMIT_CPU] = cpu_s
    for limit, most in limits.items():
        _, hard = resource.getrlimit(limit)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (most, most))
    if sys.platform == "linux":
        _leave_network()


def allow_cpu(seconds: int) -> None:
    """Let the system end this process after so many more seconds of processor time."""
    if sys.platform == "win32":
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(time.process_time()) + seconds
    resource.setrlimit(
        resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard)
    )


def _leave_network() -> None:
    """Enter an empty network; where the system forbids it to users, code that opens no sockets must do."""
    import ctypes

    ctypes.CDLL(None).unshare(_NEW_USER | _NEW_NETWORK)
