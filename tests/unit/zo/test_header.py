"""Tests of the header: its only byte form, its limits, and its bindings."""

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from permille.choices import EstimatorKind
from permille.errors import InputError, PackageError
from permille.zo.header import BlockSplit, DirectionKind, LogHeader, Schedule
from tests.unit.zo.logs import DIGEST, kind_fields, make_header

K = 147

BYTES = (
    b'{"basis_steps":0,"counts":[130,0,17],"directions":"rademacher","epsilon":"0x1.0624dd2f1a9fcp-10","estimator":"spsa",'
    b'"first_tensor":0,"format":"permille-log","generator":"philox4x32-10","generator_version":1,'
    b'"learning_rate":"0x1.999999999999ap-4","mask_digest":"sha256:' + b"b" * 64 + b'",'
    b'"package_digest":"sha256:' + b"a" * 64 + b'","queries":2,"schedule":"constant",'
    b'"seed":"0123456789abcdef","split":null,"step_unit_exponent":-20,"total_steps":5000,"version":1}'
)


def test_a_header_has_the_bytes_that_the_format_states() -> None:
    assert make_header().to_bytes() == BYTES
    assert LogHeader.from_bytes(BYTES) == make_header()


@settings(max_examples=80, deadline=None)
@given(
    fields=st.fixed_dictionaries(
        {
            "seed": st.integers(0, 2**64 - 1),
            "schedule": st.sampled_from(Schedule),
            "queries": st.integers(2, 1024),
            "epsilon": st.floats(1e-300, 1e300),
            "learning_rate": st.floats(1e-300, 1e300),
            "total_steps": st.integers(1, 2**24),
            "step_unit_exponent": st.integers(-149, 64),
        }
    ),
    estimator=st.sampled_from(EstimatorKind),
    lower=st.integers(1, 16),
    pairs=st.integers(1, 16),
)
def test_a_header_has_one_byte_form(
    fields: dict[str, Any], estimator: EstimatorKind, lower: int, pairs: int
) -> None:
    header = make_header(**fields | kind_fields(estimator, lower=lower, upper=2 * lower * pairs))
    assert LogHeader.from_bytes(header.to_bytes()) == header


def split(**changes: Any) -> dict[str, Any]:
    block = BlockSplit(**{"first_upper_tensor": 2, "lower_queries": 1} | changes)
    return {"estimator": EstimatorKind.SPLIT, "queries": 3, "split": block}


@pytest.mark.parametrize(
    "changes",
    [
        {"package_digest": "sha256:abc"},
        {"mask_digest": "md5:" + "0" * 64},
        *({"seed": bad} for bad in (2**64, -1)),
        *({"queries": bad} for bad in (0, 1025)),
        {"estimator": EstimatorKind.GRADIENT},
        {"directions": DirectionKind.GROUPS},
        {"estimator": EstimatorKind.GRADIENT, "directions": DirectionKind.GROUPS, "queries": 8193},
        {"queries": 1, "estimator": EstimatorKind.ONE_SIDED},
        *({"epsilon": bad} for bad in (0.0, math.nan)),
        {"learning_rate": math.inf},
        *({"total_steps": bad} for bad in (0, 2**24 + 1)),
        *({"step_unit_exponent": bad} for bad in (-150, 65, True)),
        *({"counts": bad} for bad in ((), (0, 0), (-1, 5), (2**32 - 1, 2**32 - 1))),
        {"split": BlockSplit(first_upper_tensor=2, lower_queries=1)},
        {"estimator": EstimatorKind.SPLIT, "queries": 3},
        *(split() | {"queries": bad} for bad in (2, 4)),
        *(split(first_upper_tensor=bad) for bad in (0, 3)),
        split(lower_queries=0),
        *({"first_tensor": bad} for bad in (-1, 3)),
        {"first_tensor": 1, "counts": (130, 0, 0)},
        split() | {"first_tensor": 2},
        *(split() | {"counts": bad} for bad in ((0, 0, 147), (130, 17, 0))),
    ],
)
def test_a_header_outside_the_limits_cannot_be_made(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"expected|does not take|must be|field split|[Aa] split|is masked"):
        make_header(**changes)


def test_names_become_members_and_unknown_ones_are_refused() -> None:
    header = make_header(estimator="forward", schedule="linear", directions="rademacher")
    assert header.estimator is EstimatorKind.FORWARD and header.schedule is Schedule.LINEAR
    for name in ("estimator", "schedule", "directions"):
        with pytest.raises(InputError, match=f"'forwards' is not a {name}"):
            make_header(**{name: "forwards"})


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("unknown", 1),
        ("first_upper_tensor", "2"),
        *(("lower_queries", bad) for bad in (-1, 10**30)),
    ],
)
def test_bytes_with_a_split_outside_the_limits_are_refused(field: str, bad: object) -> None:
    header = make_header(**kind_fields(EstimatorKind.SPLIT))
    fields = json.loads(header.to_bytes())
    fields["split"][field] = bad
    _refused(fields)


@pytest.mark.parametrize("bad", [None, False, 0, [], "x", {}, {"digest": 1}])
def test_bytes_with_a_split_of_another_shape_are_refused(bad: object) -> None:
    fields = json.loads(make_header(**kind_fields(EstimatorKind.SPLIT)).to_bytes())
    _refused(fields | {"split": bad})


def test_bytes_with_true_in_place_of_1_are_refused() -> None:
    fields = json.loads(make_header(step_unit_exponent=1).to_bytes())
    _refused(fields | {"step_unit_exponent": True})


def _refused(fields: dict[str, Any]) -> None:
    data = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    with pytest.raises(PackageError, match=r"^log-header:"):
        LogHeader.from_bytes(data)


def test_sigma_is_that_of_the_directions() -> None:
    assert make_header().sigma == 1.0
    groups = make_header(**kind_fields(EstimatorKind.GRADIENT), queries=7)
    assert groups.sigma == math.sqrt(1 / 7)


@pytest.mark.parametrize("wrong", ["package_digest", "mask_digest", "counts"])
def test_a_log_of_another_package_mask_or_shape_is_refused(wrong: str) -> None:
    header = make_header()
    right: dict[str, Any] = {
        name: getattr(header, name) for name in ("package_digest", "mask_digest", "counts")
    }
    header.check_binding(**right)
    with pytest.raises(PackageError, match="log-binding"):
        header.check_binding(**right | {wrong: (147,) if wrong == "counts" else DIGEST})
