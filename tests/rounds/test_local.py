"""Tests of a device's steps of a round: equal to plain arithmetic, replayable, bitwise equal after kills."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.choices import EstimatorKind
from permille.errors import InputError, OperatorError
from permille.training.adam import unit_exponent
from permille.zo.estimators import Batch, directions_of
from permille.zo.groups import grouping
from permille.zo.header import DirectionKind
from permille.zo.lattice import step_unit_exponent_for, values
from permille_rounds.contribution import Contribution
from permille_rounds.definition import MAX_CONTRIBUTED, Definition
from permille_rounds.local import JOURNAL, MOMENTS, LocalRound, take_local_steps
from permille_rounds.rounds import History, combine
from tests.rounds.federations import make_contributions, make_definition, split_log
from tests.unit.zo.logs import BATCH, QuadraticEngine

COUNTS = (40, 0, 7)
K = sum(COUNTS)
RNG = np.random.default_rng(3)
W_BASE = RNG.normal(0, 1, K).astype(np.float32)
ENGINE = QuadraticEngine(RNG.normal(0, 1, K).astype(np.float32), RNG.uniform(0.5, 2, K).astype(np.float32))
RATE = 0.05
UNIT = unit_exponent(RATE) - 2
GROUPS = {"estimator": EstimatorKind.GRADIENT, "directions": DirectionKind.GROUPS, "queries": 8}
DEFINITIONS: dict[str, dict[str, Any]] = {
    "spsa": {},
    "forward": {"log": {"estimator": EstimatorKind.FORWARD}},
    "one-sided": {"log": {"estimator": EstimatorKind.ONE_SIDED}},
    "one-sided-groups": {
        "log": {"estimator": EstimatorKind.ONE_SIDED, "directions": DirectionKind.GROUPS, "queries": 8}
    },
    "split": {"log": split_log()},
    "gradient": {"log": GROUPS},
    "gradient-local": {"log": GROUPS, "local_steps": 4},
}


def definition_of(name: str) -> Definition:
    """Return a federation with a step unit that fits its rate."""
    changes = dict(DEFINITIONS[name])
    log = {"epsilon": 1e-3, "learning_rate": RATE} | changes.pop("log", {})
    exponent = (
        UNIT if log.get("estimator") is EstimatorKind.GRADIENT else step_unit_exponent_for(RATE, 1.0, 4) - 2
    )
    return make_definition(**changes, log=log | {"step_unit_exponent": exponent})


def part_of(definition: Definition, *, rounds: int = 2) -> LocalRound:
    """Return the next device's part, after some rounds of other devices."""
    history = History.begin(definition)
    for number in range(rounds):
        history.apply([combine(definition, number, make_contributions(history, 3, seed=number, size=40))])
    return LocalRound(
        definition=definition,
        number=rounds,
        start_W=history.s_W,
        w_base_W=W_BASE,
    )


def batches(_step: int) -> Batch:
    return BATCH


