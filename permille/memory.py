"""Memory that a process can still use: the system's, and what its control group leaves (Linux)."""

import ctypes
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int | None:
    """Bytes that a new process could use: the smaller of the system's and the control group's. None if
    unknown.
    """
    found = [amount for amount in (_system_memory(), _group_memory()) if amount is not None]
    return min(found) if found else None


def give_back() -> None:
    """Return what was freed to the system, which glibc keeps in pieces; elsewhere do nothing."""
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
    return int(available[0]) * 1024 if available else None


def _group_memory() -> int | None:
    try:
        limit = (_CGROUP / "memory.max").read_text(encoding="ascii").strip()
        used = (_CGROUP / "memory.current").read_text(encoding="ascii").strip()
    except OSError:
        return None
    return max(0, int(limit) - int(used)) if limit.isdecimal() else None
