"""The bytes of a journal file: header, frames, and what recovery makes of them (FORMAT 8.3, 8.4).

Pure functions of bytes; opening, locking and writing are in `permille.zo.journal`.
"""

import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from permille.errors import InputError, PackageError
from permille.zo.header import MAX_HEADER_BYTES, MAX_QUERIES, LogHeader
from permille.zo.records import StepFlag, StepRecord, check_record
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


def encode_header(header: LogHeader) -> bytes:
    """The file of a journal without records."""
    header_bytes = header.to_bytes()
    return _HEAD.pack(MAGIC, len(header_bytes)) + header_bytes + _CRC.pack(frame_seed(header))


def frame_seed(header: LogHeader) -> int:
    """Where the checksums of a journal's frames continue from: the checksum of its header."""
    return zlib.crc32(header.to_bytes())


def encode_frame(record: StepRecord, seed: int) -> bytes:
    """The frame of one record, in the journal whose header's checksum is `seed`."""
    coefficients = np.array(record.coefficients, dtype=np.int64)
    payload = _FIXED.pack(record.step, int(record.flags), record.loss) + encode_varints(zigzag(coefficients))
    sized = _SIZE.pack(len(payload)) + payload
    return sized + _CRC.pack(zlib.crc32(sized, seed))


def parse_journal(data: bytes, path: Path) -> JournalContents:
    """Header and whole records of a journal's bytes; `path` is for the messages.

    Raises:
        PackageError: `journal-header` (no whole header) or `journal-corrupt` (damage before a whole record).
    """
    header, position = _parse_header(data, path)
    seed = frame_seed(header)
    records: list[StepRecord] = []
    while (payload := _payload_at(data, position, seed)) is not None:
        records.append(_read_record(payload, header, len(records), path))
        position += _SIZE.size + len(payload) + _CRC.size
    # FORMAT 8.4: a crash leaves nothing whole behind the place where it struck
    if any(_payload_at(data, offset, seed) is not None for offset in range(position + 1, len(data))):
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


def _payload_at(data: bytes, position: int, seed: int) -> bytes | None:
    """The payload of the whole frame at `position`, or None where there is none."""
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
        raise PackageError("journal-corrupt", f"expected record {step} of {path}, got: {exc}") from exc
    return record
