"""A memory limit for a child process, page cache included: control groups of Linux, version 1 or 2.

Needs root, or systemd that grants scopes; where neither is there, `limited` says so. There is no swap for the
child: what it maps must be dropped and read again, what it allocates must fit.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from permille.errors import OperatorError

ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Limited:
    """How to start the child: a function to call in it, or a command to give its command to."""

    before: Callable[[], None] | None
    prefix: list[str]
    how: str


@contextmanager
def limited(limit_bytes: int | None) -> Iterator[Limited]:
    """A group with this limit, removed at the end; None sets no limit.

    Raises:
        OperatorError: this machine lets us limit nothing.
    """
    if limit_bytes is None:
        yield Limited(None, [], "no limit")
        return
    name = f"permille-bench-{os.getpid()}"
    if _writable(ROOT / "memory"):
        group = ROOT / "memory" / name
        with _group(
            group, {"memory.limit_in_bytes": limit_bytes, "memory.memsw.limit_in_bytes": limit_bytes}
        ):
            yield Limited(_joiner(group), [], "cgroup v1")
    elif _writable(ROOT) and "memory" in _words(ROOT / "cgroup.subtree_control"):
        group = ROOT / name
        with _group(group, {"memory.max": limit_bytes, "memory.swap.max": 0}):
            yield Limited(_joiner(group), [], "cgroup v2")
    elif shutil.which("systemd-run"):
        options = [f"MemoryMax={limit_bytes}", "MemorySwapMax=0"]
        user = [] if os.geteuid() == 0 else ["--user"]
        prefix = ["systemd-run", *user, "--scope", "--quiet", *(f"--property={option}" for option in options)]
        yield Limited(None, prefix, "systemd scope")
    else:
        raise OperatorError("expected a writable memory cgroup or systemd-run, found neither: run as root")


def drop_from_page_cache(path: Path) -> None:
    """Ask the kernel to forget a file's pages: a group is charged only for what it reads itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


@contextmanager
def _group(group: Path, limits: dict[str, int]) -> Iterator[None]:
    group.mkdir()
    try:
        for file, value in limits.items():
            # Swap is accounted only where the kernel has it; without any swap there is nothing to limit.
            if (group / file).exists():
                (group / file).write_text(str(value))
        yield
    finally:
        group.rmdir()


def _joiner(group: Path) -> Callable[[], None]:
    def join() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    return join


def _writable(folder: Path) -> bool:
    return (folder / "cgroup.procs").exists() and os.access(folder, os.W_OK)


def _words(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []
