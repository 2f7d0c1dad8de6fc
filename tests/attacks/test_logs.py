"""Malformed canonical logs and journals, at least one for each code of FORMAT 8 and 9.

The bytes are put together here, from the text of FORMAT, with checksums that fit where the lie is elsewhere.
"""

import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from permille.errors import PackageError
from permille.zo.aggregate import Contribution, aggregate
from permille.zo.exponents import ExponentsUse
from permille.zo.journal import read_journal
from permille.zo.log import decode_canonical
from permille.zo.replay import replay
from tests.unit.zo.logs import DIGEST, make_exponents, make_header

HEADER = make_header(queries=2, total_steps=4)
MAX_BYTES, MAX_STEPS, MAX_K = 4096, 100, 1000

Attack = Callable[[], bytes]
ATTACKS: list[tuple[str, Attack]] = []
JOURNAL_ATTACKS: list[tuple[str, Attack]] = []


def attack(code: str) -> Callable[[Attack], Attack]:
    """Register bytes of a canonical log that must be refused with this code."""

    def register(function: Attack) -> Attack:
        ATTACKS.append((code, function))
        return function

    return register


def journal_attack(code: str) -> Callable[[Attack], Attack]:
    """Register bytes of a journal that must be refused with this code."""

    def register(function: Attack) -> Attack:
        JOURNAL_ATTACKS.append((code, function))
        return function

    return register


def log(payload: bytes, *, header: bytes | None = None, steps: int = 2, tail: bytes = b"") -> bytes:
    """A log of one chunk (FORMAT 9.1)."""
    header = HEADER.to_bytes() if header is None else header
    head = b"PMLLOG1\n" + struct.pack("<I", len(header)) + header + struct.pack("<I", steps)
    chunk = struct.pack("<I", len(payload)) + payload
    crc = zlib.crc32(head)
    return head + struct.pack("<I", crc) + chunk + struct.pack("<I", zlib.crc32(chunk, crc)) + tail


def decode(data: bytes) -> list[list[int]]:
    """Read as a server does, with its limits and its package."""
    found = decode_canonical(data, max_bytes=MAX_BYTES, max_steps=MAX_STEPS, max_k=MAX_K)
    found.header.check_binding(
        package_digest=HEADER.package_digest, mask_digest=HEADER.mask_digest, counts=HEADER.counts
    )
    rows: list[list[int]] = found.coefficients_TQ.tolist()
    return rows


def test_an_honest_log_is_read() -> None:
    assert decode(log(b"\x00\x01\x02\x03\x04")) == [[-1, 1], [-2, 2]]


@attack("log-limit")
def more_bytes_than_accepted() -> bytes:
    return log(b"\x00\x01\x02\x03\x04", tail=bytes(MAX_BYTES))


@attack("log-limit")
def more_steps_than_the_header_allows() -> bytes:
    return log(b"\x00" + b"\x01" * 10, steps=5)


@attack("log-limit")
def header_of_four_gigabytes() -> bytes:
    return b"PMLLOG1\n" + b"\xff" * 8


@attack("log-limit")
def more_masked_weights_than_accepted() -> bytes:
    return log(b"\x00\x01\x02\x03\x04", header=make_header(total_steps=4, counts=(1001,)).to_bytes())


@attack("log-limit")
def coefficient_of_two_to_the_31() -> bytes:
    return log(b"\x00\x80\x80\x80\x80\x10\x00\x00\x00")


@attack("log-header")
def another_magic() -> bytes:
    return b"PMLLOG2\n" + log(b"\x00\x01\x02\x03\x04")[8:]


@attack("log-header")
def header_is_no_json() -> bytes:
    return log(b"\x00", header=b"\x80\x04\x95.")


@attack("log-header")
def header_with_an_unknown_key() -> bytes:
    return log(b"\x00", header=HEADER.to_bytes()[:-1] + b',"z":1}')


@attack("log-header")
def header_with_a_nan_learning_rate() -> bytes:
    return log(b"\x00", header=HEADER.to_bytes().replace((0.1).hex().encode(), b"nan"))


@attack("log-header")
def header_nested_a_hundred_thousand_deep() -> bytes:
    return log(b"\x00", header=b"[" * 3000)


@attack("log-truncated")
def cut_in_the_last_checksum() -> bytes:
    return log(b"\x00\x01\x02\x03\x04")[:-1]


@attack("log-truncated")
def no_bytes() -> bytes:
    return b""


@attack("log-corrupt")
def one_flipped_bit_in_a_coefficient() -> bytes:
    data = bytearray(log(b"\x00\x01\x02\x03\x04"))
    data[-5] ^= 1
    return bytes(data)


@attack("log-content")
def bytes_behind_the_end() -> bytes:
    return log(b"\x00\x01\x02\x03\x04", tail=b"\x00")


@attack("log-content")
def overlong_zero() -> bytes:
    return log(b"\x00\x01\x02\x03\x80\x00")


@attack("log-content")
def one_coefficient_too_many() -> bytes:
    return log(b"\x00\x01\x02\x03\x04\x05")


@attack("log-content")
def rejected_step_that_moves() -> bytes:
    return log(b"\x01\x00\x02\x01\x02\x03\x04")


@attack("log-content")
def unknown_flag() -> bytes:
    return log(b"\x01\x00\x04\x00\x00\x03\x04")


@attack("log-binding")
def log_of_another_package() -> bytes:
    other = make_header(total_steps=4, package_digest="sha256:" + "c" * 64)
    return log(b"\x00\x01\x02\x03\x04", header=other.to_bytes())