def plain_values(part: LocalRound, away_W: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the device's values after a move by `away_W`, in plain floats."""
    return W_BASE.astype(np.float64) + part.start_W * 2.0**part.definition.log.step_unit_exponent + away_W


def reference_step(part: LocalRound, away_W: NDArray[np.float64], step: int) -> NDArray[np.float64]:
    """Return a step with exact derivatives, in plain floats.

    Each block moves by the mean over its directions.
    """
    header = part.definition.device_log()
    gradient_W = ENGINE.curvature_K * (plain_values(part, away_W) - ENGINE.target_K)
    z_QW = directions_of(part.definition.log, step).astype(np.float64)
    g_Q = z_QW @ gradient_W / header.sigma
    if header.estimator is EstimatorKind.ONE_SIDED:
        g_Q = (g_Q - g_Q.mean()) * len(g_Q) / (len(g_Q) - 1)
    g_Q /= math.sqrt(np.mean(g_Q**2))
    move_W = np.zeros(K)
    for queries, _ in header.blocks():
        number = queries.stop - queries.start
        move_W -= header.learning_rate_at(step) / number / header.sigma * (g_Q[queries] @ z_QW[queries])
    return move_W


def reference_gradient(part: LocalRound) -> NDArray[np.float64]:
    """Return the sum of all gradient steps in plain floats, by Adam's formulas and a projection."""
    rules, away_W = part.definition, np.zeros(K)
    m_W, v_W, taken = np.zeros(K), np.zeros(K), 0
    for number in range(rules.steps):
        step, local_W = part.first_step + number, away_W.copy()
        for _ in range(rules.local_steps):
            g_W = ENGINE.curvature_K * (plain_values(part, local_W) - ENGINE.target_K)
            taken += 1
            m_W, v_W = 0.9 * m_W + 0.1 * g_W, 0.99 * v_W + 0.01 * g_W**2
            local_W = local_W - RATE * (m_W / (1 - 0.9**taken)) / (np.sqrt(v_W / (1 - 0.99**taken)) + 1e-8)
        found = grouping(rules.log, step)
        weights = K / rules.log.queries
        change_W = (local_W - away_W) * max(1.0, min(weights, 2 * math.sqrt(weights)))
        for group in range(rules.log.queries):
            z_W = np.where(found.group_K == group, found.sign_K, 0).astype(np.float64)
            away_W = away_W + z_W * float(change_W @ z_W) / max(1.0, float(z_W @ z_W))
    return away_W


@pytest.mark.parametrize("name", DEFINITIONS)
def test_the_steps_are_those_of_plain_floats(name: str, tmp_path: Path) -> None:
    part = part_of(definition_of(name))
    c_TQ = take_local_steps(part, ENGINE, batches, tmp_path)
    assert c_TQ.shape == (part.definition.steps, part.definition.log.queries)
    moved_W = part.moved(c_TQ) * 2.0 ** part.definition.device_log().step_unit_exponent
    if part.definition.log.estimator is EstimatorKind.GRADIENT:
        expected_W = reference_gradient(part)
    else:
        expected_W = np.zeros(K)
        for number in range(part.definition.steps):
            expected_W += reference_step(part, expected_W, part.first_step + number)
    assert np.linalg.norm(moved_W - expected_W) <= 0.05 * np.linalg.norm(expected_W)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_the_integers_add_up_to_the_local_state_and_alone_they_are_the_round(
    name: str, tmp_path: Path
) -> None:
    definition = definition_of(name)
    part = part_of(definition)
    seen: list[NDArray[np.float32]] = []

    class Watched(QuadraticEngine):
        """An engine that records the values of every gradient call."""

        def gradient(self, values_K: NDArray[np.float32], batch: Batch) -> Any:
            seen.append(values_K.copy())
            return super().gradient(values_K, batch)

    watched = Watched(ENGINE.target_K.astype(np.float32), ENGINE.curvature_K.astype(np.float32))
    c_TQ = take_local_steps(part, watched, batches, tmp_path)
    if seen:  # each step begins at the state of the integers before it
        first_W = values(W_BASE, part.start_W, definition.log.step_unit_exponent)
        for number, at_K in enumerate(seen[:: definition.local_steps]):
            exponent = definition.device_log().step_unit_exponent
            assert np.array_equal(at_K, values(first_W, part.moved(c_TQ[:number]), exponent))
    history = History.begin(definition)
    history.s_W, history.number = part.start_W, part.number
    # The only contribution, so the pooled state is that of the device.
    contribution = Contribution(
        definition=definition,
        round_number=part.number,
        weight=1,
        start_digest=history.digest,
        c_TQ=c_TQ,
    )
    history.apply([combine(definition, part.number, [contribution])])
    assert np.array_equal(history.s_W, part.start_W + (part.moved(c_TQ) << definition.guard_bits))
    assert c_TQ.any()


class Killed(BaseException):
    """A kill, raised by a test."""


def killed_at(count: int) -> Callable[[int], Batch]:
    """Return a function that returns `count` batches, and then raises `Killed`."""
    left = iter(range(count))

    def batch(_step: int) -> Batch:
        if next(left, None) is None:
            raise Killed
        return BATCH

    return batch


@pytest.mark.parametrize("name", ["spsa", "gradient-local"])
def test_a_device_killed_before_any_batch_or_write_goes_on_with_the_same_integers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = part_of(definition_of(name))
    (tmp_path / "whole").mkdir()
    expected_TQ = take_local_steps(part, ENGINE, batches, tmp_path / "whole")
    for count in range(part.definition.steps * part.definition.local_steps):
        folder = tmp_path / str(count)
        folder.mkdir()
        with pytest.raises(Killed):
            take_local_steps(part, ENGINE, killed_at(count), folder)
        assert np.array_equal(take_local_steps(part, ENGINE, batches, folder), expected_TQ)
    torn = tmp_path / "torn"
    torn.mkdir()
    take_local_steps(part, ENGINE, batches, torn)
    data = (torn / JOURNAL).read_bytes()
    for cut in range(1, 12):  # the last record is torn, but Adam's moments, if any, already contain its step
        (torn / JOURNAL).write_bytes(data[:-cut])
        assert np.array_equal(take_local_steps(part, ENGINE, batches, torn), expected_TQ)
        assert (torn / JOURNAL).read_bytes() == data


def test_damaged_moments_are_told(tmp_path: Path) -> None:
    part = part_of(definition_of("gradient"))
    with pytest.raises(Killed):
        take_local_steps(part, ENGINE, killed_at(1), tmp_path)
    path = tmp_path / MOMENTS
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(OperatorError, match="moments"):
        take_local_steps(part, ENGINE, batches, tmp_path)


def test_integers_too_large_to_be_sent_are_made_shorter_together(tmp_path: Path) -> None:
    fine = make_definition(log={"learning_rate": RATE, "step_unit_exponent": -30})
    c_TQ = take_local_steps(part_of(fine), ENGINE, batches, tmp_path)
    assert np.abs(c_TQ).max(axis=1).tolist() == [MAX_CONTRIBUTED] * 3
    (tmp_path / "coarse").mkdir()
    coarse = make_definition(log={"learning_rate": RATE, "step_unit_exponent": -18})
    expected_TQ = take_local_steps(part_of(coarse), ENGINE, batches, tmp_path / "coarse")
    assert np.sign(c_TQ[0]).tolist() == np.sign(expected_TQ[0]).tolist()


def test_a_loss_that_is_not_finite_moves_nothing(tmp_path: Path) -> None:
    part = part_of(definition_of("gradient"))
    broken = QuadraticEngine(np.full(K, np.nan, np.float32), np.ones(K, np.float32))
    assert not take_local_steps(part, broken, batches, tmp_path).any()


def test_an_engine_without_a_reverse_pass_is_told(tmp_path: Path) -> None:
    class Losses:
        k = K

    with pytest.raises(InputError, match="computes no gradients"):
        take_local_steps(part_of(definition_of("gradient")), Losses(), batches, tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"local_steps": 2},
        {"local_steps": 0, "log": GROUPS},
        {"local_steps": 1025, "log": GROUPS},
        {"guard_bits": 8, "log": {"step_unit_exponent": 60}},
    ],
)
def test_steps_that_no_device_can_take_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        make_definition(**changes)
