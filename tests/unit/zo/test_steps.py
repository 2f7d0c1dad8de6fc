"""Tests of steps: they reduce the loss, are pure, and are never taken with numbers that are not finite."""

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.choices import EstimatorKind
from permille.errors import InputError
from permille.zo.estimators import Descent, directions_of
from permille.zo.header import DirectionKind, LogHeader, Schedule
from permille.zo.lattice import STATE_LIMIT, step_unit_exponent_for, values
from permille.zo.records import StepFlag, StepRecord
from permille.zo.replay import replay
from permille.zo.steps import apply_record, take_step
from tests.unit.zo import reference
from tests.unit.zo.logs import (
    BATCH,
    ESTIMATES,
    FixedEngine,
    QuadraticEngine,
    fields_of,
    kind_fields,
    make_header,
)

K = 147
RNG = np.random.default_rng(5)
W_BASE = RNG.normal(0, 1, K).astype(np.float32)
ENGINE = QuadraticEngine(RNG.normal(0, 1, K).astype(np.float32), RNG.uniform(0.5, 2, K).astype(np.float32))
ZERO = np.zeros(K, dtype=np.int64)


def loss_of(s_K: NDArray[np.int64], header: LogHeader) -> float:
    values_K = values(W_BASE, s_K, header.step_unit_exponent)
    return float(ENGINE.losses(values_K[None], BATCH)[0])


def step_of(
    losses: list[float], slope: float = 0.0, *, normalised: bool = False, **changes: Any
) -> StepRecord:
    """Return step 0 of an engine that returns these numbers."""
    descent = Descent(header=make_header(**changes), w_base_K=W_BASE)
    return take_step(FixedEngine(losses, slope), BATCH, descent, ZERO, 0, normalised=normalised)


@pytest.mark.parametrize("estimator", ESTIMATES)
@pytest.mark.parametrize("schedule", Schedule)
def test_steps_reduce_the_loss_and_the_log_replays_to_the_same_state(
    estimator: EstimatorKind, schedule: Schedule
) -> None:
    learning_rate, queries, steps = 0.02, 4, 150
    header = make_header(
        **{"queries": queries} | kind_fields(estimator, lower=4, upper=8),
        schedule=schedule,
        learning_rate=learning_rate,
        epsilon=1e-2,
        total_steps=steps,
        step_unit_exponent=step_unit_exponent_for(learning_rate, 20.0, queries),
    )
    descent = Descent(header=header, w_base_K=W_BASE)
    s_K = ZERO.copy()
    rows = []
    for step in range(steps):
        record = take_step(ENGINE, BATCH, descent, s_K, step, normalised=False)
        assert record.flags is StepFlag.NONE
        apply_record(s_K, record, header)
        rows.append(record.coefficients)
    assert loss_of(s_K, header) < 0.3 * loss_of(ZERO, header)
    assert np.array_equal(replay(header, np.array(rows)), s_K)


def test_a_step_is_pure_and_depends_on_its_number() -> None:
    descent = Descent(header=make_header(), w_base_K=W_BASE)
    s_K = np.arange(K, dtype=np.int64)
    first, again = (take_step(ENGINE, BATCH, descent, s_K, 3, normalised=False) for _ in range(2))
    other = take_step(ENGINE, BATCH, descent, s_K, 4, normalised=False)
    assert np.array_equal(s_K, np.arange(K))
    assert first == again
    assert first.coefficients != other.coefficients


