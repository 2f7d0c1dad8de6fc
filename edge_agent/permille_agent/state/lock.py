"""The one lock of the agent: whoever writes into the home folder holds it, so `run` and `train` never clash.

The operating system releases it when the holder dies, however it dies. A note beside it says who holds it;
the note is for the message only, never for the decision. Within one thread the lock may be taken again (a
command that calls another).
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
    """Holder of a lock, from the note beside it."""

    pid: int
    purpose: str
    since: str


class LockedError(RetryableError):
    """Another process of the agent is writing."""


@contextmanager
def hold_lock(home: Home, purpose: str, *, wait_s: float = 0.0, of: Path | None = None) -> Iterator[None]:
    """Hold the writers' lock, as `permille-agent <purpose>`.

        with hold_lock(home, "train"):
            run_training(home, [Path("notes")], TrainOptions(minutes=20))

    Args:
        wait_s: how long to wait for another process.
        of: another lock of the home folder. `daemon_lock` makes one daemon a folder; `rounds_lock` is for
            exchanging rounds with the service, which no training keeps waiting.

    Raises:
        LockedError: another process holds it after `wait_s`; the message says which.
        OperatorError: the lock file cannot be made.
    """
    path = home.lock if of is None else of
    lock = _lock(path)
    try:
        lock.acquire(timeout=wait_s)
    except Timeout as exc:
        raise LockedError(
            f"Another command works on this: {_holder(path)} holds {path.name}. Try again when it has ended."
        ) from exc
    except OSError as exc:
        raise OperatorError(f"Cannot write the lock file {path}: {exc}") from exc
    try:
        if lock.lock_counter == 1:
            since = datetime.now(UTC).isoformat(timespec="seconds")
            with suppress(OperatorError):  # a full disk: the note is for the message only
                write_record(_note(path), Holder(pid=os.getpid(), purpose=purpose, since=since))
        yield
    finally:
        if lock.lock_counter == 1:
            _note(path).unlink(missing_ok=True)
        lock.release()


def _lock(path: Path) -> FileLock:
    # Thread-local: a program's two threads are two writers, only one of them may work.
    return FileLock(path, mode=0o600, thread_local=True, is_singleton=True, fallback_to_soft=False)


def lock_holder(home: Home) -> Holder | None:
    """Say which other process holds the writers' lock; None where it is free or the holder left no note."""
    lock = _lock(home.lock)
    try:
        lock.acquire(timeout=0.0)
    except Timeout:
        return _read_note(home.lock)
    lock.release()  # at once and without a note: a writer that begins now must find it free
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
