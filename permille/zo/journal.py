"""The journal: the append-only log of a device, with one checksummed entry for each step (FORMAT 8).

    with Journal.create(path, header) as journal:
        journal.append(record)      # durable on return

Opening a journal recovers it: the unfinished record of a crash is cut off. If a whole record follows a
damaged one, the damage cannot come from a crash, and the journal is refused. A lock on the file admits one
writer at a time. The operating system releases the lock when the process ends.
"""

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
from permille.system import lock_file
from permille.zo.header import MAX_GROUPS, MAX_HEADER_BYTES, LogHeader
from permille.zo.records import StepFlag, StepRecord, check_record, check_weight, weight_of
from permille.zo.varints import MAX_BYTES, decode_varints, encode_varints, unzigzag, zigzag

MAGIC = b"PMLJNL1\n"

# FORMAT 8.3: magic and header size; payload size; step, flags and loss; checksum.
_HEAD = struct.Struct("<8sI")
_SIZE = struct.Struct("<H")
_FIXED = struct.Struct("<IBd")
_CRC = struct.Struct("<I")
_MAX_PAYLOAD = _FIXED.size + MAX_GROUPS * MAX_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalContents:
    """Contents of a journal file.

    Attributes:
        records: the whole records.
        end: the offset of the first byte after the last whole record.
        torn_bytes: the number of bytes from `end` on, which are an unfinished record.
    """

    header: LogHeader
    records: tuple[StepRecord, ...]
    end: int
    torn_bytes: int


def read_journal(path: Path) -> JournalContents:
    """Read a journal without locking or changing it. `torn_bytes` is the size of an unfinished last record.

    Raises:
        InputError: the file does not exist.
        PackageError: `journal-header` or `journal-corrupt`.
    """
    try:
        return parse_journal(path.read_bytes(), path)
    except FileNotFoundError as exc:
        raise InputError(f"There is no journal at {path}.") from exc


