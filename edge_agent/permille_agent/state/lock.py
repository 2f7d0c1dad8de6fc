"""The lock of the home folder. Each writer holds it, so that `run` and `train` do not write at the same time.

The operating system releases the lock when its holder dies. A note beside the lock file names the holder, for
error messages. A thread that holds the lock may take it again, for example in a command that calls another
command.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from permille.errors import OperatorError, RetryableError
from permille_agent.state.home import Home, read_record, write_record


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Contents of the note that names the holder of a lock."""

    pid: int
    purpose: str
    since: str


class LockedError(RetryableError):
    """Another process of the agent holds the lock."""


@contextmanager
def hold_lock(home: Home, purpose: str, *, wait_s: float = 0.0, of: Path | None = None) -> Iterator[None]:
    """Hold the writers' lock. For example:

        with hold_lock(home, "train"):
            run_training(home, [Path("notes")], TrainOptions(minutes=20))

    Args:
        home: the home folder.
        purpose: name of the command, for messages of other processes.
        wait_s: seconds to wait for another process.
        of: path of another lock to hold instead. `daemon_lock` allows one daemon per folder. `rounds_lock` is
            for exchanges of rounds, which must not wait for a training.

    Raises:
        LockedError: another process still holds the lock. The message names it.
        OperatorError: the lock file cannot be created.
    """
    path = home.lock if of is None else of
    lock = _lock(path)
    try:
        lock.acquire(timeout=wait_s)
    except Timeout as exc:
        raise LockedError(
            f"Another command is running: {_holder(path)} holds {path.name}. Try again when it has ended."
        ) from exc
    except OSError as exc:
        raise OperatorError(f"Cannot write the lock file {path}: {exc}") from exc
    try:
        if lock.lock_counter == 1:
            since = datetime.now(UTC).isoformat(timespec="seconds")
            with suppress(OperatorError):  # on a full disk, the lock works without its note
                write_record(_note(path), Holder(pid=os.getpid(), purpose=purpose, since=since))
        yield
    finally:
        if lock.lock_counter == 1:
            _note(path).unlink(missing_ok=True)
        lock.release()


def _lock(path: Path) -> FileLock:
    # The lock is thread-local, because two threads of a program are two writers.
    return FileLock(path, mode=0o600, thread_local=True, is_singleton=True, fallback_to_soft=False)


def lock_holder(home: Home) -> Holder | None:
    """Return the holder of the writers' lock, or None if the lock is free or has no note."""
    lock = _lock(home.lock)
    try:
        lock.acquire(timeout=0.0)
    except Timeout:
        return _read_note(home.lock)
    except OSError:  # of a read-only disk, where nobody writes
        return None
    lock.release()  # at once, because another writer may start now
    return None


def _note(path: Path) -> Path:
    return path.with_name(path.name + ".holder")


def _holder(path: Path) -> str:
    if (note := _read_note(path)) is None:
        return "another process"
    return f"`permille-agent {note.purpose}` (process {note.pid}, since {note.since})"


def _read_note(path: Path) -> Holder | None:
    try:
        return read_record(_note(path), Holder)
    except OperatorError:
        return None