@attack("log-binding")
def log_of_another_mask() -> bytes:
    other = make_header(total_steps=4, mask_digest="sha256:" + "c" * 64)
    return log(b"\x00\x01\x02\x03\x04", header=other.to_bytes())


EXPONENTS = make_exponents(HEADER.k)
SCALED = make_header(total_steps=4, exponents=EXPONENTS.use)


@pytest.mark.parametrize(
    "lie",
    [{"largest": 1}, {"largest": 15}, {"sum_of_squares": 147}, {"digest": "sha256:" + "f" * 64}],
    ids=["bound", "too-much", "sigma", "digest"],
)
def test_what_a_header_claims_of_the_exponents_is_not_believed(lie: dict[str, Any]) -> None:
    """An understated bound would let the state leave the exact range and wrap."""
    header = replace(SCALED, exponents=replace(EXPONENTS.use, **lie))
    found = decode_canonical(
        log(b"\x00\x01\x02\x03\x04", header=header.to_bytes()), max_bytes=MAX_BYTES, max_steps=MAX_STEPS
    )
    with pytest.raises(PackageError) as refused:
        replay(found.header, found.coefficients_TQ, EXPONENTS)
    assert refused.value.code == "log-binding"


def test_a_log_of_scaled_directions_is_not_replayed_without_their_exponents() -> None:
    found = decode_canonical(
        log(b"\x00\x01\x02\x03\x04", header=SCALED.to_bytes()), max_bytes=MAX_BYTES, max_steps=MAX_STEPS
    )
    assert replay(found.header, found.coefficients_TQ, EXPONENTS).any()
    with pytest.raises(PackageError) as refused:
        replay(found.header, found.coefficients_TQ)
    assert refused.value.code == "log-binding"


@attack("log-limit")
def scaled_steps_beyond_the_exact_range() -> bytes:
    use = ExponentsUse(digest=DIGEST, largest=15, sum_of_squares=HEADER.k)
    header = replace(HEADER, exponents=use, queries=130)
    return log(b"\x00" + b"\xfe\xff\xff\xff\x0f" * 130, header=header.to_bytes(), steps=1)


def edited(**changes: Any) -> bytes:
    """A log whose header has other values."""
    fields = json.loads(SCALED.to_bytes()) | changes
    return log(b"\x00", header=json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())


@attack("log-header")
def header_with_an_exponent_of_4096() -> bytes:
    return edited(exponents={"digest": DIGEST, "largest": 4096, "sum_of_squares": 147})


@attack("log-header")
def header_of_another_version() -> bytes:
    return edited(version=2)


@attack("log-header")
def header_with_unknown_directions() -> bytes:
    return edited(directions="gaussian")


def test_one_run_is_not_averaged_with_itself() -> None:
    found = decode_canonical(log(b"\x00\x01\x02\x03\x04"), max_bytes=MAX_BYTES, max_steps=MAX_STEPS)
    once = Contribution(header=found.header, coefficients_TQ=found.coefficients_TQ, weight=1)
    with pytest.raises(PackageError) as refused:
        aggregate([once, once])
    assert refused.value.code == "log-duplicate"


def journal(*payloads: bytes) -> bytes:
    """A journal of these entries (FORMAT 8.3)."""
    header = HEADER.to_bytes()
    crc = zlib.crc32(header)
    entries = [struct.pack("<H", len(payload)) + payload for payload in payloads]
    sealed = [entry + struct.pack("<I", zlib.crc32(entry, crc)) for entry in entries]
    return b"PMLJNL1\n" + struct.pack("<I", len(header)) + header + struct.pack("<I", crc) + b"".join(sealed)


def step(number: int) -> bytes:
    """The payload of a step with coefficients -1 and 1."""
    return struct.pack("<IBd", number, 0, 1.5) + b"\x01\x02"


@journal_attack("journal-header")
def journal_of_another_magic() -> bytes:
    return b"PMLJNL9\n" + journal(step(0))[8:]


@journal_attack("journal-header")
def journal_with_a_flipped_bit_in_the_header() -> bytes:
    data = bytearray(journal(step(0)))
    data[40] ^= 1
    return bytes(data)


@journal_attack("journal-header")
def journal_cut_in_the_header() -> bytes:
    return journal()[:-1]


@journal_attack("journal-corrupt")
def journal_damaged_before_a_whole_entry() -> bytes:
    data = bytearray(journal(step(0), step(1)))
    data[len(journal()) + 6] ^= 1
    return bytes(data)


@journal_attack("journal-corrupt")
def journal_with_a_gap() -> bytes:
    return journal(step(0), step(2))


@pytest.mark.parametrize(("code", "build"), ATTACKS, ids=[build.__name__ for _, build in ATTACKS])
def test_server_refuses_log(code: str, build: Attack) -> None:
    with pytest.raises(PackageError) as refused:
        decode(build())
    assert refused.value.code == code


def test_an_honest_journal_is_read(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(journal(step(0), step(1)))
    assert [record.coefficients for record in read_journal(path).records] == [(-1, 1), (-1, 1)]


@pytest.mark.parametrize(
    ("code", "build"), JOURNAL_ATTACKS, ids=[build.__name__ for _, build in JOURNAL_ATTACKS]
)
def test_device_refuses_journal(code: str, build: Attack, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(build())
    with pytest.raises(PackageError) as refused:
        read_journal(path)
    assert refused.value.code == code
