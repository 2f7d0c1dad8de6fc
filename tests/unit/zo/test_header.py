"""Version 2 of the header: its one byte form, its limits, and what it says of a step."""

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from permille.errors import InputError, PackageError
from permille.zo.directions import Distribution
from permille.zo.header import EstimatorKind, LogHeader
from permille.zo.header_parts import BasisUse
from permille.zo.header import BlockSplit
from permille.zo.exponents import ExponentsUse
from permille.zo.schedule import Schedule
from tests.unit.zo.logs import kind_fields, layered_fields, make_header, make_layers

K = 147
BASIS = BasisUse(
    digest="sha256:" + "c" * 64,
    rank=4,
    steps=10,
    bound=300,
    sum_squares=90_000,
    epsilon=2e-3,
    learning_rate=0.5,
)
EXPONENTS = ExponentsUse(digest="sha256:" + "d" * 64, largest=2, sum_squares=588)
SPLIT = BlockSplit(first_upper_tensor=2, lower_queries=1)

VERSION_1 = (
    b'{"counts":[130,0,17],"distribution":"rademacher","epsilon":"0x1.0624dd2f1a9fcp-10","estimator":"spsa",'
    b'"format":"permille-log","generator":"philox4x32-10","generator_version":1,'
    b'"learning_rate":"0x1.999999999999ap-4","mask_digest":"sha256:' + b"b" * 64 + b'",'
    b'"package_digest":"sha256:' + b"a" * 64 + b'","queries":2,"schedule":"constant",'
    b'"seed":"0123456789abcdef","step_unit_exponent":-20,"total_steps":5000,"version":1}'
)


def test_a_header_without_new_parts_keeps_the_bytes_of_version_1() -> None:
    assert make_header().to_bytes() == VERSION_1
    assert LogHeader.from_bytes(VERSION_1) == make_header()


@settings(max_examples=80, deadline=None)
@given(
    basis=st.one_of(
        st.none(),
        st.builds(
            BasisUse,
            digest=st.just(BASIS.digest),
            rank=st.integers(1, 256),
            steps=st.integers(1, 5000),
            bound=st.integers(1, 128),
            sum_squares=st.integers(1, 1 << 14),
            epsilon=st.floats(1e-300, 1e300),
            learning_rate=st.floats(1e-300, 1e300),
        ),
    ),
    exponents=st.one_of(
        st.none(),
        st.builds(
            ExponentsUse,
            digest=st.just(EXPONENTS.digest),
            largest=st.integers(1, 15),
            sum_squares=st.integers(K, K * 4**15),
        ),
    ),
    estimator=st.sampled_from(EstimatorKind),
    lower=st.integers(1, 16),
    pairs=st.integers(1, 16),
)
def test_a_header_has_one_byte_form(
    basis: BasisUse | None, exponents: ExponentsUse | None, estimator: EstimatorKind, lower: int, pairs: int
) -> None:
    fields = kind_fields(estimator, lower=lower, upper=2 * lower * pairs)
    header = make_header(**fields, basis=basis, exponents=exponents)
    data = header.to_bytes()
    assert LogHeader.from_bytes(data) == header
    new = basis or exponents or estimator in (EstimatorKind.ONE_SIDED, EstimatorKind.SPLIT)
    assert json.loads(data)["version"] == header.version == (2 if new else 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"split": SPLIT},
        {"estimator": EstimatorKind.SPLIT, "queries": 3},
        {"estimator": EstimatorKind.SPLIT, "queries": 2, "split": SPLIT},
        {"estimator": EstimatorKind.SPLIT, "queries": 4, "split": SPLIT},
        {
            "estimator": EstimatorKind.SPLIT,
            "queries": 3,
            "split": BlockSplit(first_upper_tensor=0, lower_queries=1),
        },
        {
            "estimator": EstimatorKind.SPLIT,
            "queries": 3,
            "split": BlockSplit(first_upper_tensor=3, lower_queries=1),
        },
        {
            "estimator": EstimatorKind.SPLIT,
            "queries": 3,
            "split": BlockSplit(first_upper_tensor=1, lower_queries=0),
        },
        {"estimator": EstimatorKind.SPLIT, "queries": 3, "split": SPLIT, "counts": (0, 0, 147)},
        {"estimator": EstimatorKind.SPLIT, "queries": 3, "split": SPLIT, "counts": (130, 17, 0)},
        {"estimator": EstimatorKind.ONE_SIDED, "queries": 1},
        {"basis": BASIS, "total_steps": 9},
        {"exponents": ExponentsUse(digest=EXPONENTS.digest, largest=1, sum_squares=K - 1)},
        {"exponents": ExponentsUse(digest=EXPONENTS.digest, largest=1, sum_squares=K * 4**15 + 1)},
    ],
)
def test_parts_that_contradict_the_header_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        make_header(**changes)


