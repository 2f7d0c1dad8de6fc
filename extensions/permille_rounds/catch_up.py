"""Catch-up: the part of a federation's history that a device has missed, as one byte string (FORMAT 13.5).

A catch-up holds the missed rounds, or a checkpoint and the rounds after it, whichever is smaller. A signed
head at the end proves that rounds and checkpoint belong to the history.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from permille.errors import PackageError
from permille.zo.packed_state import StateHeader, StateOrigin, decode_state, encode_state
from permille_rounds.definition import Definition
from permille_rounds.rounds import HEAD_BYTES, History, decode_segment

MAGIC = b"PMLCUP1\n"
_SIZE = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledCheckpoint:
    """A packed state of a federation (FORMAT 11), and the signed head that names it."""

    state: bytes
    head: bytes


def encode_catch_up(checkpoint: PooledCheckpoint | None, records: Sequence[bytes], head: bytes) -> bytes:
    """Return the canonical bytes of a catch-up.

    Args:
        records: the bytes of consecutive rounds.
        head: the signed head after the last of them.
    """
    state = b"" if checkpoint is None else checkpoint.state
    segment = b"".join(records)
    begin = [MAGIC, _SIZE.pack(len(state)), state, b"" if checkpoint is None else checkpoint.head]
    return b"".join([*begin, _SIZE.pack(len(segment)), segment, head])


def caught_up(held: History, data: bytes, *, max_bytes: int) -> History:
    """Return the history of a device after a catch-up. The `held` history is not changed.

    Raises:
        PackageError: a rule of FORMAT 11 or 13 is broken. `round-chain` also means that the new
            history is older than `held`, or has other rounds up to the same number.
    """
    if len(data) > max_bytes:
        raise PackageError("round-limit", f"expected at most {max_bytes} bytes, got {len(data)}")
    if not data.startswith(MAGIC):
        raise PackageError("round-content", f"expected {MAGIC!r}, got {data[: len(MAGIC)]!r}")
    state, position = _sized(data, len(MAGIC))
    # Work on a copy, so that an error leaves the held history as it was.
    history = replace(held)
    if state:
        head, position = data[position : position + HEAD_BYTES], position + HEAD_BYTES
        s_W = _state(state, held.definition)
        history = History.resume(held.definition, s_W, head)
    segment, position = _sized(data, position)
    history.apply(decode_segment(segment, held.definition, max_bytes=len(segment)))
    # Only the signed head proves that the rounds are right, so nothing is returned before this check.
    history.check_head(data[position:])
    # A service must not lead a device back to an older state, or to another history.
    if history.number < held.number or (history.number == held.number and history.chain != held.chain):
        raise PackageError(
            "round-chain",
            f"The service sent a history of {history.number} rounds with chain {history.chain}, but this "
            f"device has one of {held.number} rounds with chain {held.chain}. A device never goes back.",
        )
    return history


def pack_state(definition: Definition, s_W: NDArray[np.int64]) -> bytes:
    """Return the federation's state as a checkpoint stores it."""
    log = definition.log
    header = StateHeader(
        package_digest=log.package_digest,
        mask_digest=log.mask_digest,
        step_unit_exponent=log.step_unit_exponent,
        k=log.k,
        origin=StateOrigin.POOLED,
    )
    return encode_state(header, s_W)


def _state(data: bytes, definition: Definition) -> NDArray[np.int64]:
    log = definition.log
    state = decode_state(data, max_bytes=len(data), max_k=log.k)
    state.check_binding(package_digest=log.package_digest, mask_digest=log.mask_digest, k=log.k)
    found = (state.header.origin, state.header.step_unit_exponent)
    if found != (StateOrigin.POOLED, log.step_unit_exponent):
        raise PackageError(
            "state-binding",
            f"The state of the checkpoint does not belong to this federation: its origin is {found[0]}, and "
            f"its step unit exponent is {found[1]}.",
        )
    return state.s_K


def _sized(data: bytes, position: int) -> tuple[bytes, int]:
    """Read the size of a part, then the part. Return the part, and the position after it."""
    begin = position + _SIZE.size
    if len(data) < begin:
        raise PackageError("round-content", f"expected the size of a part, got {len(data)} bytes")
    end = begin + _SIZE.unpack_from(data, position)[0]
    if len(data) < end:
        raise PackageError("round-content", f"expected a part of {end - begin} bytes, got {len(data)} in all")
    return data[begin:end], end
