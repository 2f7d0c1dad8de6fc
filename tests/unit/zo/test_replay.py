"""Replay: the reference's integers, in any order, in any pieces."""

import math
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from permille.errors import InputError
from permille.zo.steps import apply_record
from permille.zo.lattice import state_digest
from permille.zo.directions import Distribution
from permille.zo.records import StepRecord
from permille.zo.log import decode_canonical, encode_canonical
from permille.zo.replay import replay
from tests.unit.zo import reference
from tests.unit.zo.logs import make_header, make_records, random_rows


@pytest.mark.parametrize("distribution", Distribution)
@pytest.mark.parametrize("size", [1, 1024, 2**31 - 1])
def test_replay_equals_the_reference(distribution: Distribution, size: int) -> None:
    header = make_header(distribution=distribution, counts=(9, 0, 12))
    rows = np.random.default_rng(1).integers(-size, size + 1, (17, 2)).tolist()
    expected = reference.state(header.seed, rows, header.counts, distribution, start=3)
    assert replay(header, np.array(rows), start=3).tolist() == expected


@pytest.mark.parametrize("distribution", [Distribution.RADEMACHER, Distribution.BINOMIAL16])
def test_replay_equals_the_steps_applied_one_by_one(distribution: Distribution) -> None:
    header = make_header(distribution=distribution, counts=(3000, 1, 700))
    s_K = np.zeros(header.k, dtype=np.int64)
    rows = random_rows(50)
    for record in make_records(rows):
        apply_record(s_K, record, header)
    assert np.array_equal(replay(header, np.array(rows)), s_K)


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.sets(st.integers(1, 39), max_size=10),
    order=st.randoms(use_true_random=False),
    block=st.integers(1, 60),
    threads=st.integers(1, 3),
)
def test_replay_is_the_same_in_every_order_and_for_every_split(
    cuts: set[int], order: Random, block: int, threads: int
) -> None:
    header = make_header(counts=(700, 30, 1100))
    coefficients_TQ = np.array(random_rows(40, seed=9))
    edges = [0, *sorted(cuts), 40]
    parts = list(pairwise(edges))
    order.shuffle(parts)
    s_K = np.zeros(header.k, dtype=np.int64)
    for start, stop in parts:
        s_K += replay(header, coefficients_TQ[start:stop], start=start, block=block, threads=threads)
    assert np.array_equal(s_K, replay(header, coefficients_TQ))


def test_a_log_and_its_negative_give_the_base_again() -> None:
    header = make_header()
    coefficients_TQ = np.array(random_rows(30))
    s_K = replay(header, coefficients_TQ)
    assert s_K.any()
    s_K += replay(header, -coefficients_TQ)
    assert not s_K.any()


def test_a_flipped_coefficient_changes_the_state_digest() -> None:
    header = make_header()
    rows = random_rows(30)
    states = []
    for _ in range(2):
        data = encode_canonical(header, make_records(rows))
        log = decode_canonical(data, max_bytes=10**6, max_steps=1000)
        s_K = replay(log.header, log.coefficients_TQ)
        states.append(state_digest(s_K, mask_digest=header.mask_digest, step_unit_exponent=-20))
        rows[17][1] ^= 1
    assert states[0] != states[1]


def test_an_empty_log_is_the_base() -> None:
    header = make_header()
    assert not replay(header, np.zeros((0, 2), dtype=np.int64)).any()
    assert not replay(header, np.zeros((5, 2), dtype=np.int64)).any()


def test_both_widths_of_the_sums_agree() -> None:
    header = make_header(queries=1, counts=(500,))
    small = np.full((32, 1), 2**31 // 32 - 1)
    large = small.copy()
    large[0] += 64
    z_K = replay(header, np.array([[1]]))
    assert np.array_equal(replay(header, large), replay(header, small) + 64 * z_K)


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


def test_the_range_counts_the_largest_element() -> None:
    header = make_header(queries=1, counts=(3,), distribution=Distribution.BINOMIAL64)
    assert replay(header, np.array([[2**48]])).any()
    with pytest.raises(InputError, match="2\\*\\*53"):
        replay(header, np.array([[2**48 + 1]]))


@pytest.mark.parametrize("rows", [[[2**53]], [[2**52]] * 2, [[-(2**42)]] * 2048])
def test_the_range_ends_exactly_at_2_to_the_53(rows: list[list[int]]) -> None:
    header = make_header(queries=1, counts=(3,))
    assert replay(header, np.array(rows)).tolist() == reference.state(header.seed, rows, (3,), "rademacher")
    rows[0][0] += 1 if rows[0][0] > 0 else -1
    with pytest.raises(InputError, match="2\\*\\*53"):
        replay(header, np.array(rows))


def test_twenty_thousand_steps_of_one_weight_stay_within_a_random_walk() -> None:
    header = make_header(queries=1, counts=(64,), total_steps=20_000)
    s_K = replay(header, np.ones((20_000, 1), dtype=np.int64))
    assert np.abs(s_K).max() < 6 * math.sqrt(20_000)
    assert (s_K % 2 == 0).all()


def test_rejected_steps_add_nothing() -> None:
    header = make_header()
    s_K = np.arange(header.k, dtype=np.int64)
    before = s_K.copy()
    apply_record(s_K, StepRecord(step=0, coefficients=(0, 0), loss=math.nan), header)
    assert np.array_equal(s_K, before)
