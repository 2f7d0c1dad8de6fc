"""Tests of directions without overlap: groups of the reference, orthogonal projections, and records."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from permille.choices import EstimatorKind
from permille.errors import InputError
from permille.zo.estimators import Descent, estimate
from permille.zo.groups import group_sums, grouping
from permille.zo.header import LogHeader
from permille.zo.records import StepFlag
from permille.zo.steps import apply_record, change_step
from tests.unit.zo import reference
from tests.unit.zo.logs import BATCH, QuadraticEngine, kind_fields, make_header

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "directions.json").read_text())
COUNTS = (70, 0, 1, 129)
K = sum(COUNTS)


def gradient_header(**changes: Any) -> LogHeader:
    fields = {"queries": 7, "counts": COUNTS} | kind_fields(EstimatorKind.GRADIENT)
    return make_header(**fields | changes)


def dense(header: LogHeader, step: int) -> NDArray[np.int64]:
    """Return all directions of a step, [q, k]."""
    found = grouping(header, step)
    z_QK = np.zeros((header.queries, header.k), np.int64)
    z_QK[found.group_K, np.arange(header.k)] = found.sign_K
    return z_QK


@pytest.mark.parametrize("vector", [vector for vector in GOLDEN["vectors"] if vector["groups"]])
def test_groups_match_the_golden_vectors(vector: dict[str, Any]) -> None:
    header = gradient_header(seed=int(vector["seed"], 16), counts=(5, 0, 129, 40), queries=3)
    z_K = dense(header, vector["step"])[vector["query"]]
    assert z_K[:12].tolist() == vector["first"]
    assert int(z_K.sum()) == vector["sum"]
    assert hashlib.sha256(z_K.astype("<i4").tobytes()).hexdigest() == vector["sha256"]


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    step=st.integers(0, 2**24 - 1),
    queries=st.integers(1, 8192),
    counts=st.lists(st.integers(0, 70), min_size=1, max_size=4).filter(any),
)
def test_any_grouping_equals_the_reference(seed: int, step: int, queries: int, counts: list[int]) -> None:
    found = grouping(gradient_header(seed=seed, queries=queries, counts=tuple(counts)), step)
    expected = [
        reference.group_and_sign(seed, step, queries, tensor, rank)
        for tensor, count in enumerate(counts)
        for rank in range(count)
    ]
    assert list(zip(found.group_K.tolist(), found.sign_K.tolist(), strict=True)) == expected


def test_groups_and_signs_are_fair() -> None:
    found = grouping(gradient_header(counts=(200_000,), queries=50), 3)
    sizes_Q = np.bincount(found.group_K, minlength=50)
    assert abs(sizes_Q - 4000).max() < 5 * np.sqrt(4000)
    assert abs(int(found.sign_K.sum(dtype=np.int64))) < 5 * np.sqrt(200_000)


def test_weights_of_several_tasks_and_steps_of_several_parts_are_one_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    header = gradient_header(counts=(5000, 3, 130))
    c_TQ = np.random.default_rng(0).integers(-9, 10, (21, 7))
    whole_K = group_sums(header, c_TQ)
    monkeypatch.setattr("permille.zo.groups._SPAN", 1024)
    monkeypatch.setattr("permille.zo.groups._COEFFICIENTS", 1)
    np.testing.assert_array_equal(group_sums(header, c_TQ, threads=2), whole_K)


def test_a_projection_is_orthogonal() -> None:
    header = gradient_header()
    change_K = np.random.default_rng(0).standard_normal(K)
    found = grouping(header, 5)
    z_QK = dense(header, 5)
    kept_K = found.project(change_K) @ z_QK
    np.testing.assert_allclose(z_QK @ (change_K - kept_K), 0, atol=1e-9)
    np.testing.assert_allclose(found.project(kept_K) @ z_QK, kept_K, atol=1e-12)


def test_an_empty_group_has_nothing_of_a_change() -> None:
    found_Q = grouping(gradient_header(queries=8192), 0).project(np.ones(K))
    assert np.isfinite(found_Q).all()
    # Only K of the 8192 groups can have a weight.
    assert (found_Q == 0).sum() > 7900


def test_a_record_moves_the_state_by_the_projection_rounded_to_the_lattice() -> None:
    header = gradient_header()
    change_K = np.random.default_rng(1).standard_normal(K).astype(np.float32)
    record = change_step(change_K, 2.5, header, 3)
    assert (record.step, record.loss, record.flags) == (3, 2.5, StepFlag.NONE)
    z_QK = dense(header, 3)
    exact_Q = (z_QK @ change_K.astype(np.float64)) / (z_QK**2).sum(axis=1) * 2.0**20
    assert np.abs(np.array(record.coefficients) - exact_Q).max() <= 0.5
    s_K = np.zeros(K, dtype=np.int64)
    apply_record(s_K, record, header)
    np.testing.assert_array_equal(s_K, np.array(record.coefficients) @ z_QK)


@pytest.mark.parametrize(("change", "loss"), [(np.nan, 1.0), (np.inf, 1.0), (1e9, 1.0), (0.1, np.nan)])
def test_what_is_not_finite_or_too_large_is_rejected_and_moves_nothing(change: float, loss: float) -> None:
    change_K = np.full(K, 0.1, np.float32)
    change_K[17] = change
    record = change_step(change_K, loss, gradient_header(), 0)
    assert record.flags is StepFlag.REJECTED
    assert set(record.coefficients) == {0}


def test_losses_alone_make_no_such_step() -> None:
    engine = QuadraticEngine(np.zeros(K, np.float32), np.ones(K, np.float32))
    descent = Descent(header=gradient_header(), w_base_K=np.zeros(K, np.float32))
    with pytest.raises(InputError, match="expected an estimator of losses or derivatives, got gradient"):
        estimate(engine, BATCH, descent, np.zeros(K, np.int64), 0)
