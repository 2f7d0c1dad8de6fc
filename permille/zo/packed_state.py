"""The packed state: the trained integers without the steps that made them, to keep or share (FORMAT 11).

For a small mask and many steps, a packed state is shorter than the log. Log and packed state of one run have
the same state digest. The reader does not trust the bytes. First it compares the digest that the data end
with. Then it checks each limit before it allocates memory. It accepts only canonical bytes, so
`encode(decode(data)) == data`.

Shapes: K = masked weights, N = weights of one block.
"""

import hashlib
import json
import struct
from dataclasses import asdict, dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from permille.digests import canonical_json, is_digest
from permille.errors import InputError, PackageError
from permille.package.limits import STATE_BLOCK_WEIGHTS as BLOCK_WEIGHTS
from permille.package.reader import Package
from permille.zo.header import MAX_K, check_range
from permille.zo.lattice import (
    MAX_STEP_UNIT_EXPONENT,
    MIN_STEP_UNIT_EXPONENT,
    STATE_LIMIT,
    state_digest,
)
from permille.zo.varints import unzigzag, zigzag

MAGIC = b"PMLSTA1\n"
FORMAT = "permille-state"
VERSION = 1
MAX_HEADER_BYTES = 1024

_HEAD = struct.Struct("<8sI")
_DIGEST_BYTES = 32
_MAX_WIDTH = 55  # the bit length of zigzag(2**53)


class StateOrigin(StrEnum):
    """Origin of a state: the text of a person, or rounds of many devices."""

    PERSONAL = "personal"
    POOLED = "pooled"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateHeader:
    """Header of a packed state. It binds the state to a package.

    Attributes:
        k: the number of masked weights.

    Raises:
        InputError: a field is outside the limits of FORMAT 11.1.
    """

    package_digest: str
    mask_digest: str
    step_unit_exponent: int
    k: int
    origin: StateOrigin

    def __post_init__(self) -> None:
        for name, digest in (("package_digest", self.package_digest), ("mask_digest", self.mask_digest)):
            if not is_digest(digest):
                raise InputError(f"expected {name} as sha256:<64 hex digits>, got {digest!r}")
        exponent = self.step_unit_exponent
        check_range("step_unit_exponent", exponent, MIN_STEP_UNIT_EXPONENT, MAX_STEP_UNIT_EXPONENT)
        check_range("k", self.k, 1, MAX_K)

    def to_bytes(self) -> bytes:
        """Return the canonical JSON of the header (FORMAT 11.1)."""
        return canonical_json(asdict(self) | {"format": FORMAT, "version": VERSION})

    @classmethod
    def from_bytes(cls, data: bytes) -> "StateHeader":
        """Read a header. Refuse bytes that `to_bytes` would not have written.

        Raises:
            PackageError: `state-header`.
        """
        try:
            fields = json.loads(data)
            del fields["format"], fields["version"]  # constants; to_bytes adds them
            header = cls(**fields | {"origin": StateOrigin(fields["origin"])})
            canonical = header.to_bytes()
        except (ValueError, TypeError, KeyError, RecursionError, InputError) as exc:
            raise PackageError("state-header", f"expected the header of a state, got {exc!r:.300}") from exc
        if canonical != data:
            raise PackageError("state-header", "expected the canonical bytes of a header, got others")
        return header


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedState:
    """A decoded state: `w = w_base + 2**step_unit_exponent * s`."""

    header: StateHeader
    s_K: NDArray[np.int64]

    @property
    def digest(self) -> str:
        """Return the digest of the state (FORMAT 10)."""
        header = self.header
        return state_digest(
            self.s_K, mask_digest=header.mask_digest, step_unit_exponent=header.step_unit_exponent
        )

    def check_binding(self, *, package_digest: str, mask_digest: str, k: int) -> None:
        """Check that the state belongs to this package and mask.

        Raises:
            PackageError: `state-binding`.
        """
        found = (self.header.package_digest, self.header.mask_digest, self.header.k)
        if found != (package_digest, mask_digest, k):
            wanted = f"package {package_digest}, mask {mask_digest} and {k} weights"
            raise PackageError(
                "state-binding",
                f"The state belongs to package {found[0]}, mask {found[1]} and {found[2]} weights, "
                f"not to {wanted}.",
            )


def read_state(package: Package, data: bytes) -> PackedState:
    """Read a packed state of a package.

        state = read_state(package, (folder / "adopted.state").read_bytes())

    Raises:
        PackageError: a rule of FORMAT 11 is broken. `state-binding`: the state belongs to another package.
    """
    state = decode_state(data, max_bytes=len(data), max_k=package.k)
    state.check_binding(package_digest=package.digest, mask_digest=package.mask_digest, k=package.k)
    return state


