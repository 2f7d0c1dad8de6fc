"""Tests of the canonical log: one byte string per sequence of steps, small, and stable in round trips."""

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from permille.errors import InputError
from permille.zo.log import CHUNK_STEPS, decode_canonical, encode_canonical
from permille.zo.records import StepFlag, StepRecord
from permille.zo.varints import encode_varints, zigzag
from tests.unit.zo.logs import make_header, make_records, random_rows, records_strategy

MIB = 1 << 20


@settings(max_examples=60, deadline=None)
@given(records=records_strategy(queries=3, max_steps=40))
def test_what_was_logged_comes_back_and_encodes_to_the_same_bytes(records: list[StepRecord]) -> None:
    header = make_header(queries=3)
    data = encode_canonical(header, records)
    log = decode_canonical(data, max_bytes=MIB, max_steps=5000)
    assert log.header == header
    assert log.coefficients_TQ.tolist() == [list(record.coefficients) for record in records]
    assert log.flags_T.tolist() == [int(record.flags) for record in records]
    again = [
        StepRecord(step=step, coefficients=tuple(row), loss=0.0, flags=StepFlag(flag))
        for step, (row, flag) in enumerate(
            zip(log.coefficients_TQ.tolist(), log.flags_T.tolist(), strict=True)
        )
    ]
    assert encode_canonical(log.header, again) == data


@pytest.mark.parametrize("steps", [0, 1, CHUNK_STEPS - 1, CHUNK_STEPS, CHUNK_STEPS + 1, 3 * CHUNK_STEPS])
def test_chunks_end_where_they_should(steps: int) -> None:
    rows = random_rows(steps)
    log = decode_canonical(encode_canonical(make_header(), make_records(rows)), max_bytes=MIB, max_steps=5000)
    assert log.steps == steps
    assert log.coefficients_TQ.tolist() == rows


def test_twenty_thousand_rademacher_steps_take_three_bytes_each() -> None:
    header = make_header(queries=1, total_steps=20_000, counts=(5000,) * 220)
    data = encode_canonical(header, make_records(random_rows(20_000, 1)))
    assert len(data) / 20_000 < 3


def test_the_layout_is_the_one_that_the_format_states() -> None:
    header = make_header(queries=1)
    header_bytes = header.to_bytes()
    records = [
        StepRecord(step=0, coefficients=(-1,), loss=0.0),
        StepRecord(step=1, coefficients=(0,), loss=0.0, flags=StepFlag.REJECTED),
        StepRecord(step=2, coefficients=(100,), loss=0.0, flags=StepFlag.CLIPPED),
    ]
    data = encode_canonical(header, records)
    head = b"PMLLOG1\n" + struct.pack("<I", len(header_bytes)) + header_bytes + struct.pack("<I", 3)
    # Two flagged steps, (1, 2) and (2, 1). Then zigzag -1 -> 1, 0 -> 0, 100 -> 200 = 0xC8 0x01.
    payload = bytes([2, 1, 2, 2, 1, 1, 0, 0xC8, 0x01])
    assert data[: len(head)] == head
    assert data[len(head) + 4 : -4] == struct.pack("<I", len(payload)) + payload


@pytest.mark.parametrize(
    ("number", "expected"),
    [(0, "00"), (-1, "01"), (1, "02"), (63, "7e"), (-64, "7f"), (64, "8001"), (2**31 - 1, "feffffff0f")],
)
def test_varint_bytes(number: int, expected: str) -> None:
    assert encode_varints(zigzag(np.array([number], dtype=np.int64))).hex() == expected


def one_step(*coefficients: int, step: int = 0, flags: StepFlag = StepFlag.NONE) -> list[StepRecord]:
    return [StepRecord(step=step, coefficients=coefficients, loss=0.0, flags=flags)]


WIDE = {"queries": 1024}


@pytest.mark.parametrize(
    ("changes", "records", "message"),
    [
        ({}, one_step(1, 2, step=1), "expected"),
        ({}, one_step(1), "expected"),
        ({}, one_step(1, 2**31), "expected"),
        ({}, one_step(-(2**31), 1), "expected"),
        ({}, one_step(1, 2, flags=StepFlag.REJECTED), "expected"),
        ({}, one_step(1, 2, flags=StepFlag(4)), "expected"),
        ({"total_steps": 3}, make_records(random_rows(4)), "at most 3 steps"),
        (WIDE, make_records([[2**31 - 1] * 1024] * 4097), r"2\*\*53"),
    ],
)
def test_records_that_do_not_fit_are_refused(
    changes: dict[str, Any], records: list[StepRecord], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        encode_canonical(make_header(**changes), records)
