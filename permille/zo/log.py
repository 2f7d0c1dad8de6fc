"""The canonical log: the compact form of a log, for upload and backup (FORMAT 9).

A sequence of steps has exactly one canonical log, which does not contain losses. The reader checks every
limit before it allocates memory. It refuses overlong integers, wrong checksums and trailing bytes, so
`encode(decode(data)) == data`.

Shapes: T = steps, Q = queries, V = integers of one chunk, F = steps of one chunk that have flags.
"""

import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from permille.errors import PackageError
from permille.zo.header import MAX_HEADER_BYTES, MAX_K, LogHeader
from permille.zo.lattice import MAX_COEFFICIENT, STATE_LIMIT
from permille.zo.records import (
    KNOWN_FLAGS,
    StepFlag,
    StepRecord,
    check_record,
    check_weight,
    coefficients_of,
    weight_of,
    weight_of_rows,
)
from permille.zo.varints import decode_varints, encode_varints, unzigzag, zigzag

MAGIC = b"PMLLOG1\n"
CHUNK_STEPS = 1024
# FORMAT 9.1: magic and header, and three `u32` for the header's size, the number of steps and the checksum.
MAX_HEAD_BYTES = len(MAGIC) + MAX_HEADER_BYTES + 12
"""The largest size of the part before the first chunk."""

_U32 = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True)
class CanonicalLog:
    """A decoded log: `coefficients_TQ` int64 and `flags_T` uint8 of the steps 0 to T - 1."""

    header: LogHeader
    coefficients_TQ: NDArray[np.int64]
    flags_T: NDArray[np.uint8]

    @property
    def steps(self) -> int:
        """Return the number of steps, including rejected ones."""
        return len(self.coefficients_TQ)


def encode_canonical(header: LogHeader, records: Iterable[StepRecord]) -> bytes:
    """Encode a header and its records, whose steps are numbered from 0 without a gap.

    Raises:
        InputError: a record does not continue the log, or the state could exceed 2**53 (FORMAT 7.3).
    """
    kept = []
    weight = 0
    for step, record in enumerate(records):
        check_record(record, header, expected_step=step)
        weight += weight_of(record, header)
        kept.append(record)
    check_weight(weight)
    flags_T = np.array([int(record.flags) for record in kept], dtype=np.uint8)
    return _encode(header, coefficients_of(kept, header), flags_T)


def decode_canonical(data: bytes, *, max_bytes: int, max_steps: int, max_k: int = MAX_K) -> CanonicalLog:
    """Read a canonical log from an untrusted source.

        log = decode_canonical(data, max_bytes=1 << 20, max_steps=1000)

    Raises:
        PackageError: `log-limit`, `log-header`, `log-truncated`, `log-corrupt` or `log-content` (FORMAT 9.3).
    """
    if len(data) > max_bytes:
        raise PackageError(
            "log-limit", f"The log has {len(data)} bytes, and at most {max_bytes} are accepted."
        )
    reader = _Reader(data)
    header, steps = _read_head(reader)
    _check_limits(header, steps, max_steps=max_steps, max_k=max_k, left=reader.left)
    coefficients_TQ = np.empty((steps, header.queries), dtype=np.int64)
    flags_T = np.zeros(steps, dtype=np.uint8)
    for first in range(0, steps, CHUNK_STEPS):
        # FORMAT 9.1: the last chunk may be shorter.
        chunk = slice(first, min(first + CHUNK_STEPS, steps))
        payload = reader.take(reader.u32())
        reader.checksum()
        _decode_chunk(payload, coefficients_TQ[chunk], flags_T[chunk])
    if reader.left:
        raise PackageError("log-content", f"{reader.left} more bytes follow the end of the log.")
    weight = weight_of_rows(coefficients_TQ, header.basis_steps)
    if weight > STATE_LIMIT:
        raise PackageError("log-limit", f"expected sum |c| within 2**53, got {weight} or more")
    return CanonicalLog(header=header, coefficients_TQ=coefficients_TQ, flags_T=flags_T)


def read_head(data: bytes) -> tuple[LogHeader, int]:
    """Read the header of a log, and its declared number of steps, from its first `MAX_HEAD_BYTES`.

    Raises:
        PackageError: as for `decode_canonical`, if the part before the first chunk is wrong.
    """
    return _read_head(_Reader(data))


def _read_head(reader: "_Reader") -> tuple[LogHeader, int]:
    magic = reader.take(len(MAGIC))
    if magic != MAGIC:
        raise PackageError("log-header", f"This is no log: it starts with {magic!r}.")
    header_size = reader.u32()
    if header_size > MAX_HEADER_BYTES:
        raise PackageError(
            "log-limit", f"expected a header of at most {MAX_HEADER_BYTES} bytes, got {header_size}"
        )
    header_bytes = reader.take(header_size)
    steps = reader.u32()
    reader.checksum()
    return LogHeader.from_bytes(header_bytes), steps


