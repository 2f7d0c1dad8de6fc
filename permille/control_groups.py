"""The control groups of this process, by which containers and services are limited (Linux)."""

import math
from collections.abc import Iterator
from pathlib import Path

# Control groups of version 2 are folders here. Those of version 1 are folders in `memory`, for example.
_CGROUP = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


def group_folders(controller: str) -> Iterator[Path]:
    """Yield the folders of the groups of this process, from its own group to the root.

    A container may see the path of its group on the host, although its own group is mounted as the root. So
    some of these folders do not exist.

    Args:
        controller: the controller of version 1, such as `memory` or `cpu`.
    """
    for hierarchy in read(_OWN_GROUPS).splitlines():
        _, controllers, path = hierarchy.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            own = _CGROUP / controllers / path.strip("/")
            yield own
            yield from (folder for folder in own.parents if folder.is_relative_to(_CGROUP / controllers))


def processor_limit() -> int | None:
    """Return the number of processors whose time the groups allow, rounded up, or None without a limit.

    A process sees all processors of its machine nevertheless. With a thread for each of them, it would be
    stopped for most of each period.
    """
    limits = [limit for folder in group_folders("cpu") if (limit := _limit_of(folder)) is not None]
    return min(limits, default=None)


def read(path: Path) -> str:
    """Return the text of a file of the kernel, or "" without a file."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")  # as Python encodes paths
    except OSError:
        return ""


def _limit_of(folder: Path) -> int | None:
    # Version 2 has `QUOTA PERIOD`, and version 1 a file for each. Without a limit, the quota is `max` or -1.
    files = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")
    quota, period, *_ = [*" ".join(read(folder / name) for name in files).split(), "max", "max"]
    if not (quota.isdecimal() and period.isdecimal() and int(period)):
        return None
    return max(1, math.ceil(int(quota) / int(period)))