class Journal:
    """An open journal and its only writer. Use `create` or `open`. Close it, or use it in `with`."""

    def __init__(self, descriptor: int, path: Path, contents: JournalContents) -> None:
        self.header = contents.header
        self.path = path
        self.torn_bytes = contents.torn_bytes
        self._descriptor = descriptor
        self._records = list(contents.records)
        self._end = contents.end
        self._weight = sum(weight_of(record, self.header) for record in self._records)
        self._seed = _entry_seed(self.header)
        self._broken = False

    @classmethod
    def create(cls, path: Path, header: LogHeader) -> Self:
        """Start a journal at `path`. The file appears as a whole or not at all.

        Raises:
            InputError: `path` exists.
        """
        if path.exists():
            raise InputError(f"{path} exists, and a journal is never overwritten.")
        # The losses of the steps say something about the user's text, so only the owner may read the file.
        write_atomic(path, encode_header(header), mode=0o600)
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a journal for appending, after cutting off an unfinished record (`torn_bytes`).

        Raises:
            InputError: the file does not exist.
            RetryableError: another process writes this journal.
            PackageError: `journal-header` or `journal-corrupt`.
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError as exc:
            raise InputError(f"There is no journal at {path}.") from exc
        try:
            # Lock before cutting, because another process could be in the middle of its record.
            _lock(descriptor, path)
            contents = parse_journal(_read_all(descriptor), path)
            if contents.torn_bytes:
                os.ftruncate(descriptor, contents.end)
                os.fsync(descriptor)
            return cls(descriptor, path, contents)
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def next_step(self) -> int:
        """Return the number of the step that the next record must have."""
        return len(self._records)

    def records(self) -> Iterator[StepRecord]:
        """Yield all records, the first step first."""
        return iter(tuple(self._records))

    def append(self, record: StepRecord) -> None:
        """Write one record. It is durable on return.

        Raises:
            InputError: the record does not continue this journal.
            OperatorError: writing failed. Later calls fail, too. Opening the journal again cuts off the
                unfinished record.
        """
        if self._broken:
            raise OperatorError(f"{self.path} is closed, or could not be written before. Open it again.")
        check_record(record, self.header, expected_step=self.next_step)
        weight = self._weight + weight_of(record, self.header)
        check_weight(weight)
        entry = _encode_entry(record, self._seed)
        try:
            _write_all(self._descriptor, entry, self._end)
            os.fsync(self._descriptor)
        except OSError as exc:
            self._broken = True
            raise OperatorError(f"Cannot append step {record.step} to {self.path}: {exc}") from exc
        # Move the end only after a successful write. After a failed one, `open` cuts off the unfinished
        # record.
        self._end += len(entry)
        self._weight = weight
        self._records.append(record)

    def close(self) -> None:
        """Release the lock. Closing twice is allowed."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._broken = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _lock(descriptor: int, path: Path) -> None:
    try:
        lock_file(descriptor, wait=False)
    except BlockingIOError as exc:
        raise RetryableError(f"Another process writes {path}. Try again when it has ended.") from exc


def _read_all(descriptor: int) -> bytes:
    # Read from a duplicate, because closing the file object would close the journal's own descriptor.
    with os.fdopen(os.dup(descriptor), "rb") as file:
        return file.read()


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    while data:
        # `pwrite` may write a part only, for example when the disk fills up.
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


# --- bytes ----------------------------------------------------------------------------------------------


def encode_header(header: LogHeader) -> bytes:
    """Return the bytes of a journal file that has a header and no records."""
    header_bytes = header.to_bytes()
    return _HEAD.pack(MAGIC, len(header_bytes)) + header_bytes + _CRC.pack(_entry_seed(header))


def _entry_seed(header: LogHeader) -> int:
    """Return the checksum of the header. The checksum of each entry starts from this value."""
    # So an entry that is copied from another journal into this file fails its checksum.
    return zlib.crc32(header.to_bytes())


def _encode_entry(record: StepRecord, seed: int) -> bytes:
    """Return the bytes of one record in the journal whose header has the checksum `seed`."""
    coefficients = np.array(record.coefficients, dtype=np.int64)
    payload = _FIXED.pack(record.step, int(record.flags), record.loss) + encode_varints(zigzag(coefficients))
    sized = _SIZE.pack(len(payload)) + payload
    return sized + _CRC.pack(zlib.crc32(sized, seed))


def parse_journal(data: bytes, path: Path) -> JournalContents:
    """Parse a journal's bytes. `path` is for the messages.

    Raises:
        PackageError: `journal-header` (no whole header) or `journal-corrupt` (a whole record follows a
            damaged one).
    """
    header, position = _parse_header(data, path)
    seed = _entry_seed(header)
    records: list[StepRecord] = []
    while (payload := _payload_at(data, position, seed)) is not None:
        records.append(_read_record(payload, header, len(records), path))
        position += _SIZE.size + len(payload) + _CRC.size
    # FORMAT 8.4: after a crash, no whole record follows the unfinished one. If one does, the file is damaged.
    if any(_payload_at(data, offset, seed) is not None for offset in range(position + 1, len(data))):
        raise PackageError(
            "journal-corrupt",
            f"{path} is damaged at byte {position}, in record {len(records)}, and whole records follow. "
            "Restore it from a backup, or begin the run again.",
        )
    return JournalContents(
        header=header, records=tuple(records), end=position, torn_bytes=len(data) - position
    )


def _parse_header(data: bytes, path: Path) -> tuple[LogHeader, int]:
    torn = PackageError("journal-header", f"{path} ends within its header, after {len(data)} bytes.")
    if len(data) < _HEAD.size:
        raise torn
    magic, size = _HEAD.unpack_from(data)
    if magic != MAGIC or size > MAX_HEADER_BYTES:
        raise PackageError("journal-header", f"{path} is no journal: it starts with {magic!r}.")
    end = _HEAD.size + size
    if len(data) < end + _CRC.size:
        raise torn
    header_bytes = data[_HEAD.size : end]
    if _CRC.unpack_from(data, end)[0] != zlib.crc32(header_bytes):
        raise PackageError("journal-header", f"The header of {path} is damaged: its checksum differs.")
    return LogHeader.from_bytes(header_bytes), end + _CRC.size


def _payload_at(data: bytes, position: int, seed: int) -> bytes | None:
    """Return the payload of the whole entry at `position`, or None."""
    start = position + _SIZE.size
    if start > len(data):
        return None
    (size,) = _SIZE.unpack_from(data, position)
    end = start + size
    if not _FIXED.size < size <= _MAX_PAYLOAD or end + _CRC.size > len(data):
        return None
    if _CRC.unpack_from(data, end)[0] != zlib.crc32(data[position:end], seed):
        return None
    return data[start:end]


def _read_record(payload: bytes, header: LogHeader, step: int, path: Path) -> StepRecord:
    number, flags, loss = _FIXED.unpack_from(payload)
    try:
        coefficients = unzigzag(decode_varints(payload[_FIXED.size :]))
        record = StepRecord(
            step=number, coefficients=tuple(coefficients.tolist()), loss=loss, flags=StepFlag(flags)
        )
        check_record(record, header, expected_step=step)
    except (InputError, PackageError) as exc:
        raise PackageError("journal-corrupt", f"Record {step} of {path} is malformed: {exc}") from exc
    return record
