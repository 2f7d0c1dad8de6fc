"""Learned and scaled directions, two blocks: the reference's integers, in any order, and hostile layers."""

import hashlib
import json
import tracemalloc
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
from permille.zo.aggregate import Contribution, aggregate
from permille.zo.directions import Distribution
from permille.zo.steps import apply_record
from permille.zo.header import EstimatorKind, LogHeader
from permille.zo.header import BlockSplit
from permille.zo.journal import Journal, read_journal
from permille.zo.lattice import STATE_LIMIT
from permille.zo.layers import NO_LAYERS, Basis, DirectionLayers
from permille.zo.exponents import Exponents
from permille.zo.learned import product, signs
from permille.zo.log import decode_canonical, encode_canonical
from permille.zo.records import weight_of_rows
from permille.zo.replay import replay, replay_journal
from permille.zo.estimators import directions_of
from tests.unit.zo import reference
from tests.unit.zo.logs import (
    kind_fields,
    layered_fields,
    make_header,
    make_layers,
    make_records,
    random_rows,
)

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "layered_directions.json").read_text())
COUNTS = (70, 0, 60)
K = sum(COUNTS)
LAYERS = make_layers(K)
SPLIT = kind_fields(EstimatorKind.SPLIT, lower=1, upper=2)


def golden_layers() -> DirectionLayers:
    u_KR = np.frombuffer(bytes.fromhex(GOLDEN["basis_rows_as_bytes"]), dtype=np.int8)
    return DirectionLayers(
        basis=Basis(u_KR.reshape(-1, GOLDEN["rank"]), "sha256:" + "c" * 64),
        exponents=Exponents(np.array(GOLDEN["exponents"], dtype=np.int8), "sha256:" + "d" * 64),
    )


def golden_header(split: list[int] | None, distribution: str) -> LogHeader:
    fields: dict[str, Any] = {"queries": 3}
    if split is not None:
        blocks = BlockSplit(first_upper_tensor=split[0], lower_queries=split[1])
        fields |= {"estimator": EstimatorKind.SPLIT, "split": blocks}
    return make_header(
        **fields,
        **layered_fields(golden_layers(), basis_steps=GOLDEN["basis_steps"]),
        seed=int(GOLDEN["seed"], 16),
        counts=tuple(GOLDEN["counts"]),
        distribution=Distribution(distribution),
        total_steps=20_000,
    )


@pytest.mark.parametrize(
    "vector", GOLDEN["vectors"], ids=lambda vector: f"{vector['step']}-{vector['query']}"
)
def test_directions_are_the_golden_vectors(vector: dict[str, Any]) -> None:
    header = golden_header(vector["split"], vector["distribution"])
    z_K = directions_of(header, vector["step"], golden_layers())[vector["query"]]
    assert z_K[:12].tolist() == vector["first"]
    assert int(z_K.sum()) == vector["sum"]
    assert hashlib.sha256(z_K.astype("<i4").tobytes()).hexdigest() == vector["sha256"]


@pytest.mark.parametrize("state", GOLDEN["states"])
def test_replay_ends_at_the_golden_states(state: dict[str, Any]) -> None:
    header = golden_header(state["split"], "rademacher")
    s_K = replay(header, np.array(GOLDEN["coefficients"]), golden_layers())
    assert s_K[:8].tolist() == state["first"]
    assert hashlib.sha256(s_K.astype("<i8").tobytes()).hexdigest() == state["sha256"]


def variants() -> list[Any]:
    """Every kind of header: with and without each part."""
    parts = layered_fields(LAYERS, basis_steps=7)
    found = []
    for names in ((), ("basis",), ("exponents",), ("basis", "exponents")):
        for kind in ({}, SPLIT):
            for distribution in (Distribution.RADEMACHER, Distribution.BINOMIAL4):
                label = "-".join([*names, "split" if kind else "one", distribution.value])
                chosen = {name: parts[name] for name in names}
                header = make_header(
                    **{"queries": 3} | kind | chosen, counts=COUNTS, distribution=distribution
                )
                found.append(pytest.param(header, id=label))
    return found


@pytest.mark.parametrize("header", variants())
def test_replay_equals_the_reference(header: LogHeader) -> None:
    rows = np.array(random_rows(12, 3, seed=4))
    split = None
    if header.split is not None:
        split = (header.split.first_upper_tensor, header.split.lower_queries)
    assert LAYERS.basis is not None
    assert LAYERS.exponents is not None
    expected = reference.layered_state(
        header.seed,
        rows.tolist(),
        header.counts,
        header.distribution,
        u=LAYERS.basis.u_KR.tolist() if header.basis else None,
        basis_steps=header.basis_steps,
        exponents=LAYERS.exponents.e_K.tolist() if header.exponents else None,
        split=split,
    )
    assert replay(header, rows, LAYERS).tolist() == expected


