"""Malformed canonical logs and journals for each code of FORMAT 8 and 9: cut, flipped, random.

The bytes are made here from the text of FORMAT. If the error is elsewhere, the checksums are correct.
"""

import json
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from permille.errors import PackageError
from permille.zo.journal import read_journal
from permille.zo.log import CHUNK_STEPS, decode_canonical, encode_canonical
from tests.unit.zo.logs import flipped, make_header, make_records, random_rows

pytestmark = pytest.mark.attack(13, "malformed logs and journals")

HEADER = make_header(queries=1, total_steps=CHUNK_STEPS * 4)
STEPS = 30
GOOD = encode_canonical(HEADER, make_records(random_rows(STEPS, 1)))
ONE = bytes([0, 2])
ZEROS = bytes(1 + CHUNK_STEPS)
Attack = Callable[[], bytes]


def seal(payloads: list[bytes], *, header: bytes | None = None, steps: int = 1) -> bytes:
    """Return a log of these parts with correct checksums (FORMAT 9.1)."""
    header = HEADER.to_bytes() if header is None else header
    data = b"PMLLOG1\n" + struct.pack("<I", len(header)) + header + struct.pack("<I", steps)
    crc = zlib.crc32(data)
    data += struct.pack("<I", crc)
    for payload in payloads:
        sized = struct.pack("<I", len(payload)) + payload
        crc = zlib.crc32(sized, crc)
        data += sized + struct.pack("<I", crc)
    return data


def edit_header(**changes: Any) -> bytes:
    fields = json.loads(HEADER.to_bytes()) | changes
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def decode(data: bytes, *, max_bytes: int = 1 << 20, max_steps: int = 5000, max_k: int = 1 << 20) -> Any:
    """Decode a log as a server does, with limits and with the package's digests."""
    found = decode_canonical(data, max_bytes=max_bytes, max_steps=max_steps, max_k=max_k)
    found.header.check_binding(
        package_digest=HEADER.package_digest, mask_digest=HEADER.mask_digest, counts=found.header.counts
    )
    return found


def code_of(data: bytes, **limits: int) -> str:
    with pytest.raises(PackageError) as caught:
        decode(data, **limits)
    return caught.value.code


ATTACKS: list[tuple[str, Attack]] = [
    ("log-limit", lambda: GOOD + bytes(1 << 20)),
    ("log-limit", lambda: seal([b"\x00" + b"\x01" * 10], header=edit_header(total_steps=4), steps=5)),
    ("log-limit", lambda: b"PMLLOG1\n" + b"\xff" * 8),
    ("log-limit", lambda: GOOD[:8] + struct.pack("<I", 2**32 - 1) + GOOD[12:]),
    ("log-limit", lambda: seal([ONE], header=edit_header(counts=[(1 << 20) + 1]))),
    ("log-limit", lambda: seal([b"\x00\xff\xff\xff\xff\x0f"])),
    ("log-limit", lambda: seal([b"\x00\xff\xff\xff\xff\x7f"])),
    ("log-header", lambda: b"PMLLOG2\n" + GOOD[8:]),
    ("log-header", lambda: b"\x80\x04K\x01.pickle is never opened"),
    ("log-truncated", lambda: b""),
    ("log-truncated", lambda: seal([b"\x00" + b"\x02" * STEPS], steps=4000)),
    ("log-corrupt", lambda: flipped(GOOD, len(GOOD) - 1)),
    ("log-content", lambda: GOOD + b"\x00"),
    ("log-content", lambda: GOOD + GOOD),
    ("log-content", lambda: seal([ONE, ONE])),
    ("log-content", lambda: seal([b"\x00"], steps=0)),
    ("log-content", lambda: seal([b"\x00" + b"\x02" * STEPS], steps=STEPS + 1)),
    ("log-binding", lambda: seal([ONE], header=edit_header(package_digest="sha256:" + "c" * 64))),
    ("log-binding", lambda: seal([ONE], header=edit_header(mask_digest="sha256:" + "c" * 64))),
]


