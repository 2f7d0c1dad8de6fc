"""The journal: the device's append-only log, one framed and checksummed record a step (FORMAT 8).

A record is durable when `append` returns (or after `fsync_every` of them). Opening recovers: what a crash
left of an unfinished record is cut off, so the journal holds exactly the whole records. Damage before a whole
record is no crash and is refused. One writer at a time, by a lock on the file that dies with its process.
"""

import fcntl
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from permille.errors import InputError, OperatorError, PackageError, RetryableError
from permille.files import write_atomic
from permille.zo.records import (
    MAX_HEADER_BYTES,
    MAX_QUERIES,
    LogHeader,
    StepFlag,
    StepRecord,
    check_record,
    check_weight,
    weight_of,
)
from permille.zo.varints import MAX_BYTES, decode_varints, encode_varints, unzigzag, zigzag

MAGIC = b"PMLJNL1\n"

_HEAD = struct.Struct("<8sI")
_SIZE = struct.Struct("<H")
_FIXED = struct.Struct("<IBd")
_CRC = struct.Struct("<I")
_MAX_PAYLOAD = _FIXED.size + MAX_QUERIES * MAX_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalContents:
    """What a journal file holds: its header, its whole records, and where the last one ends."""

    header: LogHeader
    records: tuple[StepRecord, ...]
    end: int
    torn_bytes: int


def read_journal(path: Path) -> JournalContents:
    """Read a journal without locking or changing it; a torn tail is counted, not returned.

    Raises:
        PackageError: `journal-header` (no whole header) or `journal-corrupt` (damage before a whole record).
    """
    return _parse(path.read_bytes(), path)


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
        self._seed = zlib.crc32(self.header.to_bytes())
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
        header_bytes = header.to_bytes()
        write_atomic(
            path,
            _HEAD.pack(MAGIC, len(header_bytes)) + header_bytes + _CRC.pack(zlib.crc32(header_bytes)),
            mode=0o600,
        )
        return cls.open(path, fsync_every=fsync_every)

    @classmethod
    def open(cls, path: Path, *, fsync_every: int = 1) -> Self:
        """Open for appending, after cutting a torn tail (`torn_bytes` says how much).

        Raises:
            RetryableError: another process writes this journal.
            PackageError: `journal-header` or `journal-corrupt`.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            _lock(descriptor, path)
            contents = _parse(path.read_bytes(), path)
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
        frame = _frame(record, self._seed)
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


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _frame(record: StepRecord, seed: int) -> bytes:
    coefficients = np.array(record.coefficients, dtype=np.int64)
    payload = _FIXED.pack(record.step, int(record.flags), record.loss) + encode_varints(zigzag(coefficients))
    sized = _SIZE.pack(len(payload)) + payload
    return sized + _CRC.pack(zlib.crc32(sized, seed))


def _parse(data: bytes, path: Path) -> JournalContents:
    header, position = _parse_header(data, path)
    seed = zlib.crc32(header.to_bytes())
    records: list[StepRecord] = []
    while True:
        found = _parse_frame(data, position, header, seed, len(records))
        if found is None:
            break
        record, position = found
        records.append(record)
    if any(
        _parse_frame(data, offset, header, seed, None) is not None
        for offset in range(position + 1, len(data))
    ):
        raise PackageError(
            "journal-corrupt",
            f"expected record {len(records)} at byte {position} of {path}, got damage before others",
        )
    return JournalContents(
        header=header, records=tuple(records), end=position, torn_bytes=len(data) - position
    )


def _parse_header(data: bytes, path: Path) -> tuple[LogHeader, int]:
    torn = PackageError("journal-header", f"expected a whole journal header in {path}, got {len(data)} bytes")
    if len(data) < _HEAD.size:
        raise torn
    magic, size = _HEAD.unpack_from(data)
    if magic != MAGIC or size > MAX_HEADER_BYTES:
        raise PackageError("journal-header", f"expected the magic {MAGIC!r} in {path}, got {magic!r}")
    end = _HEAD.size + size
    if len(data) < end + _CRC.size:
        raise torn
    header_bytes = data[_HEAD.size : end]
    if _CRC.unpack_from(data, end)[0] != zlib.crc32(header_bytes):
        raise PackageError("journal-header", f"expected the checksum of the header of {path}, got another")
    return LogHeader.from_bytes(header_bytes), end + _CRC.size


def _parse_frame(
    data: bytes, position: int, header: LogHeader, seed: int, step: int | None
) -> tuple[StepRecord, int] | None:
    """The whole record at `position` and where it ends, or None; with `step` None any step number will do."""
    if position + _SIZE.size > len(data):
        return None
    (size,) = _SIZE.unpack_from(data, position)
    end = position + _SIZE.size + size
    if not _FIXED.size < size <= _MAX_PAYLOAD or end + _CRC.size > len(data):
        return None
    if _CRC.unpack_from(data, end)[0] != zlib.crc32(data[position:end], seed):
        return None
    number, flags, loss = _FIXED.unpack_from(data, position + _SIZE.size)
    coefficients = unzigzag(decode_varints(data[position + _SIZE.size + _FIXED.size : end]))
    record = StepRecord(
        step=number, coefficients=tuple(coefficients.tolist()), loss=loss, flags=StepFlag(flags)
    )
    check_record(record, header, expected_step=number if step is None else step)
    return record, end + _CRC.size
