"""Canonical logs with correct checksums and false contents, cut logs, flipped bits, and random bytes."""

import json
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from permille.errors import PackageError
from permille.zo.log import CHUNK_STEPS, decode_canonical, encode_canonical
from tests.unit.zo.logs import make_exponents, make_header, make_records, random_rows

HEADER = make_header(queries=1)
STEPS = 30


def seal(header: bytes, steps: int, payloads: list[bytes]) -> bytes:
    """A log with correct checksums around whatever it is given, written from FORMAT 9.1."""
    data = b"PMLLOG1\n" + struct.pack("<I", len(header)) + header + struct.pack("<I", steps)
    crc = zlib.crc32(data)
    data += struct.pack("<I", crc)
    for payload in payloads:
        sized = struct.pack("<I", len(payload)) + payload
        crc = zlib.crc32(sized, crc)
        data += sized + struct.pack("<I", crc)
    return data


def edit_header(**changes: Any) -> bytes:
    fields = json.loads(HEADER.to_bytes())
    fields.update(changes)
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def code_of(data: bytes, *, max_bytes: int = 1 << 20, max_steps: int = 5000, max_k: int = 1 << 20) -> str:
    with pytest.raises(PackageError) as caught:
        decode_canonical(data, max_bytes=max_bytes, max_steps=max_steps, max_k=max_k)
    assert str(caught.value).startswith(caught.value.code)
    return caught.value.code


GOOD = encode_canonical(HEADER, make_records(random_rows(STEPS, 1)))
ONE = bytes([0, 2])
ZEROS = bytes(1 + CHUNK_STEPS)


def test_the_sealed_logs_of_this_module_are_valid_before_they_are_damaged() -> None:
    for log in (seal(HEADER.to_bytes(), 1, [ONE]), seal(edit_header(), 0, []), GOOD):
        decode_canonical(log, max_bytes=1 << 20, max_steps=5000)
    two_chunks = seal(HEADER.to_bytes(), CHUNK_STEPS + 1, [ZEROS, ONE])
    assert decode_canonical(two_chunks, max_bytes=1 << 20, max_steps=5000).steps == CHUNK_STEPS + 1


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        ({"max_bytes": len(GOOD) - 1}, "log-limit"),
        ({"max_steps": STEPS - 1}, "log-limit"),
        ({"max_k": 146}, "log-limit"),
    ],
)
def test_a_log_beyond_the_readers_limits_is_refused(limits: dict[str, int], code: str) -> None:
    decode_canonical(GOOD, max_bytes=len(GOOD), max_steps=STEPS, max_k=147)
    assert code_of(GOOD, **limits) == code


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"queries":' + b"9" * 5000 + b"}",
        HEADER.to_bytes() + b" ",
        HEADER.to_bytes().replace(b":", b": ", 1),
        HEADER.to_bytes().replace(b'{"', b'{"version":1,"', 1),
        edit_header(extra=1),
        edit_header(format="permille-package"),
        edit_header(version=2),
        edit_header(generator="philox4x64-10"),
        edit_header(generator_version=2),
        edit_header(package_digest="sha256:" + "A" * 64),
        edit_header(package_digest=None),
        edit_header(mask_digest="sha256:" + "a" * 63),
        edit_header(seed=5),
        edit_header(seed="-000000000000001"),
        edit_header(seed="0123456789ABCDEF"),
        edit_header(seed="1" * 17),
        edit_header(directions="gaussian"),
        edit_header(estimator="adam"),
        edit_header(queries=0),
        edit_header(queries=True),
        edit_header(queries=1.0),
        edit_header(queries=10**30),
        edit_header(epsilon=0.001),
        edit_header(epsilon="nan"),
        edit_header(epsilon="0x1p99999"),
        edit_header(epsilon="-0x1.0p+0"),
        edit_header(learning_rate="inf"),
        edit_header(learning_rate="0.1"),
        edit_header(schedule="cosine"),
        edit_header(total_steps=0),
        edit_header(step_unit_exponent=-1000),
        edit_header(step_unit_exponent="-20"),
        edit_header(counts=[]),
        edit_header(counts=[-1]),
        edit_header(counts=[1.5]),
        edit_header(counts="147"),
        edit_header(counts={"0": 147}),
        edit_header(counts=[2**32]),
        edit_header(counts=[2**32 - 1, 2]),
        edit_header(counts=[1] * 65_537),
    ],
    ids=repr,
)
def test_a_header_that_is_not_exactly_one_is_refused(header: bytes) -> None:
    assert code_of(seal(header, 1, [ONE])) == "log-header"


def test_a_header_without_any_one_of_its_keys_is_refused() -> None:
    for key in json.loads(HEADER.to_bytes()):
        fields = json.loads(HEADER.to_bytes())
        del fields[key]
        header = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
        assert code_of(seal(header, 1, [ONE])) == "log-header"


def test_another_magic_is_refused() -> None:
    assert code_of(b"PMLLOG2\n" + GOOD[8:]) == "log-header"
    assert code_of(b"\x80\x04K\x01.pickle is never opened") == "log-header"


def test_an_announced_header_size_is_not_believed() -> None:
    assert code_of(GOOD[:8] + struct.pack("<I", 2**32 - 1) + GOOD[12:]) == "log-limit"


