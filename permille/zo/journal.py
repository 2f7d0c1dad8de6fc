"""The journal: the device's append-only log, one framed and checksummed record a step (FORMAT 8).

A record is durable when `append` returns (or after `fsync_every` of them). Opening recovers: what a crash
left of an unfinished record is cut off, so the journal holds exactly the whole records. Damage before a whole
record is no crash and is refused. One writer at a time, by a lock on the file that dies with its process.
"""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from permille.errors import InputError, OperatorError, RetryableError
from permille.files import write_atomic
from permille.zo.frames import JournalContents, encode_frame, encode_header, frame_seed, parse_journal
from permille.zo.header import LogHeader
from permille.zo.records import StepRecord, check_record, check_weight, weight_of


def read_journal(path: Path) -> JournalContents:
    """Read a journal without locking or changing it, its torn tail counted but left out.

    Raises:
        InputError: there is no such file.
        PackageError: `journal-header` or `journal-corrupt`.
    """
    try:
        return parse_journal(path.read_bytes(), path)
    except FileNotFoundError as exc:
        raise InputError(f"expected a journal at {path}, got no file") from exc


class Journal:
    """An open journal, its only writer. Use `create` or `open`; close it, or use it as a context."""

    def __init__(self, descriptor: int, path: Path, contents: JournalContents, fsync_every: int) -> None:
        self.header = contents.header
        self.path = path
        self.torn_bytes = contents.torn_bytes
        self._descriptor = descriptor
        self._records = list(contents.records)
        self._end = contents.end
        self._weight = sum(weight_of(record, self.header) for record in self._records)
        self._seed = frame_seed(self.header)
        self._fsync_every = fsync_every
        self._unsynced = 0
        self._broken = False

    @classmethod
    def create(cls, path: Path, header: LogHeader, *, fsync_every: int = 1) -> Self:
        """Start a journal at `path`; the file appears whole or not at all.

        Raises:
            InputError: `path` exists.
        """
        if path.exists():
            raise InputError(f"expected no file at {path}, got one: a journal is never overwritten")
        write_atomic(path, encode_header(header), mode=0o600)
        return cls.open(path, fsync_every=fsync_every)

    @classmethod
    def open(cls, path: Path, *, fsync_every: int = 1) -> Self:
        """Open for appending, after cutting a torn tail (`torn_bytes` says how much).

        Raises:
            InputError: there is no such file.
            RetryableError: another process writes this journal.
            PackageError: `journal-header` or `journal-corrupt`.
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError as exc:
            raise InputError(f"expected a journal at {path}, got no file") from exc
        try:
            _lock(descriptor, path)
            contents = parse_journal(_read_all(descriptor), path)
            if contents.torn_bytes:
                os.ftruncate(descriptor, contents.end)
                os.fsync(descriptor)
            return cls(descriptor, path, contents, fsync_every)
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def next_step(self) -> int:
        """Number of the step that the next record must have."""
        return len(self._records)

    def records(self) -> Iterator[StepRecord]:
        """All records, the first step first."""
        return iter(tuple(self._records))

    def append(self, record: StepRecord) -> None:
        """Write one record; durable on return with `fsync_every=1`.

        Raises:
            InputError: the record does not continue this journal.
            OperatorError: the disk refused; the journal then ends at its last whole record and takes no more.
        """
        if self._broken:
            raise OperatorError(
                f"expected a journal that can be written, got an earlier failure of {self.path}"
            )
        check_record(record, self.header, expected_step=self.next_step)
        weight = self._weight + weight_of(record, self.header)
        check_weight(weight)
        frame = encode_frame(record, self._seed)
        try:
            _write_all(self._descriptor, frame, self._end)
            self._unsynced += 1
            if self._unsynced >= self._fsync_every:
                self.sync()
        except OSError as exc:
            self._broken = True
            raise OperatorError(f"expected to append step {record.step} to {self.path}, got {exc}") from exc
        self._end += len(frame)
        self._weight = weight
        self._records.append(record)

    def sync(self) -> None:
        """Make every appended record durable."""
        os.fsync(self._descriptor)
        self._unsynced = 0

    def close(self) -> None:
        """Sync and release the lock. Closing twice is allowed."""
        if self._descriptor < 0:
            return
        descriptor, self._descriptor = self._descriptor, -1
        try:
            if self._unsynced and not self._broken:
                os.fsync(descriptor)
        finally:
            self._broken = True
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        raise RetryableError(f"expected to be the only writer of {path}, got another one") from exc


def _read_all(descriptor: int) -> bytes:
    with os.fdopen(os.dup(descriptor), "rb") as file:
        return file.read()


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
