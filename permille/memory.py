"""Memory that a process can still use, as the system and the control group report it (Linux)."""

import ctypes
from pathlib import Path

# Version 2 of control groups. In a container, this is the container's own group.
_CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int | None:
    """Return the bytes that a new process could use, or None if unknown.

    The result is the smaller of two numbers: the memory that the system has left, and the memory that the
    control group has left.
    """
    found = [amount for amount in (_system_memory(), _group_memory()) if amount is not None]
    return min(found) if found else None


def give_back() -> None:
    """Return freed memory, which glibc would keep, to the system. Without glibc, do nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _system_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    available = fields.get("MemAvailable", "").split()
    # The file counts in KiB.
    return int(available[0]) * 1024 if available else None


def _group_memory() -> int | None:
    try:
        limit = (_CGROUP / "memory.max").read_text(encoding="ascii").strip()
        used = (_CGROUP / "memory.current").read_text(encoding="ascii").strip()
    except OSError:
        return None
    # Without a limit, the file says "max".
    return max(0, int(limit) - int(used)) if limit.isdecimal() else None