@pytest.mark.parametrize(
    ("part", "field", "bad"),
    [
        ("basis", "digest", "sha256:abc"),
        ("basis", "rank", 0),
        ("basis", "rank", 257),
        ("basis", "rank", 4.0),
        ("basis", "steps", 0),
        ("basis", "steps", True),
        ("basis", "bound", 0),
        ("basis", "bound", 128 * 4 + 1),
        ("basis", "sum_squares", 0),
        ("basis", "sum_squares", 10**30),
        ("basis", "epsilon", "nan"),
        ("basis", "epsilon", 0.5),
        ("basis", "learning_rate", "-0x1.0000000000000p+0"),
        ("basis", "learning_rate", "0x1p-1"),
        ("exponents", "digest", None),
        ("exponents", "largest", 0),
        ("exponents", "largest", 16),
        ("exponents", "sum_squares", "588"),
        ("split", "first_upper_tensor", "2"),
        ("split", "lower_queries", -1),
        ("split", "lower_queries", 10**30),
    ],
)
def test_bytes_with_a_part_outside_the_limits_are_refused(part: str, field: str, bad: object) -> None:
    header = make_header(**kind_fields(EstimatorKind.SPLIT), basis=BASIS, exponents=EXPONENTS)
    fields = json.loads(header.to_bytes())
    fields[part][field] = bad
    _refused(fields)


@pytest.mark.parametrize("part", ["basis", "exponents", "split"])
@pytest.mark.parametrize("bad", [False, 0, [], "x", {}, {"digest": 1}])
def test_bytes_with_a_part_of_another_shape_are_refused(part: str, bad: object) -> None:
    fields = json.loads(make_header(**kind_fields(EstimatorKind.SPLIT), basis=BASIS).to_bytes())
    fields[part] = bad
    _refused(fields)


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields.pop("exponents"),
        lambda fields: fields.update(version=1),
        lambda fields: fields.update(version=3),
        lambda fields: fields["basis"].update(unknown=1),
        lambda fields: fields["basis"].pop("bound"),
        lambda fields: fields.update(basis=None),
    ],
)
def test_a_second_byte_form_of_version_2_is_refused(change: Any) -> None:
    fields = json.loads(make_header(basis=BASIS).to_bytes())
    change(fields)
    _refused(fields)


@pytest.mark.parametrize("part", ["basis", "exponents", "split"])
def test_a_version_1_header_with_an_empty_part_is_refused(part: str) -> None:
    _refused(json.loads(VERSION_1) | {part: None})


def _refused(fields: dict[str, Any]) -> None:
    data = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    with pytest.raises(PackageError) as caught:
        LogHeader.from_bytes(data)
    assert caught.value.code == "log-header"


@pytest.mark.parametrize("distribution", Distribution)
def test_sigma_and_bound_are_those_of_the_steps_directions(distribution: Distribution) -> None:
    plain = make_header(distribution=distribution)
    header = make_header(distribution=distribution, basis=BASIS, exponents=EXPONENTS)
    assert header.sigma_at(9) == math.sqrt(90_000 / K)
    assert header.bound_at(9) == 300
    assert header.sigma_at(10) == 2 * plain.sigma_at(10)
    assert header.bound_at(10) == 4 * plain.bound_at(10)


def test_each_kind_of_step_has_its_rates() -> None:
    header = make_header(basis=BASIS, schedule=Schedule.LINEAR, total_steps=20)
    assert (header.epsilon_at(9), header.epsilon_at(10)) == (2e-3, 1e-3)
    assert header.learning_rate_at(5) == pytest.approx(0.5 * 0.75)
    assert header.learning_rate_at(10) == pytest.approx(0.1 * 0.5)


def test_layers_say_of_themselves_what_numpy_says() -> None:
    layers = make_layers(K)
    header = make_header(**layered_fields(layers))
    assert layers.basis is not None
    assert layers.exponents is not None
    assert header.basis is not None
    assert header.exponents is not None
    u_KR = layers.basis.u_KR.astype(int)
    assert header.basis.bound == max(sum(abs(u) for u in row) for row in u_KR.tolist())
    assert header.basis.sum_squares == sum(u * u for row in u_KR.tolist() for u in row)
    assert header.basis.rank == 5
    assert header.exponents.sum_squares == sum(4**e for e in layers.exponents.e_K.tolist())
    assert header.exponents.largest == int(np.max(layers.exponents.e_K))