@pytest.mark.parametrize("kind", ESTIMATES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("normalised", [False, True])
def test_one_loss_that_is_not_finite_rejects_the_whole_step(
    kind: EstimatorKind, bad: float, normalised: bool
) -> None:
    few = {EstimatorKind.ONE_SIDED: [1.0, bad], EstimatorKind.FORWARD: [bad]}
    losses = few.get(kind, [1.0, 2.0, bad, 1])
    record = step_of(losses, 1.0, normalised=normalised, **kind_fields(kind))
    assert record.flags is StepFlag.REJECTED
    assert not any(record.coefficients)
    assert not math.isfinite(record.loss)


@pytest.mark.parametrize("slope", [math.nan, -math.inf])
def test_exact_derivatives_reject_a_gradient_that_is_not_finite(slope: float) -> None:
    record = step_of([1.0], slope, normalised=True, estimator=EstimatorKind.FORWARD)
    assert (record.flags, record.coefficients) == (StepFlag.REJECTED, (0, 0))


@pytest.mark.parametrize(
    ("losses", "changes"),
    [
        ([3e38, -3e38], {"epsilon": 1e-300}),
        ([2.0, 1.0], {"step_unit_exponent": -26}),
        ([2.0, 1.0], {"step_unit_exponent": -149}),
        ([3e38, 1.0], {"step_unit_exponent": -149, "learning_rate": 1e250}),
    ],
    ids=["difference", "coefficient", "far", "quotient"],
)
def test_what_the_format_cannot_hold_is_rejected_not_saturated(
    losses: list[float], changes: dict[str, Any]
) -> None:
    record = step_of(losses, queries=1, **changes)
    assert (record.flags, record.coefficients) == (StepFlag.REJECTED, (0,))


def test_a_normalised_step_is_as_long_as_its_learning_rate_says() -> None:
    # projected_grad = (2 - 1) / (2 * 0.5) = 1 for the first query and -4 for the second: rms sqrt(17 / 2)
    fields: dict[str, Any] = {"epsilon": 0.5, "learning_rate": 1.0, "step_unit_exponent": -10}
    free, normalised = (step_of([2.0, 1.0, 1.0, 5.0], normalised=n, **fields) for n in (False, True))
    steep = step_of([2e30, 1e30, 1e30, 5e30], normalised=True, **fields)
    assert free.coefficients == (-512, 2048)
    assert normalised.coefficients == steep.coefficients == (-176, 702)
    assert step_of([1.0, 1.0, 1.0, 1.0], normalised=True, **fields).coefficients == (0, 0)


def test_one_sided_steps_of_groups_reduce_the_loss_and_replay() -> None:
    header = make_header(
        estimator=EstimatorKind.ONE_SIDED,
        directions=DirectionKind.GROUPS,
        queries=8,
        schedule=Schedule.LINEAR,
        learning_rate=0.5 * math.sqrt(8 / K),
        epsilon=1e-2,
        total_steps=60,
        step_unit_exponent=-20,
    )
    descent = Descent(header=header, w_base_K=W_BASE)
    s_K, rows = ZERO.copy(), []
    for step in range(60):
        z_QK = directions_of(header, step)
        assert (np.count_nonzero(z_QK, axis=0) == 1).all()
        record = take_step(ENGINE, BATCH, descent, s_K, step, normalised=True)
        before_K = s_K.copy()
        apply_record(s_K, record, header)
        assert np.array_equal(s_K - before_K, np.array(record.coefficients) @ z_QK)
        rows.append(record.coefficients)
    assert loss_of(s_K, header) < 0.7 * loss_of(ZERO, header)
    assert np.array_equal(replay(header, np.array(rows)), s_K)


def test_the_linear_schedule_falls_to_zero_at_the_last_step() -> None:
    fields = {"queries": 1, "epsilon": 0.5, "learning_rate": 1.0, "step_unit_exponent": -10}
    header = make_header(**fields, schedule=Schedule.LINEAR, total_steps=4)
    descent, engine = Descent(header=header, w_base_K=W_BASE), FixedEngine([2.0, 1.0])
    taken = [take_step(engine, BATCH, descent, ZERO, step, normalised=False) for step in range(4)]
    assert [record.coefficients for record in taken] == [(-1024,), (-768,), (-512,), (-256,)]


def test_the_step_of_a_block_is_the_mean_over_its_own_directions() -> None:
    kind = kind_fields(EstimatorKind.SPLIT, lower=1, upper=4)
    losses = [1.0, 2, 4, 8, 16, 32, 64, 128]
    record = step_of(losses, **kind, epsilon=0.5, learning_rate=1.0, step_unit_exponent=-4)
    assert record.coefficients == (900, 4, 16, 64, 256)


def test_an_engine_that_returns_another_number_of_losses_is_an_error() -> None:
    with pytest.raises(InputError, match="expected 4 losses"):
        step_of([1.0])


def test_a_record_adds_the_references_integers_and_a_rejected_one_none() -> None:
    header = make_header(counts=(20, 3))
    s_K = np.arange(23, dtype=np.int64)
    apply_record(s_K, StepRecord(step=4, coefficients=(700, -9), loss=0.0), header)
    moved = reference.state(fields_of(header), [[700, -9]], start=4)
    assert s_K.tolist() == [before + c for before, c in zip(range(23), moved, strict=True)]
    before_K = s_K.copy()
    apply_record(s_K, StepRecord(step=5, coefficients=(0, 0), loss=math.nan), header)
    assert np.array_equal(s_K, before_K)


def test_a_step_out_of_the_exact_range_is_refused_and_changes_nothing() -> None:
    header = make_header(queries=1, counts=(4,))
    s_K = np.array([0, STATE_LIMIT - 10, 0, 0], dtype=np.int64)
    before = s_K.copy()
    with pytest.raises(InputError, match="2\\*\\*53"):
        apply_record(s_K, StepRecord(step=0, coefficients=(11,), loss=0.0), header)
    assert np.array_equal(s_K, before)
    apply_record(s_K, StepRecord(step=0, coefficients=(10,), loss=0.0), header)


def test_a_state_of_another_size_is_refused() -> None:
    header = make_header(queries=1, counts=(4,))
    with pytest.raises(InputError, match="expected a state of 4"):
        apply_record(np.zeros(5, np.int64), StepRecord(step=0, coefficients=(1,), loss=0.0), header)