@pytest.mark.parametrize("header", variants())
def test_replay_equals_the_steps_applied_one_by_one(header: LogHeader) -> None:
    s_K = np.zeros(K, dtype=np.int64)
    rows = random_rows(20, 3, seed=5)
    for record in make_records(rows):
        apply_record(s_K, record, header, LAYERS)
    assert np.array_equal(replay(header, np.array(rows), LAYERS), s_K)


@settings(max_examples=40, deadline=None)
@given(
    header=st.sampled_from([parameter.values[0] for parameter in variants()]),
    cuts=st.sets(st.integers(1, 29), max_size=6),
    order=st.randoms(use_true_random=False),
    block=st.integers(1, 4),
    threads=st.integers(1, 2),
)
def test_replay_is_the_same_in_every_order_and_for_every_split(
    header: LogHeader, cuts: set[int], order: Random, block: int, threads: int
) -> None:
    coefficients_TQ = np.array(random_rows(30, 3, seed=9))
    parts = list(pairwise([0, *sorted(cuts), 30]))
    order.shuffle(parts)
    s_K = np.zeros(K, dtype=np.int64)
    for start, stop in parts:
        rows_TQ = coefficients_TQ[start:stop]
        s_K += replay(header, rows_TQ, LAYERS, start=start, block=block, threads=threads)
    assert np.array_equal(s_K, replay(header, coefficients_TQ, LAYERS))


@pytest.mark.parametrize("header", variants())
def test_no_element_is_beyond_the_bound_and_sigma_is_the_root_mean_square(header: LogHeader) -> None:
    for step in (0, 6, 7):
        z_QK = directions_of(header, step, LAYERS).astype(np.int64)
        assert np.abs(z_QK).max() <= header.bound_at(step)
    many_QK = np.concatenate([directions_of(header, step, LAYERS) for step in range(7, 400)]).astype(float)
    inside = many_QK[many_QK != 0] if header.distribution is Distribution.RADEMACHER else None
    if inside is not None and header.split is None:
        assert np.sqrt((inside**2).mean()) == pytest.approx(header.sigma_at(7))


def test_sigma_of_learned_directions_is_their_root_mean_square() -> None:
    header = make_header(**layered_fields(LAYERS, basis_steps=3000), counts=COUNTS)
    z_DK = np.concatenate([directions_of(header, step, LAYERS) for step in range(3000)]).astype(float)
    assert np.sqrt((z_DK**2).mean()) == pytest.approx(header.sigma_at(0), rel=0.02)
    assert abs(z_DK.mean()) < 0.02 * header.sigma_at(0)


def test_learned_directions_take_little_more_than_the_directions_themselves() -> None:
    k, queries = 1 << 18, 8
    basis = Basis(np.ones((k, 1), dtype=np.int8), "sha256:" + "c" * 64)
    layers = DirectionLayers(basis=basis)
    use = basis.use(steps=3, epsilon=1e-3, learning_rate=0.1)
    header = make_header(counts=(k,), queries=queries, basis=use)
    directions_of(header, 0, layers)
    tracemalloc.start()
    z_QK = directions_of(header, 0, layers)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert z_QK.flags.c_contiguous and z_QK.dtype == np.int32
    assert peak < 1.75 * z_QK.nbytes


def test_signs_are_fair_and_differ_from_every_tensors_stream() -> None:
    b_DR = signs(seed=3, steps=list(range(2000)), queries=[0] * 2000, rank=40)
    assert set(np.unique(b_DR).tolist()) == {-1, 1}
    assert np.abs(b_DR.mean(axis=0)).max() < 0.1
    header = make_header(seed=3, counts=(40,), queries=1)
    assert not np.array_equal(directions_of(header, 5)[0], b_DR[5])


