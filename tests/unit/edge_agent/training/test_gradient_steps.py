"""Tests of gradient steps: Adam on the lattice, with and without a log, after kills, from earlier states."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from permille.choices import EstimatorKind, Method
from permille.errors import InputError, OperatorError, PackageError
from permille.package.reader import Package
from permille.schemas.runs import LogForm
from permille.training.adam import RATE, Moments, unit_exponent
from permille.zo.estimators import Batch
from permille.zo.journal import Journal
from permille.zo.lattice import state_digest, values
from permille.zo.log import MAGIC, decode_canonical
from permille.zo.packed_state import MAGIC as STATE_MAGIC
from permille.zo.packed_state import decode_state
from permille.zo.replay import replay
from permille_agent.link.forget import forget_run
from permille_agent.link.report import Delivery, collect_reports, share_run
from permille_agent.state.models import reset
from permille_agent.training import durable_steps
from permille_agent.training.adopted import AdoptedRound, keep_adopted
from permille_agent.training.decision import Decision
from permille_agent.training.options import Start, TrainOptions, choose_method
from permille_agent.training.plan import RunFailed, budget_of_time, make_plan
from permille_agent.training.run import BegunRun, Run, StartState, find_run
from permille_agent.training.steps import Stop, planned_descent
from tests.bigram_engine import BigramEngine
from tests.unit.edge_agent.runs import TINY_RATE, Begin, Device, Killed, plan_and_train, user_text

PRIVATE = TrainOptions(seed=0, steps=12, batch_rows=2, row_tokens=32, rate_scale=TINY_RATE)


class LossesOnly:
    """An engine without gradients."""

    def __init__(self, package: Package) -> None:
        engine = BigramEngine(package)
        self.token_losses, self.losses, self.info = engine.token_losses, engine.losses, engine.info


def _files(run: Run) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(run.folder.path.glob("descent-*"))}


def test_the_text_is_learnt(begin: Begin, package: Package) -> None:
    run = begin(PRIVATE)
    plan, selected = plan_and_train(run)
    rms = math.sqrt(float(np.square(package.values(), dtype=np.float64).mean()))
    assert plan.learning_rate == pytest.approx(TINY_RATE * RATE * rms)
    assert selected.loss < plan.base_loss
    assert (selected.steps, selected.rejected, selected.stopped) == (12, 0, Stop.STEPS)
    losses = {evaluation.step: evaluation.loss for evaluation in run.folder.evaluations(0)}
    assert losses[selected.step] == selected.loss == min(loss for loss in losses.values() if loss)


def test_private_steps_are_adams_to_half_a_unit(begin: Begin, package: Package) -> None:
    run = begin(PRIVATE)
    plan, selected = plan_and_train(run)
    header = planned_descent(run, plan, 0, 12).header
    assert selected.header.step_unit_exponent == unit_exponent(plan.learning_rate)
    unit = 2.0**header.step_unit_exponent
    assert plan.learning_rate / 512 < unit <= plan.learning_rate / 256
    w_K = package.values().astype(np.float64)
    m_K, v_K = np.zeros(package.k), np.zeros(package.k)
    for step in range(12):
        _, g_K = BigramEngine(package).gradient(w_K.astype(np.float32), run.batches(step))
        m_K, v_K = 0.9 * m_K + 0.1 * g_K, 0.99 * v_K + 0.01 * np.square(g_K, dtype=np.float64)
        mean_K, root_K = m_K / (1 - 0.9 ** (step + 1)), np.sqrt(v_K / (1 - 0.99 ** (step + 1)))
        w_K -= plan.learning_rate * (1 - step / 12) * mean_K / (root_K + 1e-8)
    last = Moments.load(run.folder.moments(0))
    assert last is not None
    found_K = values(package.values(), last.s_K, header.step_unit_exponent)
    # Each step rounds once, and later gradients see the rounded values.
    assert np.abs(found_K - w_K).max() < 12 * unit


def test_private_runs_keep_their_best_state_in_the_format(begin: Begin, package: Package) -> None:
    run = begin(PRIVATE)
    _, selected = plan_and_train(run)
    found = decode_state(run.folder.best_state(0).read_bytes(), max_bytes=1 << 20, max_k=package.k)
    np.testing.assert_array_equal(found.s_K, selected.s_K)
    assert found.header.step_unit_exponent == selected.header.step_unit_exponent
    assert not run.folder.journal(0).exists()


def kill_after(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise `Killed` at place number `calls`.

    Each durable write of a descent has two: before it and after it.
    """
    left = [calls]

    def counted(write: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise Killed
            done = write(*arguments, **named)
            left[0] -= 1
            if left[0] == 0:
                raise Killed
            return done

        return wrapped

    monkeypatch.setattr(Moments, "store", counted(Moments.store))
    monkeypatch.setattr(durable_steps, "store_best_state", counted(durable_steps.store_best_state))
    monkeypatch.setattr(Journal, "append", counted(Journal.append))


@pytest.mark.slow
@pytest.mark.parametrize("calls", range(1, 41, 5))
def test_a_run_that_is_killed_anywhere_ends_in_the_same_bits(begin: Begin, calls: int) -> None:
    expected_run = begin(PRIVATE, "whole")
    expected = plan_and_train(expected_run)[1]
    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(Killed):
        kill_after(calls, monkeypatch)
        plan_and_train(begin(PRIVATE, "killed"))
    run = begin(PRIVATE, "killed")
    selected = plan_and_train(run)[1]
    np.testing.assert_array_equal(selected.s_K, expected.s_K)
    assert (selected.step, selected.loss) == (expected.step, expected.loss)
    found, whole = _files(run), _files(expected_run)
    assert found.keys() == whole.keys()
    for name in ("descent-0.journal", "descent-0.state"):
        assert found.get(name) == whole.get(name)
    last, same = (Moments.load(each.folder.moments(0)) for each in (run, expected_run))
    assert last is not None
    assert same is not None
    for name in ("m_K", "v_K", "s_K", "coefficients"):
        np.testing.assert_array_equal(getattr(last, name), getattr(same, name))


def test_moments_that_are_no_moments_are_refused(begin: Begin) -> None:
    run = begin(PRIVATE)
    plan_and_train(run)
    run.folder.moments(0).write_bytes(b"PK\x03\x04 cut")
    with pytest.raises(OperatorError, match=r"The state of the run in .* is damaged"):
        plan_and_train(run)


class Spoilt(BigramEngine):
    """An engine with a NaN in its gradient for about a third of the batches, chosen by their tokens."""

    def gradient(self, values_K: NDArray[np.float32], batch: Batch) -> tuple[float, NDArray[np.float32]]:
        loss, gradient_K = super().gradient(values_K, batch)
        if int(batch.input_ids_BT.sum()) % 3 == 1:
            gradient_K[5] = np.nan
        return loss, gradient_K


def test_a_gradient_that_is_not_finite_moves_nothing(begin: Begin, package: Package) -> None:
    run = begin(PRIVATE, engine=Spoilt(package))
    spoilt = [int(run.batches(step).input_ids_BT.sum()) % 3 == 1 for step in range(12)]
    _, selected = plan_and_train(run)
    assert sum(spoilt) > 0
    assert selected.rejected == sum(spoilt[: selected.steps])
    if selected.stopped is Stop.STEPS:
        assert selected.loss < run.folder.evaluations(0)[0].loss  # type: ignore[operator]


def test_an_engine_that_can_only_infer_is_refused_by_name(begin: Begin, package: Package) -> None:
    with pytest.raises(InputError, match="or the method zeroth-order"):
        plan_and_train(begin(PRIVATE, engine=LossesOnly(package)))


def test_masked_weights_that_are_all_zero_give_no_rate(
    begin: Begin, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begin(PRIVATE)
    monkeypatch.setattr(Package, "values", lambda _: np.zeros(package.k, np.float32))
    with pytest.raises(RunFailed, match="All trained weights of the package are 0"):
        plan_and_train(run)


def test_a_run_goes_on_from_a_state_exactly(begin: Begin, package: Package) -> None:
    _, first = plan_and_train(begin(PRIVATE, "first"))
    start = StartState(s_K=first.s_K, step_unit_exponent=first.header.step_unit_exponent)
    run = replace(begin(PRIVATE, "second", seed=0), start=start)
    plan, second = plan_and_train(run)
    assert plan.base_loss == pytest.approx(first.loss)
    assert second.loss <= first.loss
    begun_K = values(package.values(), first.s_K, first.header.step_unit_exponent)
    np.testing.assert_array_equal(run.first_values(), begun_K)
    coarse = StartState(s_K=np.ones(package.k, np.int64), step_unit_exponent=-3)
    run = replace(begin(PRIVATE, "third"), start=coarse)
    exponent = planned_descent(run, make_plan(run), 0, 12).header.step_unit_exponent
    first_K = durable_steps.first_state(run, exponent)
    np.testing.assert_array_equal(first_K * 2.0**exponent, np.full(package.k, 0.125))


def test_time_and_passes_bound_the_steps() -> None:
    numbers = {"step_s": 0.5, "evaluation_s": 0.2, "judgement_s": 1.0}
    short = budget_of_time(60.0, **numbers, most_steps=1000)
    assert 60 < short.steps < 120
    assert short.limit_s is not None
    assert budget_of_time(6000.0, **numbers, most_steps=90).steps == 90


def test_options_of_a_gradient_know_whether_there_is_a_log() -> None:
    private = TrainOptions.of(EstimatorKind.GRADIENT, steps=5)
    assert (private, private.has_log) == (TrainOptions(steps=5), False)
    assert private.method is Method.GRADIENT
    spsa = TrainOptions.of(EstimatorKind.SPSA, steps=5)
    assert (spsa.method, spsa.has_log, spsa.queries) == (Method.ZEROTH_ORDER, True, 8)
    assert private.definition() != replace(private, start=Start.BASE).definition()


GRADIENT = {"estimator": EstimatorKind.GRADIENT, "queries": 0, "steps": 30, "rate_scale": TINY_RATE}


@pytest.fixture
def writer(device: Device, tmp_path: Path) -> Device:
    """Return a device with more text."""
    return replace(device, text=user_text(tmp_path, 900))


def first_run_state(writer: Device, name: str) -> Path:
    """Return the path of the packed state that a run without a log keeps."""
    folder = find_run(writer.home, name)
    return folder.best_state(folder.require("decision", Decision).descent)


def test_a_private_run_is_adopted_reopened_and_gone_on_from(writer: Device) -> None:
    first = writer.train(**GRADIENT)
    assert first.outcome.value == "adopted"
    assert (writer.used_values() != writer.package.values()).any()
    assert first.metrics is not None
    size = first_run_state(writer, first.run).stat().st_size
    assert (first.metrics.method, first.metrics.estimator.value, first.metrics.queries) == (
        "gradient",
        "gradient",
        0,
    )
    assert (first.metrics.personal_bytes, first.metrics.state_digest) == (size, None)
    again = writer.train(**GRADIENT)
    assert (again.run, again.known) == (first.run, True)
    writer.text.write_text(writer.text.read_text() + "\n\nA line more, of rivers and days.")
    for start, begun_at in ((Start.ACTIVE, first.run), (Start.BASE, None)):
        run = find_run(writer.home, writer.train(**GRADIENT, start=start).run)
        assert run.require("run", BegunRun).definition.start == begun_at


def test_a_damaged_private_state_is_not_used(writer: Device) -> None:
    folder = find_run(writer.home, writer.train(**GRADIENT).run)
    path = folder.best_state(folder.require("decision", Decision).descent)
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    with pytest.raises(PackageError, match="state-corrupt"):
        writer.used_values()


def test_a_state_that_was_not_judged_is_replaced_as_the_message_says(writer: Device) -> None:
    first, second = writer.train(**GRADIENT | {"steps": 5}), writer.train(**GRADIENT)
    assert (first.outcome.value, second.outcome.value) == ("adopted", "adopted")
    path = first_run_state(writer, second.run)
    path.write_bytes(first_run_state(writer, first.run).read_bytes())
    with pytest.raises(PackageError, match=r"state-digest: .* `permille-agent train --from base --seed 1`"):
        writer.train(**GRADIENT, seed=2)
    third = writer.train(**GRADIENT, start=Start.BASE, seed=1)
    assert third.outcome.value == "adopted"
    assert writer.active().run == third.run


def test_a_used_run_with_a_damaged_decision_is_replaced_as_the_message_says(writer: Device) -> None:
    first = writer.train(**GRADIENT)
    (find_run(writer.home, first.run).path / "decision.json").write_text("{}")
    with pytest.raises(OperatorError, match="If it is in use, `permille-agent train --from base --seed 1`"):
        writer.used_values()
    with pytest.raises(InputError, match="is in use"):
        forget_run(writer.home, first.run)
    second = writer.train(**GRADIENT, start=Start.BASE, seed=1)
    assert (second.outcome.value, writer.active().run) == ("adopted", second.run)


class Cliff(BigramEngine):
    """An engine with losses that rise by five nats at some distance from the values `first_K`."""

    def __init__(self, package: Package, first_K: NDArray[np.float32], distance: float) -> None:
        super().__init__(package)
        self._first_K, self._distance = first_K, distance

    def token_losses(self, values_K: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        far = np.abs(values_K - self._first_K).mean() > self._distance
        return super().token_losses(values_K, batch) + np.float32(5.0 * far)


def test_an_adopted_start_is_used_although_each_descent_improved_and_then_diverged(writer: Device) -> None:
    first = writer.train(**GRADIENT)
    kept_K, state = writer.used_values(), first_run_state(writer, first.run).read_bytes()
    reset(writer.home)
    folder = writer.home.federations / "readers"
    folder.mkdir(parents=True)
    assert first.decision is not None and first.metrics is not None
    digest = first.decision.state_digest
    keep_adopted(folder, AdoptedRound(round=1, package=writer.package.digest, state_digest=digest), state)
    # The last descent has an eighth of the rate. It reaches the cliff after several steps that improve.
    distance = first.metrics.learning_rate / 4
    result = writer.train(**GRADIENT, engine_of=lambda package: Cliff(package, kept_K, distance))
    assert result.decision is not None and (result.decision.step, result.decision.descent) == (0, 3)
    assert result.decision.stopped is Stop.DIVERGED
    losses = find_run(writer.home, result.run).evaluations(3)
    assert losses[1].loss is not None and losses[0].loss is not None and losses[1].loss < losses[0].loss
    assert result.outcome.value == "adopted"
    np.testing.assert_array_equal(writer.used_values(), kept_K)


def test_a_shared_state_is_the_one_that_was_decided(writer: Device) -> None:
    result = writer.train(**GRADIENT, share_state=True)
    assert result.metrics is not None and result.decision is not None
    shared = (find_run(writer.home, result.run).path / "shared.log").read_bytes()
    assert len(shared) == result.metrics.personal_bytes
    state = decode_state(shared, max_bytes=1 << 20, max_k=writer.package.k)
    exponent, mask = state.header.step_unit_exponent, state.header.mask_digest
    digest = state_digest(state.s_K, mask_digest=mask, step_unit_exponent=exponent)
    assert digest == result.decision.state_digest == result.metrics.state_digest


def test_a_gradient_run_has_no_log_to_share(writer: Device) -> None:
    result = writer.train(**GRADIENT, share_log=True)
    assert result.metrics is not None and result.metrics.state_digest is None
    assert not (find_run(writer.home, result.run).path / "shared.log").exists()
    collect_reports(writer.home)
    with pytest.raises(InputError, match="has no log of seeds and scalars"):
        share_run(writer.home, result.run, LogForm.LOG, withdrawals=0)


@pytest.mark.parametrize(("log", "magic"), [(True, MAGIC), (False, STATE_MAGIC)])
def test_a_run_of_zeroth_order_shares_its_log_or_its_state(writer: Device, log: bool, magic: bytes) -> None:
    result = writer.train(steps=30, queries=8, share_log=log, share_state=True)
    assert result.decision is not None and result.decision.step
    shared = (find_run(writer.home, result.run).path / "shared.log").read_bytes()
    assert shared[:8] == magic
    if log:
        read = decode_canonical(shared, max_bytes=1 << 20, max_steps=100)
        s_K, header = replay(read.header, read.coefficients_TQ), read.header
        exponent, mask = header.step_unit_exponent, header.mask_digest
    else:
        state = decode_state(shared, max_bytes=1 << 20, max_k=writer.package.k)
        s_K, exponent, mask = state.s_K, state.header.step_unit_exponent, state.header.mask_digest
    assert state_digest(s_K, mask_digest=mask, step_unit_exponent=exponent) == result.decision.state_digest


def test_a_private_run_is_shared_afterwards_without_another_step(writer: Device) -> None:
    first = writer.train(**GRADIENT)
    again = writer.train(**GRADIENT, share_state=True)
    assert (again.run, again.known) == (first.run, True)
    collect_reports(writer.home)
    assert share_run(writer.home, first.run, LogForm.STATE, withdrawals=0) is Delivery.QUEUED
    queued = writer.home.reports / f"{first.run_id}.log"
    assert queued.read_bytes() == first_run_state(writer, first.run).read_bytes()


@pytest.mark.parametrize(
    ("said", "method"),
    [
        ({}, Method.GRADIENT),
        ({"release": Method.ZEROTH_ORDER}, Method.ZEROTH_ORDER),
        ({"engine": "executorch", "release": Method.GRADIENT}, Method.ZEROTH_ORDER),
        ({"share_log": True, "release": Method.GRADIENT}, Method.ZEROTH_ORDER),
        ({"asked": Method.GRADIENT, "share_log": True, "release": Method.ZEROTH_ORDER}, Method.GRADIENT),
    ],
)
def test_the_owner_decides_the_method_then_a_log_then_the_engine_then_the_release(
    said: dict[str, Any], method: Method
) -> None:
    assert choose_method(said.pop("asked", None), **said) is method
