"""Estimators: they descend, they agree with calculus, and nothing that is not finite becomes a step."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.errors import InputError
from permille.zo.directions import Distribution, direction, sigma
from permille.zo.estimators import Batch, forward_mode, spsa
from permille.zo.steps import apply_record, take_step
from permille.zo.lattice import step_unit_exponent_for, values
from permille.zo.header import EstimatorKind, LogHeader, Schedule
from permille.zo.records import StepFlag
from permille.zo.replay import replay
from tests.unit.zo.logs import BATCH, QuadraticEngine, kind_fields, make_header

K = 147
RNG = np.random.default_rng(5)
W_BASE = RNG.normal(0, 1, K).astype(np.float32)
TARGET = RNG.normal(0, 1, K).astype(np.float32)
CURVATURE = RNG.uniform(0.5, 2, K).astype(np.float32)


def make_engine() -> QuadraticEngine:
    return QuadraticEngine(TARGET, CURVATURE)


def loss_of(s_K: NDArray[np.int64], header: LogHeader) -> float:
    values_K = values(W_BASE, s_K, header.step_unit_exponent)
    return float(make_engine().losses(values_K[None], BATCH)[0])


class BrokenEngine(QuadraticEngine):
    """Returns fixed numbers, whatever it is asked."""

    def __init__(self, losses: list[float], derivatives: list[float]) -> None:
        super().__init__(TARGET, CURVATURE)
        self._losses = losses
        self._derivatives = derivatives

    def losses(self, values_VK: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        return np.array(self._losses, dtype=np.float32)

    def directional_derivatives(
        self, values_K: NDArray[np.float32], directions_QK: NDArray[np.float32], batch: Batch
    ) -> tuple[float, NDArray[np.float64]]:
        return float(np.mean(self._losses)), np.array(self._derivatives, dtype=np.float64)


@pytest.mark.parametrize("estimator", EstimatorKind)
@pytest.mark.parametrize(
    ("distribution", "schedule"),
    [(distribution, Schedule.CONSTANT) for distribution in Distribution]
    + [(Distribution.RADEMACHER, Schedule.LINEAR)],
)
def test_steps_reduce_the_loss_and_the_log_replays_to_the_same_state(
    estimator: EstimatorKind, distribution: Distribution, schedule: Schedule
) -> None:
    learning_rate, queries, steps = 0.02, 4, 150
    fields = {"queries": queries} | kind_fields(estimator, lower=4, upper=8)
    header = make_header(
        **fields,
        distribution=distribution,
        schedule=schedule,
        learning_rate=learning_rate,
        epsilon=1e-2,
        total_steps=steps,
        step_unit_exponent=step_unit_exponent_for(learning_rate, 20.0, queries),
    )
    engine = make_engine()
    s_K = np.zeros(K, dtype=np.int64)
    rows = []
    for step in range(steps):
        record = take_step(engine, BATCH, header, W_BASE, s_K, step, clip=None)
        assert record.flags is StepFlag.NONE
        apply_record(s_K, record, header)
        rows.append(record.coefficients)
    assert loss_of(s_K, header) < 0.2 * loss_of(np.zeros(K, dtype=np.int64), header)
    assert np.array_equal(replay(header, np.array(rows)), s_K)


def test_spsa_asks_for_both_signs_of_all_queries_in_one_call() -> None:
    engine = make_engine()
    take_step(engine, BATCH, make_header(queries=5), W_BASE, np.zeros(K, np.int64), 0, clip=None)
    assert engine.calls == [10]


@pytest.mark.parametrize("distribution", Distribution)
def test_both_estimators_give_the_gradient_along_z_over_sigma(distribution: Distribution) -> None:
    header = make_header(distribution=distribution, epsilon=1e-2, queries=3)
    s_K = np.zeros(K, dtype=np.int64)
    gradient_K = CURVATURE.astype(np.float64) * (W_BASE.astype(np.float64) - TARGET)
    expected = [
        gradient_K
        @ direction(
            seed=header.seed, step=7, query=query, counts=header.counts, distribution=distribution
        ).astype(np.float64)
        / sigma(distribution)
        for query in range(3)
    ]
    _, by_spsa = spsa(make_engine(), BATCH, header, W_BASE, s_K, 7)
    loss, by_forward = forward_mode(make_engine(), BATCH, header, W_BASE, s_K, 7)
    assert by_forward == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert by_spsa == pytest.approx(expected, rel=2e-2, abs=2e-2)
    assert loss == pytest.approx(loss_of(s_K, header))


def test_a_step_is_pure_and_depends_on_its_number() -> None:
    header = make_header()
    s_K = np.arange(K, dtype=np.int64)
    before = s_K.copy()
    first = take_step(make_engine(), BATCH, header, W_BASE, s_K, 3, clip=None)
    again = take_step(make_engine(), BATCH, header, W_BASE, s_K, 3, clip=None)
    other = take_step(make_engine(), BATCH, header, W_BASE, s_K, 4, clip=None)
    assert np.array_equal(s_K, before)
    assert first == again
    assert first.coefficients != other.coefficients


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clip", [None, 100.0])
def test_one_loss_that_is_not_finite_rejects_the_whole_step(bad: float, clip: float | None) -> None:
    engine = BrokenEngine([1.0, 2.0, bad, 1.0], [])
    record = take_step(engine, BATCH, make_header(queries=2), W_BASE, np.zeros(K, np.int64), 9, clip=clip)
    assert record.step == 9
    assert record.flags is StepFlag.REJECTED
    assert record.coefficients == (0, 0)
    assert not math.isfinite(record.loss)


@pytest.mark.parametrize(
    ("loss", "derivatives"), [(math.nan, [1.0, 1.0]), (1.0, [1.0, math.nan]), (1.0, [-math.inf, 0.0])]
)
def test_forward_mode_rejects_a_scalar_that_is_not_finite(loss: float, derivatives: list[float]) -> None:
    header = make_header(queries=2, estimator=EstimatorKind.FORWARD)
    engine = BrokenEngine([loss], derivatives)
    record = take_step(engine, BATCH, header, W_BASE, np.zeros(K, np.int64), 0, clip=100.0)
    assert record.flags is StepFlag.REJECTED
    assert record.coefficients == (0, 0)


def test_losses_whose_difference_overflows_are_rejected() -> None:
    engine = BrokenEngine([3e38, -3e38], [])
    header = make_header(queries=1, epsilon=1e-300)
    record = take_step(engine, BATCH, header, W_BASE, np.zeros(K, np.int64), 0, clip=None)
    assert record.flags is StepFlag.REJECTED


@pytest.mark.parametrize("exponent", [-26, -100, -149])
def test_a_coefficient_beyond_the_format_is_rejected_not_saturated(exponent: int) -> None:
    engine = BrokenEngine([2.0, 1.0], [])
    header = make_header(queries=1, step_unit_exponent=exponent)
    record = take_step(engine, BATCH, header, W_BASE, np.zeros(K, np.int64), 0, clip=None)
    assert record.flags is StepFlag.REJECTED
    assert record.coefficients == (0,)


def test_a_quotient_that_overflows_is_rejected() -> None:
    engine = BrokenEngine([3e38, 1.0], [])
    header = make_header(queries=1, step_unit_exponent=-149, learning_rate=1e250)
    record = take_step(engine, BATCH, header, W_BASE, np.zeros(K, np.int64), 0, clip=None)
    assert record.flags is StepFlag.REJECTED


def test_clipping_is_flagged_and_logged_as_applied() -> None:
    # projected_grad = (2 - 1) / (2 * 0.5) = 1 for the first query, -4 for the second
    engine = BrokenEngine([2.0, 1.0, 1.0, 5.0], [])
    header = make_header(queries=2, epsilon=0.5, learning_rate=1.0, step_unit_exponent=-4)
    free = take_step(engine, BATCH, header, W_BASE, np.zeros(K, np.int64), 0, clip=None)
    clipped = take_step(engine, BATCH, header, W_BASE, np.zeros(K, np.int64), 0, clip=2.0)
    unclipped = take_step(engine, BATCH, header, W_BASE, np.zeros(K, np.int64), 0, clip=4.0)
    assert free.coefficients == (-8, 32)
    assert clipped.coefficients == (-8, 16)
    assert (free.flags, clipped.flags, unclipped.flags) == (StepFlag.NONE, StepFlag.CLIPPED, StepFlag.NONE)
    assert free.loss == 2.25


def test_the_linear_schedule_falls_to_zero_at_the_last_step() -> None:
    engine = BrokenEngine([2.0, 1.0], [])
    header = make_header(
        queries=1,
        epsilon=0.5,
        learning_rate=1.0,
        step_unit_exponent=-10,
        schedule=Schedule.LINEAR,
        total_steps=4,
    )
    applied = [
        take_step(engine, BATCH, header, W_BASE, np.zeros(K, np.int64), step, clip=None).coefficients[0]
        for step in range(4)
    ]
    assert applied == [-1024, -768, -512, -256]


def test_an_engine_that_returns_another_number_of_losses_is_an_error() -> None:
    with pytest.raises(InputError, match="expected 4 scalars"):
        take_step(
            BrokenEngine([1.0], []),
            BATCH,
            make_header(queries=2),
            W_BASE,
            np.zeros(K, np.int64),
            0,
            clip=None,
        )
