"""Tests of the pull towards the base model, and of the strength that bounds the general loss."""

from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.choices import EstimatorKind
from permille.engines.interface import Engine, EngineInfo
from permille.package.reader import Package
from permille.schemas.runs import Outcome
from permille.training.reference import Reference
from permille.training.strength import scaled
from permille.zo.estimators import Batch
from permille.zo.lattice import state_digest, values
from permille.zo.packed_state import decode_state
from permille_agent.cli.status import Status
from permille_agent.state.models import Active, reset
from permille_agent.training.durable_steps import pulled_gradient
from permille_agent.training.evaluation import GeneralLoss, keep_general
from permille_agent.training.options import TrainOptions
from permille_agent.training.personal import personal_state
from permille_agent.training.run import Run, find_run
from tests.bigram_engine import BigramEngine
from tests.unit.edge_agent.runs import QUICK, TINY_RATE, Begin, Device, Killed, plan_and_train
from tests.unit.edge_agent.training.test_gradient_steps import kill_after

GRADIENT: dict[str, Any] = {
    "estimator": EstimatorKind.GRADIENT,
    "queries": 0,
    "steps": 30,
    "rate_scale": TINY_RATE,
}
PRIVATE = TrainOptions(seed=0, steps=12, batch_rows=2, row_tokens=32, rate_scale=TINY_RATE)
KINDS = pytest.mark.parametrize("options", [PRIVATE, QUICK], ids=["gradient", "one-sided"])


@dataclass(frozen=True)
class Pairs:
    """A reference of random pairs of tokens.

    Its loss is 2 plus the distance from `first_K`. So the loss is linear in the strength of a state.
    """

    seed: int = 0
    first_K: NDArray[np.float32] | None = None

    def pull(self, step: int) -> Batch:
        """Return two rows, a function of `seed` and `step`."""
        ids_BT = np.random.default_rng([self.seed, step]).integers(0, 60, (2, 8))
        target_BT = np.ones(ids_BT.shape, np.bool_)
        target_BT[:, 0] = False
        return Batch(input_ids_BT=ids_BT, attention_BT=np.ones(ids_BT.shape, np.bool_), target_BT=target_BT)

    def loss(self, _: Engine, values_K: NDArray[np.float32]) -> float:
        """Return the general loss of `values_K`."""
        return 2.0 if self.first_K is None else 2.0 + _distance(values_K, self.first_K)


def pairs(**fields: Any) -> Reference:
    """Return `Pairs` in the type of a reference."""
    return cast("Reference", Pairs(**fields))


def measured_by(monkeypatch: pytest.MonkeyPatch, first_K: NDArray[np.float32]) -> None:
    """Let every package carry `Pairs` with a loss of 2 at `first_K`."""
    monkeypatch.setattr(Reference, "of", lambda _package: pairs(first_K=first_K))


def _distance(values_K: NDArray[np.float32], first_K: NDArray[np.float32]) -> float:
    return float(np.abs(values_K.astype(np.float64) - first_K).mean())


@pytest.fixture
def rising(monkeypatch: pytest.MonkeyPatch, package: Package) -> None:
    """Let the general loss be 2 plus the distance from the package's own values."""
    measured_by(monkeypatch, package.values())


def _unit(device: Device, **options: Any) -> float:
    """Return the rise of the general loss at a run's full strength."""
    result = device.train(**{**GRADIENT, **options}, keep_general=100)
    assert result.decision is not None and result.decision.general is not None
    assert (result.decision.strength, result.decision.scaled_digest) == (8, None)
    reset(device.home)
    return float(result.decision.general.rise or 0.0)


def test_the_gradient_of_a_step_is_that_of_the_text_and_of_the_pull(begin: Begin) -> None:
    run = begin(PRIVATE)
    pulled = replace(run, reference=pairs())
    loss, gradient_K = pulled_gradient(pulled, run.w_base_K, 3)
    own, own_K = pulled_gradient(run, run.w_base_K, 3)
    _, pull_K = run.engine.gradient(run.w_base_K, Pairs().pull(3))  # type: ignore[attr-defined]
    assert loss == own  # the reported loss excludes the pull
    np.testing.assert_array_equal(gradient_K, own_K + pull_K)
    assert pull_K.any()


def test_scalars_of_forward_passes_are_pulled_and_their_loss_is_the_users(begin: Begin) -> None:
    run = begin(QUICK)
    descent = run.descent(seed=0, epsilon=0.01, learning_rate=0.1)
    descent = replace(descent, header=descent.header.with_step_unit())
    s_K = np.zeros(run.package.k, np.int64)
    own, pulled = (each.take_step(descent, s_K, 2) for each in (run, replace(run, reference=pairs())))
    assert pulled.loss == own.loss
    assert pulled.coefficients != own.coefficients


