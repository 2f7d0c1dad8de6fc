"""Malformed packed states, at least one for each code of FORMAT 11.

The bytes are put together here, from the text of FORMAT, with a digest that fits where the lie is elsewhere.
"""

import hashlib
import json
import struct
from collections.abc import Callable
from typing import Any

import pytest

from permille.errors import PackageError
from permille.zo.packed_state import decode_state

MAX_BYTES, MAX_K = 4096, 10_000
FIELDS = {
    "format": "permille-state",
    "k": 3,
    "mask_digest": "sha256:" + "b" * 64,
    "origin": "personal",
    "package_digest": "sha256:" + "a" * 64,
    "step_unit_exponent": -20,
    "version": 1,
}
GOOD = b"\x03\x08\x01"  # 0, -1, 2

Attack = Callable[[], bytes]
ATTACKS: list[tuple[str, Attack]] = []


def attack(code: str) -> Callable[[Attack], Attack]:
    """Register bytes that must be refused with this code."""

    def register(function: Attack) -> Attack:
        ATTACKS.append((code, function))
        return function

    return register


def header(**changes: Any) -> bytes:
    return json.dumps(FIELDS | changes, sort_keys=True, separators=(",", ":")).encode()


def state(body: bytes = GOOD, head: bytes | None = None, magic: bytes = b"PMLSTA1\n") -> bytes:
    """A file of FORMAT 11.2 around whatever it is given."""
    head = header() if head is None else head
    data = magic + struct.pack("<I", len(head)) + head + body
    return data + hashlib.sha256(data).digest()


def decode(data: bytes) -> list[int]:
    """Read as a server does, with its limits and its package."""
    found = decode_state(data, max_bytes=MAX_BYTES, max_k=MAX_K)
    found.check_binding(
        package_digest="sha256:" + "a" * 64, mask_digest="sha256:" + "b" * 64, k=len(found.s_K)
    )
    numbers: list[int] = found.s_K.tolist()
    return numbers


def test_an_honest_state_is_read() -> None:
    assert decode(state()) == [0, -1, 2]


@attack("state-limit")
def more_bytes_than_accepted() -> bytes:
    return state(bytes(MAX_BYTES))


@attack("state-limit")
def four_billion_weights_in_no_bytes() -> bytes:
    return state(b"", header(k=2**32))


@attack("state-corrupt")
def no_bytes() -> bytes:
    return b""


@attack("state-corrupt")
def a_digest_alone() -> bytes:
    return hashlib.sha256(b"").digest()


@attack("state-corrupt")
def one_flipped_bit() -> bytes:
    data = bytearray(state())
    data[-33] ^= 1
    return bytes(data)


@attack("state-header")
def another_magic() -> bytes:
    return state(magic=b"PMLSTA2\n")


@attack("state-header")
def header_beyond_the_end() -> bytes:
    data = b"PMLSTA1\n" + struct.pack("<I", 1000) + header()
    return data + hashlib.sha256(data).digest()


@attack("state-header")
def header_of_four_gigabytes() -> bytes:
    data = b"PMLSTA1\n" + struct.pack("<I", 2**32 - 1) + header()
    return data + hashlib.sha256(data).digest()


@attack("state-header")
def header_is_no_json() -> bytes:
    return state(head=b"{")


@attack("state-header")
def header_is_a_list() -> bytes:
    return state(head=b"[]")


@attack("state-header")
def header_with_an_unknown_key() -> bytes:
    return state(head=header(name="Ada"))


@attack("state-header")
def header_with_spaces() -> bytes:
    return state(head=header().replace(b":3", b": 3"))


@attack("state-header")
def header_of_another_version() -> bytes:
    return state(head=header(version=2))


@attack("state-header")
def origin_that_nobody_knows() -> bytes:
    return state(head=header(origin="stolen"))


@attack("state-header")
def no_weights() -> bytes:
    return state(b"", header(k=0))


@attack("state-header")
def header_nested_five_hundred_deep() -> bytes:
    return state(head=b"[" * 500 + b"]" * 500)


@attack("state-content")
def bytes_behind_the_last_block() -> bytes:
    return state(GOOD + b"\0")


@attack("state-content")
def a_block_that_ends_too_soon() -> bytes:
    return state(GOOD[:-1])


@attack("state-content")
def a_block_that_is_not_there() -> bytes:
    return state(b"\0", header(k=4097))


@attack("state-content")
def width_of_56() -> bytes:
    return state(b"\x38" + bytes(21))


@attack("state-content")
def width_that_is_not_the_shortest() -> bytes:
    return state(b"\x04\x10\x04")


@attack("state-content")
def bits_behind_the_last_weight() -> bytes:
    return state(b"\x03\x08\x81")


@attack("state-content")
def an_integer_beyond_two_to_the_53() -> bytes:
    return state(b"\x37" + (2**54 + 1).to_bytes(21, "little"))


@attack("state-binding")
def state_of_another_package() -> bytes:
    return state(head=header(package_digest="sha256:" + "c" * 64))


@attack("state-binding")
def state_of_another_mask() -> bytes:
    return state(head=header(mask_digest="sha256:" + "c" * 64))


@pytest.mark.parametrize(("code", "build"), ATTACKS, ids=[build.__name__ for _, build in ATTACKS])
def test_malformed_states_are_refused(code: str, build: Attack) -> None:
    with pytest.raises(PackageError) as refused:
        decode(build())
    assert refused.value.code == code
