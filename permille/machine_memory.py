"""Memory that a process can still use, as the system and its control groups report it (Linux)."""

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

from permille.control_groups import group_folders, read


def available_memory() -> int | None:
    """Return the bytes that a new process could use, or None if unknown.

    The result is the smallest of these numbers: the memory that the system has left, and the memory that each
    control group above this process has left.
    """
    system = _system_memory()
    return min([*_group_memory(), *([] if system is None else [system])], default=None)


def give_back() -> None:
    """Return freed memory, which glibc would keep, to the system. Without glibc, do nothing."""
    trim = None if sys.platform == "win32" else getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _system_memory() -> int | None:
    fields = dict(line.split(":", 1) for line in read(Path("/proc/meminfo")).splitlines() if ":" in line)
    available = fields.get("MemAvailable", "").split()
    # The file counts in KiB.
    return int(available[0]) * 1024 if available else None


def _group_memory() -> Iterator[int]:
    """Yield what each group with a limit has left: the group of this process, and all groups above it."""
    for folder in group_folders("memory"):
        # The first two names of each pair are those of version 2. A group may lack `memory.high`.
        limits = [_number(folder / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
        limit = min((limit for limit in limits if limit is not None), default=None)
        if limit is not None and used is not None:
            yield max(0, limit - max(0, used - _reclaimable(folder)))


def _reclaimable(folder: Path) -> int:
    """Return the bytes of the page cache that the kernel frees first, as the kubelet counts them."""
    fields = dict(line.split(" ", 1) for line in read(folder / "memory.stat").splitlines())
    # In version 1, the counts without `total_` exclude the groups below this one.
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))


def _number(path: Path) -> int | None:
    """Return the number in a file, or None without a file. Without a limit, the file says "max"."""
    text = read(path).strip()
    return int(text) if text.isdecimal() else None