@pytest.mark.parametrize("announced", [STEPS + 1, 4000])
def test_steps_that_are_not_there_are_refused(announced: int) -> None:
    payload = bytes([0]) + b"\x02" * STEPS
    expected = {"log-truncated", "log-content"}
    assert code_of(seal(HEADER.to_bytes(), announced, [payload])) in expected


def test_a_log_cut_at_any_byte_is_refused_as_truncated() -> None:
    for cut in range(len(GOOD)):
        assert code_of(GOOD[:cut]) == "log-truncated"


def test_any_flipped_bit_is_refused() -> None:
    for position in range(len(GOOD)):
        damaged = bytearray(GOOD)
        damaged[position] ^= 1 << position % 8
        assert code_of(bytes(damaged)) in {"log-corrupt", "log-header", "log-truncated", "log-limit"}


def test_a_wrong_checksum_is_refused_as_corrupt() -> None:
    assert code_of(GOOD[:-1] + bytes([GOOD[-1] ^ 1])) == "log-corrupt"


def test_swapped_chunks_are_refused_because_checksums_are_chained() -> None:
    rows = random_rows(3 * CHUNK_STEPS, 1)
    data = encode_canonical(HEADER, make_records(rows))
    start = 12 + len(HEADER.to_bytes()) + 8
    sizes = []
    position = start
    while position < len(data):
        sizes.append(8 + struct.unpack_from("<I", data, position)[0])
        position += sizes[-1]
    first, second = data[start : start + sizes[0]], data[start + sizes[0] : start + sizes[0] + sizes[1]]
    swapped = data[:start] + second + first + data[start + sizes[0] + sizes[1] :]
    assert len(swapped) == len(data)
    assert code_of(swapped) == "log-corrupt"


@pytest.mark.parametrize(
    ("steps", "payload"),
    [
        (1, b"\x00"),
        (1, b"\x00\x02\x02"),
        (1, b"\x00\x82\x00"),
        (1, b"\x00\x82"),
        (1, b"\x00\x02\x82"),
        (1, b"\x00\x80\x80\x80\x80\x80\x01"),
        (1, b"\x80\x00\x02"),
        (1, b"\x02\x00\x01\x00\x01\x00"),
        (1, b"\x01\x01\x01\x02"),
        (1, b"\x01\x00\x00\x02"),
        (1, b"\x01\x00\x04\x02"),
        (1, b"\x01\x00\x02\x02"),
        (1, b"\x01\x00\x03\x02"),
        (2, b"\x02\x01\x01\x00\x01\x02\x02"),
        (2, b"\x02\x01\x01\x01\x01\x02\x02"),
        (2, b"\xff\xff\xff\xff\x0f\x02\x02"),
    ],
    ids=lambda value: value.hex() if isinstance(value, bytes) else None,
)
def test_a_chunk_that_says_more_less_or_the_same_twice_is_refused(steps: int, payload: bytes) -> None:
    assert code_of(seal(HEADER.to_bytes(), steps, [payload])) == "log-content"


@pytest.mark.parametrize(
    "data",
    [
        GOOD + b"\x00",
        GOOD + GOOD,
        seal(HEADER.to_bytes(), 1, [ONE, ONE]),
        seal(HEADER.to_bytes(), 0, [b"\x00"]),
    ],
    ids=["byte", "log", "chunk", "empty-chunk"],
)
def test_bytes_after_the_end_are_refused(data: bytes) -> None:
    assert code_of(data) == "log-content"


@pytest.mark.parametrize("coefficient", [b"\xff\xff\xff\xff\x0f", b"\xff\xff\xff\xff\x7f"])
def test_a_coefficient_beyond_the_format_is_refused(coefficient: bytes) -> None:
    assert code_of(seal(HEADER.to_bytes(), 1, [b"\x00" + coefficient])) == "log-limit"


def test_coefficients_whose_sum_leaves_the_exact_range_are_refused() -> None:
    header = make_header(queries=1024, exponents=make_exponents(147, largest=5).use, total_steps=5000)
    row = b"\xfe\xff\xff\xff\x0f" * 1024
    data = seal(header.to_bytes(), 129, [b"\x00" + row * 129])
    assert code_of(data) == "log-limit"


@pytest.mark.parametrize(
    "make",
    [
        lambda: seal(edit_header(total_steps=2**24, queries=1024), 2**24, [ZEROS]),
        lambda: seal(edit_header(counts=[2**32 - 1]), 1, [ONE]),
        lambda: GOOD[:8] + struct.pack("<I", 2**31) + GOOD[12:],
        lambda: seal(HEADER.to_bytes(), 1, [b"\xff\xff\xff\xff\x0f\x02"]),
    ],
    ids=["steps", "k", "header", "flags"],
)
def test_what_is_announced_is_not_allocated(make: Callable[[], bytes]) -> None:
    data = make()
    tracemalloc.start()
    try:
        with pytest.raises(PackageError):
            decode_canonical(data, max_bytes=1 << 20, max_steps=2**24, max_k=1 << 20)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=300), sealed=st.booleans(), steps=st.integers(0, 3))
def test_no_bytes_do_more_than_raise_the_documented_error(data: bytes, sealed: bool, steps: int) -> None:
    log = seal(HEADER.to_bytes(), steps, [data]) if sealed else b"PMLLOG1\n" + data
    try:
        decoded = decode_canonical(log, max_bytes=1 << 20, max_steps=5000)
    except PackageError as exc:
        assert exc.code in {"log-limit", "log-header", "log-truncated", "log-corrupt", "log-content"}
    else:
        assert decoded.steps == steps