class _Reader:
    """A cursor that never reads past the end of the data. It keeps a running checksum of what it has read."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0
        self._summed = 0
        self._crc = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._position

    def take(self, size: int) -> bytes:
        if size > self.left:
            raise PackageError(
                "log-truncated",
                f"The log is cut off: {size} bytes should follow byte {self._position}, and {self.left} do.",
            )
        self._position += size
        return self._data[self._position - size : self._position]

    def u32(self) -> int:
        number: int = _U32.unpack(self.take(4))[0]
        return number

    def checksum(self) -> None:
        """Read a checksum, and compare it with that of the bytes since the previous checksum.

        Each checksum continues from the previous one (FORMAT 9.1).
        """
        self._crc = zlib.crc32(self._data[self._summed : self._position], self._crc)
        stored = self.u32()
        if stored != self._crc:
            raise PackageError(
                "log-corrupt",
                f"The log is damaged before byte {self._position}: its checksum is {self._crc:08x}, and "
                f"{stored:08x} is stored.",
            )
        self._summed = self._position


def _check_limits(header: LogHeader, steps: int, *, max_steps: int, max_k: int, left: int) -> None:
    # Check before allocating any array, because the numbers come from an untrusted device.
    if steps > min(max_steps, header.total_steps):
        raise PackageError(
            "log-limit",
            f"The log has {steps} steps, and at most {min(max_steps, header.total_steps)} are accepted.",
        )
    if header.k > max_k:
        raise PackageError(
            "log-limit", f"The log has {header.k} masked weights, and at most {max_k} are accepted."
        )
    # FORMAT 9.2: a coefficient takes at least one byte, so the array is at most 8 times the upload.
    if steps * header.queries > left:
        raise PackageError(
            "log-truncated", f"expected {steps * header.queries} coefficients, got {left} bytes"
        )


def _encode(header: LogHeader, coefficients_TQ: NDArray[np.int64], flags_T: NDArray[np.uint8]) -> bytes:
    header_bytes = header.to_bytes()
    head = MAGIC + _U32.pack(len(header_bytes)) + header_bytes + _U32.pack(len(coefficients_TQ))
    # FORMAT 9.1: each checksum continues from the previous one, so chunks cannot be exchanged or moved.
    crc = zlib.crc32(head)
    parts = [head, _U32.pack(crc)]
    for payload in _payloads(coefficients_TQ, flags_T):
        sized = _U32.pack(len(payload)) + payload
        crc = zlib.crc32(sized, crc)
        parts += [sized, _U32.pack(crc)]
    return b"".join(parts)


def _payloads(coefficients_TQ: NDArray[np.int64], flags_T: NDArray[np.uint8]) -> Iterator[bytes]:
    for first in range(0, len(coefficients_TQ), CHUNK_STEPS):
        chunk = slice(first, first + CHUNK_STEPS)
        # Flags are rare, so only steps that have some are listed.
        flagged = np.flatnonzero(flags_T[chunk])
        pairs = np.stack([flagged, flags_T[chunk][flagged]], axis=1).reshape(-1)
        numbers = np.concatenate([[len(flagged)], pairs, zigzag(coefficients_TQ[chunk].reshape(-1))])
        yield encode_varints(numbers.astype(np.uint64))


def _decode_chunk(payload: bytes, out_TQ: NDArray[np.int64], out_flags_T: NDArray[np.uint8]) -> None:
    numbers_V = decode_varints(payload)
    # FORMAT 9.2: the number of flagged steps, their positions and flags, then the coefficients.
    flagged = int(numbers_V[0]) if len(numbers_V) else -1
    if not 0 <= flagged <= len(out_flags_T) or len(numbers_V) != 1 + 2 * flagged + out_TQ.size:
        raise PackageError(
            "log-content", f"expected {out_TQ.size} coefficients and their flags, got {len(numbers_V)}"
        )
    pairs_F2 = numbers_V[1 : 1 + 2 * flagged].reshape(-1, 2).astype(np.int64)
    steps_F, flags_F = pairs_F2[:, 0], pairs_F2[:, 1]
    # Accept increasing steps and known flags only, so that a log has exactly one byte string.
    if flagged and (
        np.any(np.diff(steps_F) <= 0)
        or steps_F[-1] >= len(out_flags_T)
        or flags_F.min() < 1
        or flags_F.max() > KNOWN_FLAGS
    ):
        raise PackageError(
            "log-content", "expected flags 1 to 3 at increasing steps of the chunk, got others"
        )
    coefficients_V = unzigzag(numbers_V[1 + 2 * flagged :])
    if np.any(np.abs(coefficients_V) > MAX_COEFFICIENT):
        raise PackageError("log-limit", f"expected coefficients within {MAX_COEFFICIENT}, got larger ones")
    out_TQ[...] = coefficients_V.reshape(out_TQ.shape)
    out_flags_T[steps_F] = flags_F
    if np.any(out_TQ[(out_flags_T & int(StepFlag.REJECTED)) != 0]):
        raise PackageError("log-content", "expected zero coefficients in a rejected step, got others")