def encode_state(header: StateHeader, s_K: NDArray[np.int64]) -> bytes:
    """Encode a state. A state has exactly one byte string.

    Raises:
        InputError: the state is not int64 [K], or has an integer beyond 2**53.
    """
    if s_K.dtype != np.int64 or s_K.shape != (header.k,):
        raise InputError(f"expected a state int64 [{header.k}], got {s_K.dtype} {list(s_K.shape)}")
    if max(int(s_K.max()), -int(s_K.min())) > STATE_LIMIT:
        raise InputError("expected a state within 2**53, got a larger integer")
    header_bytes = header.to_bytes()
    parts = [_HEAD.pack(MAGIC, len(header_bytes)), header_bytes]
    parts += [
        # FORMAT 11.2: each block has its own bit width, so a large integer makes only its block longer.
        _pack(zigzag(s_K[first : first + BLOCK_WEIGHTS]))
        for first in range(0, header.k, BLOCK_WEIGHTS)
    ]
    data = b"".join(parts)
    return data + hashlib.sha256(data).digest()


def decode_state(data: bytes, *, max_bytes: int, max_k: int) -> PackedState:
    """Read a packed state from an untrusted source.

    Raises:
        PackageError: `state-limit`, `state-corrupt`, `state-header` or `state-content` (FORMAT 11.3).
    """
    if len(data) > max_bytes:
        raise PackageError(
            "state-limit", f"The state has {len(data)} bytes, and at most {max_bytes} are accepted."
        )
    # Check the digest first, so that everything below reads the bytes as they were written.
    end = len(data) - _DIGEST_BYTES
    if end < _HEAD.size or hashlib.sha256(data[:end]).digest() != data[end:]:
        raise PackageError(
            "state-corrupt", f"The state is damaged: its {len(data)} bytes have another digest."
        )
    magic, header_size = _HEAD.unpack_from(data)
    most = min(MAX_HEADER_BYTES, end - _HEAD.size)
    if magic != MAGIC or header_size > most:
        raise PackageError(
            "state-header",
            f"expected {MAGIC!r} and a header of at most {most} bytes, got {magic!r} and {header_size} bytes",
        )
    position = _HEAD.size + header_size
    header = StateHeader.from_bytes(data[_HEAD.size : position])
    if header.k > max_k:
        raise PackageError(
            "state-limit", f"The state has {header.k} weights, and at most {max_k} are accepted."
        )
    # FORMAT 11.2: a block takes at least one byte, so the size of the data bounds the size of the array.
    if -(-header.k // BLOCK_WEIGHTS) > end - position:
        raise PackageError(
            "state-content", f"expected blocks of {header.k} weights, got {end - position} bytes"
        )
    s_K = np.empty(header.k, dtype=np.int64)
    for first in range(0, header.k, BLOCK_WEIGHTS):
        block_N = s_K[first : first + BLOCK_WEIGHTS]
        position += _unpack(memoryview(data)[position:end], block_N)
    if position != end:
        raise PackageError("state-content", f"expected the end of the state, got {end - position} more bytes")
    return PackedState(header=header, s_K=s_K)


def _pack(numbers_N: NDArray[np.uint64]) -> bytes:
    """Pack the bit width of the largest number as a byte, then all numbers, lowest bit first."""
    width = int(numbers_N.max()).bit_length()
    bits_NW = (numbers_N[:, None] >> np.arange(width, dtype=np.uint64)) & np.uint64(1)
    return bytes([width]) + np.packbits(bits_NW.astype(np.uint8).reshape(-1), bitorder="little").tobytes()


def _unpack(data: memoryview, out_N: NDArray[np.int64]) -> int:
    """Read one block from the start of the bytes. Return its size in bytes."""
    # If no bytes are left, take a width that no block has. The check below refuses it.
    width = data[0] if data else _MAX_WIDTH + 1
    size = 1 + -(-len(out_N) * width // 8)
    if width > _MAX_WIDTH or size > len(data):
        raise PackageError(
            "state-content", f"expected a block of {len(out_N)} weights, got {len(data)} bytes"
        )
    bits = np.unpackbits(np.frombuffer(data, np.uint8, size - 1, 1), bitorder="little")
    used = len(out_N) * width
    bits_NW = bits[:used].reshape(len(out_N), width).astype(np.uint64)
    numbers_N = (bits_NW << np.arange(width, dtype=np.uint64)).sum(axis=1, dtype=np.uint64)
    # A state has exactly one byte string, so the width must be the smallest, and padding bits must be zero.
    shortest = int(numbers_N.max()).bit_length() == width
    out_N[...] = unzigzag(numbers_N)
    if not shortest or bits[used:].any() or int(np.abs(out_N).max()) > STATE_LIMIT:
        raise PackageError("state-content", "expected the canonical bytes of a block, got others")
    return size
