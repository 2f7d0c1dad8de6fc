"""Tests of replay: the integers of the reference, in any order and in any pieces."""

import json
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from permille.errors import InputError
from permille.zo.header import LogHeader
from permille.zo.lattice import STATE_LIMIT, state_digest
from permille.zo.log import decode_canonical, encode_canonical
from permille.zo.records import StepFlag, StepRecord, check_weight, weight_of_rows
from permille.zo.replay import replay
from permille.zo.steps import apply_record
from tests.unit.zo import reference
from tests.unit.zo.logs import (
    fields_of,
    header_kinds,
    make_header,
    make_records,
    random_rows,
)

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "directions.json").read_text())
COUNTS = (70, 0, 60)
K = sum(COUNTS)
KINDS = header_kinds(COUNTS)


@pytest.mark.parametrize("golden", GOLDEN["logs"])
def test_golden_logs_encode_to_their_bytes_and_replay_to_their_states(golden: dict[str, Any]) -> None:
    data = bytes.fromhex(golden["log"])
    log = decode_canonical(data, max_bytes=1 << 20, max_steps=100)
    records = [
        StepRecord(step=step, coefficients=tuple(row), loss=0.0, flags=StepFlag(flag))
        for step, (row, flag) in enumerate(
            zip(log.coefficients_TQ.tolist(), log.flags_T.tolist(), strict=True)
        )
    ]
    assert encode_canonical(log.header, records) == data
    s_K = replay(log.header, log.coefficients_TQ)
    assert s_K[:8].tolist() == golden["first"]
    assert digest_of(log.header, s_K) == golden["state_digest"]


@pytest.mark.parametrize("header", KINDS)
def test_an_independent_replay_of_the_bytes_finds_the_same_state(header: LogHeader) -> None:
    data = encode_canonical(header, make_records(random_rows(9, 3)))
    fields, rows = reference.read_log(data)
    expected = reference.state_digest(fields, reference.state(fields, rows))
    log = decode_canonical(data, max_bytes=1 << 20, max_steps=100)
    assert digest_of(log.header, replay(log.header, log.coefficients_TQ)) == expected


@pytest.mark.parametrize("size", [1, 1024, 2**31 - 1])
def test_replay_equals_the_reference_from_any_step(size: int) -> None:
    header = make_header(counts=(9, 0, 12))
    rows = np.random.default_rng(1).integers(-size, size + 1, (17, 2)).tolist()
    expected = reference.state(fields_of(header), rows, start=3)
    assert replay(header, np.array(rows), start=3).tolist() == expected


@settings(max_examples=40, deadline=None)
@given(
    header=st.sampled_from(KINDS),
    cuts=st.sets(st.integers(1, 29), max_size=6),
    order=st.randoms(use_true_random=False),
    threads=st.integers(1, 4),
)
def test_replay_is_the_same_in_every_order_and_for_every_split(
    header: LogHeader, cuts: set[int], order: Random, threads: int
) -> None:
    coefficients_TQ = np.array(random_rows(30, 3, seed=9))
    parts = list(pairwise([0, *sorted(cuts), 30]))
    order.shuffle(parts)
    s_K = np.zeros(K, dtype=np.int64)
    for start, stop in parts:
        s_K += replay(header, coefficients_TQ[start:stop], start=start, threads=threads)
    assert np.array_equal(s_K, replay(header, coefficients_TQ))


def test_an_empty_log_is_the_base() -> None:
    assert not replay(make_header(), np.zeros((0, 2), dtype=np.int64)).any()
    assert not replay(make_header(), np.zeros((5, 2), dtype=np.int64)).any()


@pytest.mark.parametrize(
    ("coefficients", "start"),
    [
        (np.zeros(4, dtype=np.int64), 0),
        (np.zeros((4, 3), dtype=np.int64), 0),
        (np.zeros((4, 2), dtype=np.int64), -1),
        (np.zeros((4, 2), dtype=np.int64), 2**24 - 3),
        (np.full((4, 2), 2**51, dtype=np.int64), 0),
        (np.full((4, 2), 2**62, dtype=np.int64), 0),
        (np.full((1, 2), -(2**63), dtype=np.int64), 0),
    ],
)
def test_what_cannot_be_a_log_is_refused(coefficients: NDArray[np.int64], start: int) -> None:
    with pytest.raises(InputError, match="expected"):
        replay(make_header(), coefficients, start=start)


@pytest.mark.parametrize("rows", [[[2**53]], [[2**52]] * 2, [[-(2**42)]] * 2048])
def test_the_range_ends_exactly_at_2_to_the_53(rows: list[list[int]]) -> None:
    header = make_header(queries=1, counts=(3,))
    assert replay(header, np.array(rows)).tolist() == reference.state(fields_of(header), rows)
    rows[0][0] += 1 if rows[0][0] > 0 else -1
    with pytest.raises(InputError, match="2\\*\\*53"):
        replay(header, np.array(rows))


def test_a_step_that_could_leave_the_range_is_refused_and_moves_nothing() -> None:
    rows = np.full((STATE_LIMIT // (2**31 - 1) // 1024, 1024), 2**31 - 1)
    assert weight_of_rows(rows) == rows.size * (2**31 - 1)
    with pytest.raises(InputError, match=r"2\*\*53"):
        check_weight(weight_of_rows(np.append(rows, rows[:1], axis=0)))
    s_K = np.full(K, STATE_LIMIT - 2**31 + 2, dtype=np.int64)
    with pytest.raises(InputError, match=r"2\*\*53"):
        apply_record(s_K, make_records([[2**31 - 1]])[0], make_header(queries=1, counts=COUNTS))
    assert (s_K == STATE_LIMIT - 2**31 + 2).all()


def digest_of(header: LogHeader, s_K: NDArray[np.int64]) -> str:
    return state_digest(s_K, mask_digest=header.mask_digest, step_unit_exponent=header.step_unit_exponent)
