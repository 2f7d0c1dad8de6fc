"""Malformed packed states, at least one for each code of FORMAT 11.

The bytes are made here from the text of FORMAT. If the error is elsewhere, the digest is correct.
"""

import hashlib
import json
import struct
from typing import Any

import pytest

from permille.errors import PackageError
from permille.zo.packed_state import decode_state
from tests.unit.zo.logs import flipped

pytestmark = pytest.mark.attack(13, "malformed packed states")

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
GOOD = b"\x03\x08\x01"  # the values 0, -1, 2


def header(**changes: Any) -> bytes:
    return json.dumps(FIELDS | changes, sort_keys=True, separators=(",", ":")).encode()


def state(body: bytes = GOOD, head: bytes | None = None, magic: bytes = b"PMLSTA1\n") -> bytes:
    """Return a file of FORMAT 11.2 with these parts."""
    head = header() if head is None else head
    return sealed(magic + struct.pack("<I", len(head)) + head + body)


def decode(data: bytes) -> list[int]:
    """Decode a state as a server does, with limits and with the package's digests."""
    found = decode_state(data, max_bytes=MAX_BYTES, max_k=MAX_K)
    found.check_binding(
        package_digest="sha256:" + "a" * 64, mask_digest="sha256:" + "b" * 64, k=len(found.s_K)
    )
    numbers: list[int] = found.s_K.tolist()
    return numbers


def test_an_honest_state_is_read() -> None:
    assert decode(state()) == [0, -1, 2]


def sealed(data: bytes) -> bytes:
    return data + hashlib.sha256(data).digest()


def with_head_of(size: int) -> bytes:
    return sealed(b"PMLSTA1\n" + struct.pack("<I", size) + header())


OTHER = "sha256:" + "c" * 64
NAMED: list[tuple[str, str, bytes]] = [
    ("state-limit", "more_bytes_than_accepted", state(bytes(MAX_BYTES))),
    ("state-limit", "four_billion_weights_in_no_bytes", state(b"", header(k=2**32))),
    ("state-corrupt", "no_bytes", b""),
    ("state-corrupt", "a_digest_alone", sealed(b"")),
    ("state-corrupt", "one_flipped_bit", flipped(state(), len(state()) - 33)),
    ("state-header", "another_magic", state(magic=b"PMLSTA2\n")),
    ("state-header", "header_beyond_the_end", with_head_of(1000)),
    ("state-header", "header_of_four_gigabytes", with_head_of(2**32 - 1)),
    ("state-header", "header_is_no_json", state(head=b"{")),
    ("state-header", "header_is_a_list", state(head=b"[]")),
    ("state-header", "header_with_an_unknown_key", state(head=header(name="Ada"))),
    ("state-header", "header_with_spaces", state(head=header().replace(b":3", b": 3"))),
    ("state-header", "header_of_another_version", state(head=header(version=2))),
    ("state-header", "origin_that_nobody_knows", state(head=header(origin="stolen"))),
    ("state-header", "no_weights", state(b"", header(k=0))),
    ("state-header", "header_nested_five_hundred_deep", state(head=b"[" * 500 + b"]" * 500)),
    ("state-content", "bytes_behind_the_last_block", state(GOOD + b"\0")),
    ("state-content", "a_block_that_ends_too_soon", state(GOOD[:-1])),
    ("state-content", "a_block_that_is_not_there", state(b"\0", header(k=4097))),
    ("state-content", "width_of_56", state(b"\x38" + bytes(21))),
    ("state-content", "width_that_is_not_the_shortest", state(b"\x04\x10\x04")),
    ("state-content", "bits_behind_the_last_weight", state(b"\x03\x08\x81")),
    ("state-content", "an_integer_beyond_two_to_the_53", state(b"\x37" + (2**54 + 1).to_bytes(21, "little"))),
    ("state-binding", "state_of_another_package", state(head=header(package_digest=OTHER))),
    ("state-binding", "state_of_another_mask", state(head=header(mask_digest=OTHER))),
]
ATTACKS = [(code, data) for code, _, data in NAMED]


@pytest.mark.parametrize(("code", "data"), ATTACKS, ids=[name for _, name, _ in NAMED])
def test_malformed_states_are_refused(code: str, data: bytes) -> None:
    with pytest.raises(PackageError, match=f"^{code}:"):
        decode(data)
