"""Tests of steps in a basis: they reduce the loss, and their log replays exactly, in any division."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.choices import EstimatorKind
from permille.errors import InputError, PackageError
from permille.package.basis import Basis
from permille.zo.estimators import Descent, estimate
from permille.zo.header import DirectionKind, LogHeader
from permille.zo.journal import Journal
from permille.zo.lattice import STATE_LIMIT, values
from permille.zo.log import decode_canonical, encode_canonical
from permille.zo.records import StepFlag
from permille.zo.replay import replay
from permille.zo.steps import JournaledSteps, apply_record, basis_step, take_step
from tests.unit.zo.logs import BATCH, FixedEngine, QuadraticEngine, make_header, make_records

K = 147
RNG = np.random.default_rng(3)
W_BASE = RNG.normal(0, 1, K).astype(np.float32)
TARGET = RNG.normal(0, 1, K).astype(np.float32)
ENGINE = QuadraticEngine(TARGET, np.ones(K, np.float32))


def make_basis(rows: int = 4) -> Basis:
    """Return a basis whose first column leads halfway to the target."""
    column_RK = RNG.normal(0, 1, (rows, K))
    column_RK[0] += 2 * (TARGET - W_BASE)
    unit_RK = np.linalg.qr(column_RK.T)[0].T
    columns_RK = np.rint(unit_RK * (127 / np.abs(unit_RK).max())).astype(np.int8)
    return Basis(columns_RK=columns_RK, reach=0.01, length=0.8)


BASIS = make_basis()


def basis_header(**changes: Any) -> LogHeader:
    fields: dict[str, Any] = {
        "estimator": EstimatorKind.ONE_SIDED,
        "directions": DirectionKind.GROUPS,
        "queries": 4,
        "total_steps": 12,
        "basis_steps": 5,
        "step_unit_exponent": -24,
    }
    return make_header(**fields | changes)


def run_steps(descent: Descent, steps: JournaledSteps, until: int) -> None:
    before: tuple[int, ...] = ()
    while steps.done < until:
        if steps.step < descent.header.basis_steps:
            loss, slope_Q = estimate(ENGINE, BATCH, descent, steps.s_K, steps.step)
            record = basis_step(loss, slope_Q, descent, steps.step, before)
        else:
            record = take_step(ENGINE, BATCH, descent, steps.s_K, steps.step, normalised=True)
        steps.append(record)
        before = record.coefficients


def loss_of(s_K: NDArray[np.int64], header: LogHeader) -> float:
    return float(ENGINE.losses(values(W_BASE, s_K, header.step_unit_exponent)[None], BATCH)[0])


def test_few_steps_in_the_basis_reach_most_of_what_it_can_express(tmp_path: Path) -> None:
    header = basis_header()
    descent = Descent(header=header, w_base_K=W_BASE, basis=BASIS)
    with Journal.create(tmp_path / "journal", header) as journal:
        steps = JournaledSteps(journal, descent)
        run_steps(descent, steps, 5)
        units_RK = BASIS.columns_RK / np.linalg.norm(BASIS.columns_RK.astype(float), axis=1)[:, None]
        possible = 0.5 * float(np.sum((units_RK @ (TARGET - W_BASE).astype(float)) ** 2))
        fell = loss_of(steps.s_K * 0, header) - loss_of(steps.s_K, header)
        assert fell > 0.5 * possible


def test_a_log_with_both_phases_replays_to_the_same_state_in_any_division(tmp_path: Path) -> None:
    header = basis_header()
    descent = Descent(header=header, w_base_K=W_BASE, basis=BASIS)
    with Journal.create(tmp_path / "journal", header) as journal:
        steps = JournaledSteps(journal, descent)
        run_steps(descent, steps, 12)
        data = encode_canonical(header, journal.records())
        np.testing.assert_array_equal(steps.before(12), steps.s_K)
    log = decode_canonical(data, max_bytes=1 << 20, max_steps=100)
    assert log.header == header
    c_TQ = log.coefficients_TQ
    # The slow sum of FORMAT 7.5, step by step and column by column.
    slow_K = sum(int(c_TQ[t, i]) * BASIS.columns_RK[i].astype(np.int64) for t in range(5) for i in range(4))
    groups_K = replay(basis_header(basis_steps=0), c_TQ[5:], start=5)
    np.testing.assert_array_equal(slow_K + groups_K, steps.s_K)
    for cut in range(13):
        parts = (replay(header, c_TQ[part], start=part.start, basis=BASIS, threads=2)
                 for part in (slice(0, cut), slice(cut, 12)))  # fmt: skip
        np.testing.assert_array_equal(sum(parts), steps.s_K)


def test_momentum_is_in_the_logged_integers() -> None:
    descent = Descent(header=basis_header(), w_base_K=W_BASE, basis=BASIS)
    record = basis_step(1.0, np.zeros(4), descent, 1, (10, -10, 100, 0))
    assert record.coefficients == (8, -8, 80, 0)


@pytest.mark.parametrize("slope", [np.nan, np.inf])
def test_a_slope_that_is_not_finite_rejects_the_step(slope: float) -> None:
    descent = Descent(header=basis_header(), w_base_K=W_BASE, basis=BASIS)
    record = basis_step(1.0, np.array([1.0, slope, 0, 0]), descent, 0, ())
    assert StepFlag.REJECTED in record.flags and not any(record.coefficients)


def test_a_step_beyond_the_format_is_rejected() -> None:
    descent = Descent(header=basis_header(step_unit_exponent=-100), w_base_K=W_BASE, basis=BASIS)
    assert StepFlag.REJECTED in basis_step(1.0, np.ones(4), descent, 0, ()).flags


def test_losses_without_a_difference_move_nothing() -> None:
    descent = Descent(header=basis_header(), w_base_K=W_BASE, basis=BASIS)
    loss, slope_Q = estimate(FixedEngine([2.0] * 4, 0.0), BATCH, descent, np.zeros(K, np.int64), 0)
    assert loss == 2.0
    assert basis_step(loss, slope_Q, descent, 0, ()).coefficients == (0, 0, 0, 0)


def test_derivatives_are_those_along_the_columns_whatever_their_signs() -> None:
    """On a linear function, the differences are exact up to what the mean hides."""
    descent = Descent(header=basis_header(), w_base_K=W_BASE, basis=BASIS)
    gradient_K = (W_BASE - TARGET).astype(float)
    along_R = BASIS.columns_RK @ gradient_K / BASIS.norm
    mean_R = np.mean(
        [estimate(ENGINE, BATCH, descent, np.zeros(K, np.int64), step)[1] for step in range(4)], axis=0
    )
    assert np.corrcoef(mean_R, along_R)[0, 1] > 0.95


@pytest.mark.parametrize(
    "changes",
    [
        {"basis_steps": -1},
        {"basis_steps": 13},
        {"basis_steps": 1, "first_tensor": 2},
        {"basis_steps": 1, "estimator": EstimatorKind.GRADIENT},
        {"basis_steps": 1, "directions": DirectionKind.RADEMACHER},
        {"basis_steps": True},
    ],
)
def test_a_header_that_takes_no_basis_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="basis_steps must be an integer"):
        basis_header(**changes)
    fields = json.loads(basis_header().to_bytes()) | {
        name: value.value if isinstance(value, EstimatorKind | DirectionKind) else value
        for name, value in changes.items()
    }
    with pytest.raises(PackageError, match=r"^log-header"):
        LogHeader.from_bytes(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())


def test_a_replay_without_a_fitting_basis_is_refused() -> None:
    header, c_TQ = basis_header(), np.ones((2, 4), np.int64)
    with pytest.raises(InputError, match=r"the package has none"):
        replay(header, c_TQ)
    with pytest.raises(InputError, match=r"the package has none"):
        apply_record(np.zeros(K, np.int64), make_records([[1, 1, 1, 1]])[0], header)
    with pytest.raises(InputError, match="moves more columns than the 3"):
        replay(header, c_TQ, basis=make_basis(3))


def test_coefficients_of_basis_steps_count_127_times() -> None:
    limit, sizes = 2**31 - 1, {"queries": 16, "total_steps": 5000}
    steps = STATE_LIMIT // (127 * 16 * limit)
    too_many = make_records([[limit] * 16] * (steps + 1))
    encode_canonical(basis_header(**sizes, basis_steps=5000), too_many[:-1])
    encode_canonical(basis_header(**sizes, basis_steps=0), too_many)
    with pytest.raises(InputError, match=r"within 2\*\*53"):
        encode_canonical(basis_header(**sizes, basis_steps=5000), too_many)