def test_an_engine_without_soft_targets_is_not_pulled(begin: Begin, package: Package) -> None:
    class Program(BigramEngine):
        def info(self) -> EngineInfo:
            return {**super().info(), "name": "executorch"}

    run = replace(begin(QUICK, engine=Program(package)), reference=pairs())
    assert run.pull(0) is None
    assert replace(run, engine=BigramEngine(package)).pull(0) is not None


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize("calls", [1, 12, 23])
def test_a_pulled_run_that_is_killed_ends_in_the_same_bits(
    begin: Begin, options: TrainOptions, calls: int
) -> None:
    def pulled(folder: str, seed: int = 0) -> Run:
        return replace(begin(options, folder), reference=pairs(seed=seed))

    expected = plan_and_train(pulled("whole"))[1]
    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(Killed):
        kill_after(calls, monkeypatch)
        plan_and_train(pulled("killed"))
    found = plan_and_train(pulled("killed"))[1]
    np.testing.assert_array_equal(found.s_K, expected.s_K)
    assert (plan_and_train(pulled("other", 1))[1].s_K != expected.s_K).any()


@pytest.mark.usefixtures("rising")
def test_what_is_adopted_is_the_trained_state_at_the_largest_strength_within_the_bound(
    device: Device,
) -> None:
    whole = _unit(device, seed=1)
    result = device.train(**GRADIENT | {"seed": 1}, keep_general=0.6 * whole, share_state=True)
    assert result.outcome is Outcome.ADOPTED
    decision, metrics = result.decision, result.metrics
    assert decision is not None and metrics is not None and decision.general is not None
    assert decision.strength == metrics.strength == 4  # the loss is linear, and 5/8 exceeds the bound of 0.6
    assert 0.4 * whole < float(decision.general.rise or 0.0) <= 0.6 * whole
    kept_part = "4/8 of what was trained: more would raise the loss on general text beyond --keep-general"
    assert dict(Status(device.home)._rows())["its strength"] == kept_part
    assert metrics.general_loss_personal == decision.general.loss
    run, package = find_run(device.home, result.run), device.package
    shared = decode_state((run.path / "shared.log").read_bytes(), max_bytes=1 << 20, max_k=package.k)
    exponent = shared.header.step_unit_exponent

    def digest_of(s_K: NDArray[np.int64]) -> str:
        return state_digest(s_K, mask_digest=package.mask_digest, step_unit_exponent=exponent)

    assert digest_of(shared.s_K) == decision.state_digest == metrics.state_digest
    kept = personal_state(device.home, result.run, package)
    np.testing.assert_array_equal(kept.s_K, scaled(shared.s_K, 4))
    assert digest_of(kept.s_K) == decision.scaled_digest == metrics.scaled_digest


@pytest.mark.usefixtures("rising")
def test_a_state_that_cannot_keep_the_general_loss_is_not_adopted(device: Device) -> None:
    result = device.train(**GRADIENT, keep_general=0.0)
    assert result.outcome is Outcome.KEPT_BASE
    assert result.message.startswith("it would lose general knowledge: even an eighth of what was trained")
    assert "or allow more with --keep-general" in result.message
    assert result.decision is not None and result.decision.general is not None
    assert f"by {result.decision.general.rise:.4f} nats per token" in result.message
    assert result.metrics is not None and result.metrics.strength == 0
    assert device.active() == Active(package=device.package.digest)


def test_without_a_reference_nothing_is_measured(device: Device) -> None:
    result = device.train(**GRADIENT)
    assert result.outcome is Outcome.ADOPTED
    assert result.decision is not None and result.decision.general is None
    assert result.metrics is not None
    assert (result.metrics.general_loss_base, result.metrics.strength) == (None, None)


def test_the_strength_is_durable_and_measured_once(begin: Begin) -> None:
    run = begin(replace(PRIVATE, keep_general=0.05))
    s_K = np.full(run.package.k, 800, np.int64)
    calls = []

    class Counted(Pairs):
        def loss(self, engine: Engine, values_K: NDArray[np.float32]) -> float:
            calls.append(values_K)
            return super().loss(engine, values_K)

    run = replace(run, reference=cast("Reference", Counted(first_K=run.w_base_K)))
    first = keep_general(run, s_K, -13)  # the rise at full strength is 800 / 2^13 = 0.0977 nats
    assert first.strength == 4
    measured = len(calls)
    assert keep_general(run, s_K, -13) == first
    assert len(calls) == measured
    used_K = values(run.w_base_K, scaled(s_K, 4), -13)
    np.testing.assert_array_equal(calls[-1], used_K)


def test_losses_that_are_not_finite_are_told_as_such() -> None:
    found = GeneralLoss(loss_base=2.0, loss=None)
    assert (found.rise, str(found)) == (None, "not finite")
    assert str(replace(found, loss=2.25)) == "2.0000 of the base -> 2.2500 (+0.2500 nats per token)"