@settings(max_examples=40, deadline=None)
@given(
    size=st.sampled_from([1, 1000, 2**24 // 500, 2**24, 2**40, STATE_LIMIT // 700]), seed=st.integers(0, 99)
)
def test_a_product_is_exact_in_whatever_it_is_computed(size: int, seed: int) -> None:
    assert LAYERS.basis is not None
    assert LAYERS.basis.bound <= 700
    a_R1 = np.random.default_rng(seed).integers(-size, size + 1, (5, 1))
    exact = [
        sum(u * int(a) for u, a in zip(row, a_R1[:, 0], strict=True)) for row in LAYERS.basis.u_KR.tolist()
    ]
    assert product(LAYERS.basis, a_R1)[:, 0].tolist() == exact


def test_a_product_beyond_the_exact_range_is_refused() -> None:
    assert LAYERS.basis is not None
    with pytest.raises(InputError, match=r"2\*\*53"):
        product(LAYERS.basis, np.full((5, 1), STATE_LIMIT // LAYERS.basis.bound + 1))


def test_the_range_counts_each_step_with_its_own_bound() -> None:
    header = make_header(**layered_fields(LAYERS, basis_steps=2), counts=COUNTS)
    rows = np.array([[1, -1], [0, 5], [7, 0]])
    learned, plain = header.bound_at(0), header.bound_at(2)
    assert weight_of_rows(rows, header) == 7 * learned + 7 * plain
    assert weight_of_rows(rows, header, start=1) == 2 * learned + 12 * plain
    assert weight_of_rows(rows, header, start=2) == 14 * plain


def test_a_log_that_could_leave_the_exact_range_is_refused_by_its_own_bound() -> None:
    header = make_header(
        **layered_fields(LAYERS, basis_steps=9000), counts=COUNTS, queries=1, total_steps=9000
    )
    fitting = STATE_LIMIT // header.bound_at(0) // (2**31 - 1)
    rows = np.full((fitting, 1), 2**31 - 1)
    replay(header, rows, LAYERS)
    with pytest.raises(InputError, match=r"2\*\*53"):
        replay(header, np.full((fitting + 1, 1), 2**31 - 1), LAYERS)
    s_K = np.full(K, STATE_LIMIT - 2**31, dtype=np.int64)
    with pytest.raises(InputError, match=r"2\*\*53"):
        apply_record(s_K, make_records([[2**31 - 1]])[0], header, LAYERS)
    assert (s_K == STATE_LIMIT - 2**31).all()


# --- binding


def other_layers() -> list[Any]:
    assert LAYERS.basis is not None
    assert LAYERS.exponents is not None
    basis, exponents = LAYERS.basis, LAYERS.exponents
    turned_KR = basis.u_KR.copy()
    turned_KR[:, 0] = 0
    shifted_K = exponents.e_K.copy()
    shifted_K[2:] = 0
    cases = {
        "none": NO_LAYERS,
        "no-basis": DirectionLayers(exponents=exponents),
        "no-exponents": DirectionLayers(basis=basis),
        "digest": DirectionLayers(basis=Basis(basis.u_KR, "sha256:" + "e" * 64), exponents=exponents),
        "rank": DirectionLayers(basis=Basis(basis.u_KR[:, :4], basis.digest), exponents=exponents),
        "numbers": DirectionLayers(basis=Basis(turned_KR, basis.digest), exponents=exponents),
        "k": DirectionLayers(basis=Basis(basis.u_KR[:-1], basis.digest), exponents=exponents),
        "exponents": DirectionLayers(basis=basis, exponents=Exponents(shifted_K, exponents.digest)),
        "exponents-digest": DirectionLayers(
            basis=basis, exponents=Exponents(exponents.e_K, "sha256:" + "e" * 64)
        ),
    }
    return [pytest.param(layers, id=name) for name, layers in cases.items()]


@pytest.mark.parametrize("layers", other_layers())
def test_a_log_is_refused_where_its_layers_are_not_there(layers: DirectionLayers) -> None:
    header = make_header(**layered_fields(LAYERS), counts=COUNTS)
    rows = np.array(random_rows(5))
    s_K = np.zeros(K, dtype=np.int64)
    contribution = Contribution(header=header, coefficients_TQ=rows, weight=1)
    for call in (
        lambda: replay(header, rows, layers),
        lambda: directions_of(header, 0, layers),
        lambda: apply_record(s_K, make_records([[0, 0]])[0], header, layers),
        lambda: aggregate([contribution], layers),
    ):
        with pytest.raises(PackageError) as caught:
            call()
        assert caught.value.code == "log-binding"


@pytest.mark.parametrize(
    "make",
    [
        lambda: Basis(np.zeros((3, 2), dtype=np.int8), "d"),
        lambda: Basis(np.ones((3, 257), dtype=np.int8), "d"),
        lambda: Basis(np.ones(3, dtype=np.int8), "d"),
        lambda: Basis(np.ones((3, 2), dtype=np.int16), "d"),
        lambda: Exponents(np.array([0, 16], dtype=np.int8), "d"),
        lambda: Exponents(np.array([-1, 3], dtype=np.int8), "d"),
        lambda: Exponents(np.array([1, 3], dtype=np.int8), "d"),
        lambda: Exponents(np.array([0, 0], dtype=np.int8), "d"),
        lambda: Exponents(np.array([0, 1], dtype=np.int64), "d"),
    ],
)
def test_arrays_that_are_no_layer_are_refused(make: Any) -> None:
    with pytest.raises(InputError, match="expected"):
        make()


# --- both forms of the log, and averages


@pytest.mark.parametrize("header", variants())
def test_both_forms_of_a_log_come_back_and_replay_alike(header: LogHeader, tmp_path: Path) -> None:
    rows = random_rows(40, 3, seed=2)
    data = encode_canonical(header, make_records(rows))
    log = decode_canonical(data, max_bytes=1 << 20, max_steps=100)
    assert log.header == header
    assert encode_canonical(log.header, make_records(log.coefficients_TQ.tolist())) == data
    with Journal.create(tmp_path / "journal", header) as journal:
        for record in make_records(rows):
            journal.append(record)
        s_K = replay_journal(journal, LAYERS)
    assert np.array_equal(s_K, replay(log.header, log.coefficients_TQ, LAYERS))


def test_a_torn_journal_is_cut_and_goes_on_to_the_same_state(tmp_path: Path) -> None:
    header = make_header(**SPLIT, **layered_fields(LAYERS, basis_steps=4), counts=COUNTS)
    records = make_records(random_rows(9, 3))
    whole = tmp_path / "whole"
    with Journal.create(whole, header) as journal:
        ends = [whole.stat().st_size]
        for record in records:
            journal.append(record)
            ends.append(whole.stat().st_size)
        expected = replay_journal(journal, LAYERS)
    for kept, (first, second) in enumerate(pairwise(ends)):
        torn = tmp_path / f"torn-{kept}"
        torn.write_bytes(whole.read_bytes()[: (first + second) // 2])
        assert len(read_journal(torn).records) == kept
        with Journal.open(torn) as journal:
            for record in records[kept:]:
                journal.append(record)
            assert np.array_equal(replay_journal(journal, LAYERS), expected)


def test_the_journal_refuses_a_step_beyond_the_learned_bound(tmp_path: Path) -> None:
    header = make_header(**layered_fields(LAYERS, basis_steps=5000), counts=COUNTS, queries=1024)
    big = make_records([[2**31 - 1] * 1024] * 20)
    with Journal.create(tmp_path / "journal", header) as journal, pytest.raises(InputError, match=r"2\*\*53"):
        for record in big:
            journal.append(record)


def test_an_average_of_different_kinds_is_the_sum_of_its_scaled_logs() -> None:
    headers = [parameter.values[0] for parameter in variants()]
    contributions = [
        Contribution(header=header, coefficients_TQ=np.array(random_rows(15, 3, seed=n)), weight=1)
        for n, header in enumerate(headers)
    ]
    found = aggregate(contributions, LAYERS, guard_bits=0)
    count = len(headers)
    expected = np.zeros(K, dtype=np.int64)
    for contribution in contributions:
        rounded = [[round(c / count) for c in row] for row in contribution.coefficients_TQ.tolist()]
        expected += replay(contribution.header, np.array(rounded), LAYERS)
    assert np.array_equal(found.s_K, expected)


def test_a_log_and_its_negative_give_the_base_again() -> None:
    for parameter in variants():
        header: LogHeader = parameter.values[0]
        rows: NDArray[np.int64] = np.array(random_rows(10, 3))
        s_K = replay(header, rows, LAYERS)
        assert s_K.any()
        s_K += replay(header, -rows, LAYERS)
        assert not s_K.any()


def test_an_average_that_only_the_learned_bound_takes_out_of_range_is_refused() -> None:
    header = make_header(
        **layered_fields(LAYERS, basis_steps=9000), counts=COUNTS, queries=1, total_steps=9000
    )
    steps = STATE_LIMIT // header.bound_at(0) // (2**31 - 1)
    rows = np.full((steps, 1), 2**31 - 1)
    contribution = Contribution(header=header, coefficients_TQ=rows, weight=1)
    aggregate([contribution], LAYERS, guard_bits=0)
    with pytest.raises(PackageError) as caught:
        aggregate([contribution], LAYERS, guard_bits=1)
    assert caught.value.code == "log-limit"