@pytest.mark.parametrize(("code", "build"), ATTACKS)
def test_server_refuses_log(code: str, build: Attack) -> None:
    assert code_of(build()) == code


def test_the_sealed_logs_are_valid_before_they_are_damaged() -> None:
    for log in (seal([ONE]), seal([], header=edit_header(), steps=0), GOOD):
        decode(log)
    assert decode(seal([ZEROS, ONE], steps=CHUNK_STEPS + 1)).steps == CHUNK_STEPS + 1


def test_a_log_whose_sum_may_leave_the_exact_range_is_refused() -> None:
    header = make_header(queries=1024).to_bytes()
    full = b"\x00" + b"\xfe\xff\xff\xff\x0f" * 1024 * 1024  # Each place of a chunk has the value 2**31 - 1.
    decode(seal([full] * 4, header=header, steps=4096), max_bytes=1 << 25)
    log = seal([full] * 4 + [full[: 1 + 5 * 1024]], header=header, steps=4097)
    assert code_of(log, max_bytes=1 << 25) == "log-limit"


@pytest.mark.parametrize("limit", [{"max_bytes": len(GOOD) - 1}, {"max_steps": STEPS - 1}, {"max_k": 146}])
def test_a_log_beyond_the_readers_limits_is_refused(limit: dict[str, int]) -> None:
    decode(GOOD, max_bytes=len(GOOD), max_steps=STEPS, max_k=147)
    assert code_of(GOOD, **limit) == "log-limit"


BAD_FIELDS: dict[str, list[Any]] = {
    "extra": [1],
    "format": ["permille-package"],
    "version": [2],
    "generator": ["philox4x64-10"],
    "generator_version": [2],
    "package_digest": ["sha256:" + "A" * 64, None],
    "mask_digest": ["sha256:" + "a" * 63],
    "seed": [5, "-000000000000001", "0123456789ABCDEF", "1" * 17],
    "directions": ["gaussian"],
    "estimator": ["adam"],
    "queries": [0, True, 1.0, 10**30],
    "epsilon": [0.001, "nan", "0x1p99999", "-0x1.0p+0"],
    "learning_rate": ["inf", "0.1"],
    "schedule": ["cosine"],
    "total_steps": [0],
    "step_unit_exponent": [-1000, "-20"],
    "counts": [[], [-1], [1.5], "147", {"0": 147}, [2**32], [2**32 - 1, 2], [1] * 65_537],
}
BAD_HEADERS = [
    *(b"", b"{", b"[]", b"null", b"\xff\xfe", b"\x80\x04\x95.", b"[" * 100_000),
    b'{"queries":' + b"9" * 5000 + b"}",
    HEADER.to_bytes() + b" ",
    HEADER.to_bytes().replace(b":", b": ", 1),
    HEADER.to_bytes().replace(b'{"', b'{"version":1,"', 1),
    *(edit_header(**{name: bad}) for name, values in BAD_FIELDS.items() for bad in values),
]


@pytest.mark.parametrize("header", BAD_HEADERS, ids=repr)
def test_a_header_that_is_not_exactly_one_is_refused(header: bytes) -> None:
    assert code_of(seal([ONE], header=header)) == "log-header"


def test_a_header_without_any_one_of_its_keys_is_refused() -> None:
    for key in json.loads(HEADER.to_bytes()):
        fields = json.loads(HEADER.to_bytes())
        del fields[key]
        header = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
        assert code_of(seal([ONE], header=header)) == "log-header"


def test_a_log_cut_at_any_byte_is_refused_as_truncated() -> None:
    for cut in range(len(GOOD)):
        assert code_of(GOOD[:cut]) == "log-truncated"


def test_any_flipped_bit_is_refused() -> None:
    for position in range(len(GOOD)):
        code = code_of(flipped(GOOD, position))
        assert code in {"log-corrupt", "log-header", "log-truncated", "log-limit"}


