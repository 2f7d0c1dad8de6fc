"""Replay: the integers of the reference, in any order, in any pieces, with the package's own exponents."""

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

from permille.errors import InputError, PackageError
from permille.zo.estimators import directions_of
from permille.zo.exponents import Exponents
from permille.zo.header import LogHeader
from permille.zo.lattice import STATE_LIMIT, state_digest
from permille.zo.log import decode_canonical, encode_canonical
from permille.zo.records import StepFlag, StepRecord, check_weight, weight_of_rows
from permille.zo.replay import replay
from permille.zo.steps import apply_record
from tests.unit.zo import reference
from tests.unit.zo.logs import (
    DIGEST,
    fields_of,
    header_kinds,
    make_exponents,
    make_header,
    make_records,
    random_rows,
)

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "directions.json").read_text())
COUNTS = (70, 0, 60)
K = sum(COUNTS)
EXPONENTS = make_exponents(K)
KINDS = header_kinds(COUNTS, EXPONENTS)


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
    exponents = Exponents(np.array(GOLDEN["exponents"][0], dtype=np.int8), DIGEST)
    s_K = replay(log.header, log.coefficients_TQ, exponents)
    assert s_K[:8].tolist() == golden["first"]
    assert digest_of(log.header, s_K) == golden["state_digest"]


@pytest.mark.parametrize("header", KINDS)
def test_an_independent_replay_of_the_bytes_finds_the_same_state(header: LogHeader) -> None:
    data = encode_canonical(header, make_records(random_rows(9, 3)))
    fields, rows = reference.read_log(data)
    expected = reference.state_digest(fields, reference.state(fields, rows, EXPONENTS.e_K.tolist()))
    log = decode_canonical(data, max_bytes=1 << 20, max_steps=100)
    assert digest_of(log.header, replay(log.header, log.coefficients_TQ, EXPONENTS)) == expected


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
        s_K += replay(header, coefficients_TQ[start:stop], EXPONENTS, start=start, threads=threads)
    assert np.array_equal(s_K, replay(header, coefficients_TQ, EXPONENTS))


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


def test_the_range_counts_the_largest_element_in_every_place_that_bounds_it() -> None:
    exponents = make_exponents(K, largest=15)
    header = make_header(queries=1, counts=COUNTS, exponents=exponents.use, total_steps=200)
    steps = STATE_LIMIT // 2**15 // (2**31 - 1)
    rows = np.full((steps, 1), 2**31 - 1)
    assert weight_of_rows(rows, header) == steps * (2**31 - 1) * 2**15
    replay(header, rows, exponents)
    with pytest.raises(InputError, match=r"2\*\*53"):
        check_weight(weight_of_rows(np.append(rows, rows[:1], axis=0), header))
    with pytest.raises(InputError, match=r"2\*\*53"):
        replay(header, np.append(rows, rows[:1], axis=0), exponents)
    s_K = np.full(K, STATE_LIMIT - 2**31, dtype=np.int64)
    with pytest.raises(InputError, match=r"2\*\*53"):
        apply_record(s_K, make_records([[2**31 - 1]])[0], header, exponents)
    assert (s_K == STATE_LIMIT - 2**31).all()


def other_exponents() -> list[Any]:
    less_K = EXPONENTS.e_K.copy()
    less_K[2:] = 0
    cases = {
        "none": None,
        "digest": Exponents(EXPONENTS.e_K, "sha256:" + "e" * 64),
        "numbers": Exponents(less_K, DIGEST),
        "k": Exponents(np.append(EXPONENTS.e_K, np.int8(0)), DIGEST),
    }
    return [pytest.param(exponents, id=name) for name, exponents in cases.items()]


@pytest.mark.parametrize("exponents", other_exponents())
def test_a_log_is_refused_where_its_exponents_are_not_there(exponents: Exponents | None) -> None:
    header = make_header(exponents=EXPONENTS.use, counts=COUNTS)
    rows = np.array(random_rows(5))
    for call in (
        lambda: replay(header, rows, exponents),
        lambda: directions_of(header, 0, exponents),
        lambda: apply_record(np.zeros(K, np.int64), make_records([[0, 0]])[0], header, exponents),
    ):
        with pytest.raises(PackageError, match=r"^log-binding:"):
            call()


def digest_of(header: LogHeader, s_K: NDArray[np.int64]) -> str:
    return state_digest(s_K, mask_digest=header.mask_digest, step_unit_exponent=header.step_unit_exponent)