def test_swapped_chunks_are_refused_because_checksums_are_chained() -> None:
    data = encode_canonical(HEADER, make_records(random_rows(3 * CHUNK_STEPS, 1)))
    start = 12 + len(HEADER.to_bytes()) + 8
    middle = start + 8 + struct.unpack_from("<I", data, start)[0]
    end = middle + 8 + struct.unpack_from("<I", data, middle)[0]
    assert code_of(data[:start] + data[middle:end] + data[start:middle] + data[end:]) == "log-corrupt"


# Payloads in hexadecimal (FORMAT 9.2): flagged steps with position and flags, then coefficients.
OF_ONE_STEP = """00 000202 008200 0082 000282 00808080808001 800002 020001000100
    01010102 01000002 01000402 01000202 01000302"""
OF_TWO_STEPS = "02010100010202 02010101010202 ffffffff0f0202"


@pytest.mark.parametrize(
    ("steps", "payload"),
    [*((1, text) for text in OF_ONE_STEP.split()), *((2, text) for text in OF_TWO_STEPS.split())],
)
def test_a_chunk_that_says_more_less_or_the_same_twice_is_refused(steps: int, payload: str) -> None:
    assert code_of(seal([bytes.fromhex(payload)], steps=steps)) == "log-content"


@pytest.mark.parametrize(
    "make",
    [
        lambda: seal([ZEROS], header=edit_header(total_steps=2**24, queries=1024), steps=2**24),
        lambda: seal([ONE], header=edit_header(counts=[2**32 - 1])),
        lambda: GOOD[:8] + struct.pack("<I", 2**31) + GOOD[12:],
        lambda: seal([b"\xff\xff\xff\xff\x0f\x02"]),
    ],
    ids=["steps", "k", "header", "flags"],
)
def test_what_is_announced_is_not_allocated(make: Attack) -> None:
    data = make()
    tracemalloc.start()
    try:
        code_of(data, max_steps=2**24)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=300), sealed=st.booleans(), steps=st.integers(0, 3))
def test_no_bytes_do_more_than_raise_the_documented_error(data: bytes, sealed: bool, steps: int) -> None:
    log = seal([data], steps=steps) if sealed else b"PMLLOG1\n" + data
    try:
        decoded = decode(log)
    except PackageError as exc:
        assert exc.code in {"log-limit", "log-header", "log-truncated", "log-corrupt", "log-content"}
    else:
        assert decoded.steps == steps


# --- replay and averaging --------------------------------------------------------------------------------


# --- journals --------------------------------------------------------------------------------------------


def journal(*payloads: bytes) -> bytes:
    """Return a journal of these entries (FORMAT 8.3)."""
    header = HEADER.to_bytes()
    crc = zlib.crc32(header)
    entries = [struct.pack("<H", len(payload)) + payload for payload in payloads]
    sealed = [entry + struct.pack("<I", zlib.crc32(entry, crc)) for entry in entries]
    return b"PMLJNL1\n" + struct.pack("<I", len(header)) + header + struct.pack("<I", crc) + b"".join(sealed)


def step(number: int) -> bytes:
    """Return the payload of a step with the coefficient -1."""
    return struct.pack("<IBd", number, 0, 1.5) + b"\x01"


JOURNAL_ATTACKS: list[tuple[str, Attack]] = [
    ("journal-header", lambda: b"PMLJNL9\n" + journal(step(0))[8:]),
    ("journal-header", lambda: flipped(journal(step(0)), 40)),
    ("journal-header", lambda: journal()[:-1]),
    ("journal-corrupt", lambda: flipped(journal(step(0), step(1)), len(journal()) + 6)),
    ("journal-corrupt", lambda: journal(step(0), step(2))),
    ("journal-corrupt", lambda: journal(step(0), step(1), step(1))),
]


@pytest.mark.parametrize(("code", "build"), JOURNAL_ATTACKS)
def test_device_refuses_journal(code: str, build: Attack, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(build())
    with pytest.raises(PackageError, match=f"^{code}:"):
        read_journal(path)


def test_an_honest_journal_is_read(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(journal(step(0), step(1)))
    assert [record.coefficients for record in read_journal(path).records] == [(-1,), (-1,)]
