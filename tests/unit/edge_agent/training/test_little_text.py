"""Tests of little text: a run is judged part by part, then trained on all parts, and survives kills."""

import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rich.console import Console

from permille.choices import EstimatorKind
from permille.errors import InputError
from permille.package.reader import Package
from permille.schemas.runs import Outcome
from permille.zo.estimators import Batch
from permille.zo.lattice import values
from permille.zo.packed_state import decode_state
from permille_agent.cli.status import Status
from permille_agent.local.show import show_run
from permille_agent.state.models import Active, reset
from permille_agent.text.preparation import prepare
from permille_agent.text.reading import read_documents
from permille_agent.text.tokens import package_tokenizer
from permille_agent.training.evaluation import mean_loss
from permille_agent.training.options import TrainOptions
from permille_agent.training.plan import make_plan
from permille_agent.training.run import Run, find_run
from permille_agent.training.steps import SelectedState, Stop, train
from tests.bigram_engine import BigramEngine, bigram_engine
from tests.unit.edge_agent.runs import TINY_RATE, Begin, Device, Killed, device_at, plan_and_train, user_text
from tests.unit.edge_agent.training.test_gradient_steps import kill_after

LITTLE = 60
"""Number of sentences, with some 1,500 tokens together."""
OPTIONS: dict[str, Any] = {
    "estimator": EstimatorKind.GRADIENT,
    "queries": 0,
    "steps": 30,
    "batch_rows": 2,
    "rate_scale": TINY_RATE,
}
PRIVATE = TrainOptions(steps=12, batch_rows=2, row_tokens=32, rate_scale=TINY_RATE)


@pytest.fixture
def device(tmp_path: Path) -> Device:
    return device_at(tmp_path / "home", user_text(tmp_path, LITTLE))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return user_text(tmp_path, LITTLE)


def test_a_person_with_a_thousand_tokens_is_served(tmp_path: Path) -> None:
    device = device_at(tmp_path / "home", user_text(tmp_path, 42))
    result = device.train(**OPTIONS)
    assert result.outcome is Outcome.ADOPTED
    assert result.message == "better than the base on parts of the text, before training on them"
    assert result.metrics is not None and result.decision is not None
    assert 1000 <= result.metrics.train_tokens < 1150
    assert result.metrics.select_tokens == 0
    assert 0.6 < result.metrics.test_tokens / result.metrics.train_tokens < 0.8
    assert result.decision.against_base is not None and result.decision.against_base.groups >= 20
    assert device.active() == Active(package=device.package.digest, run=result.run)


def test_what_is_adopted_was_trained_on_all_parts_and_what_judged_only_on_those_before(begin: Begin) -> None:
    run = begin(PRIVATE)
    _, selected = plan_and_train(run)
    stages = run.prepared.stages
    assert [len(stage.train) for stage in stages] == sorted(len(stage.train) for stage in stages)
    for number, stage in enumerate(stages):
        judged = {row.ids_T.tobytes() for row in run.prepared.test[stage.rows]}
        assert judged
        assert not judged & {row.ids_T.tobytes() for row in stage.train}
        only = replace(run, prepared=replace(run.prepared, train=stage.train))
        assert _loss(only, selected.judges[number]) < _base_loss(only)
    assert _loss(run, selected.s_K) < min(_loss(run, judge) for judge in selected.judges)
    kept = decode_state(run.folder.best_state(3).read_bytes(), max_bytes=1 << 20, max_k=run.package.k)
    np.testing.assert_array_equal(kept.s_K, selected.s_K)


def _loss(run: Run, s_K: NDArray[np.int64]) -> float:
    exponent = train(run, make_plan(run)).header.step_unit_exponent if run.prepared.stages else 0
    return mean_loss(run.engine, values(run.w_base_K, s_K, exponent), run.prepared.train)


def _base_loss(run: Run) -> float:
    return mean_loss(run.engine, run.w_base_K, run.prepared.train)


@pytest.mark.parametrize("calls", range(1, 70, 7))
def test_a_run_that_is_killed_anywhere_ends_in_the_same_bits(begin: Begin, calls: int) -> None:
    options = replace(PRIVATE, steps=6)
    expected = plan_and_train(begin(options, "whole"))[1]
    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(Killed):
        kill_after(min(calls, 36), monkeypatch)
        plan_and_train(begin(options, "killed"))
    found = plan_and_train(begin(options, "killed"))[1]
    assert _bits(found) == _bits(expected)


def _bits(selected: SelectedState) -> list[bytes]:
    return [s_K.tobytes() for s_K in (*selected.judges, selected.s_K)]


def test_status_and_the_page_say_how_it_was_judged(device: Device) -> None:
    device.train(**OPTIONS)
    console = Console(record=True, width=200, file=io.StringIO())
    Status(device.home).render(console)
    assert "(little text, judged part by part)" in console.export_text()
    page = show_run(device.home, None, bigram_engine).read_text()
    assert "of them judged the model before it trained on them" in page
    assert "your text that training did not use" not in page
    assert "on parts of the text, before training on them" in page


def test_what_is_shared_is_of_the_adopted_state(device: Device) -> None:
    result = device.train(**OPTIONS, share_state=True)
    assert result.outcome is Outcome.ADOPTED
    run = find_run(device.home, result.run)
    state = decode_state((run.path / "shared.log").read_bytes(), max_bytes=1 << 20, max_k=device.package.k)
    used_K = values(device.package.values(), state.s_K, state.header.step_unit_exponent)
    np.testing.assert_array_equal(used_K, device.used_values())


class ByHeart(BigramEngine):
    """An engine with losses that rise by `nats` times the mean distance from the base.

    The rise ends after `gradients` calls of `gradient`.
    """

    def __init__(self, package: Package, *, nats: float, gradients: float = math.inf) -> None:
        super().__init__(package)
        self._first_K, self._nats, self._left = package.values(), np.float32(nats), gradients

    def gradient(self, values_K: NDArray[np.float32], batch: Batch) -> tuple[float, NDArray[np.float32]]:
        self._left -= 1
        return super().gradient(values_K, batch)

    def token_losses(self, values_K: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        losses_N = super().token_losses(values_K, batch)
        if self._left >= 0:
            losses_N += self._nats * np.float32(np.abs(values_K - self._first_K).mean())
        return losses_N


def test_a_part_that_diverges_starts_all_again_with_half_the_rate(begin: Begin) -> None:
    run = begin(PRIVATE, engine=ByHeart(begin(PRIVATE, "other").package, nats=1000, gradients=3))
    plan, selected = plan_and_train(run)
    assert selected.stopped is Stop.STEPS
    assert (selected.descent, selected.step, len(selected.judges)) == (7, 12, 3)
    assert selected.header.learning_rate == plan.learning_rate / 2
    assert not run.folder.begun(1)  # the evaluation of the first part ended the first attempt


def test_where_all_attempts_diverge_the_verdict_says_so_and_what_to_do(device: Device) -> None:
    result = device.train(**OPTIONS, engine_of=lambda package: ByHeart(package, nats=1000))
    assert result.outcome is Outcome.FAILED
    assert result.message.startswith(
        "training diverged with every rate that was tried; lower the rate with --rate-"
    )
    assert device.active() == Active(package=device.package.digest)


def test_what_only_knows_by_heart_is_not_adopted(device: Device) -> None:
    result = device.train(**OPTIONS, engine_of=lambda package: ByHeart(package, nats=15))
    assert result.outcome is Outcome.KEPT_BASE
    assert device.active() == Active(package=device.package.digest)


def test_a_model_of_little_text_is_compared_only_on_what_came_since(device: Device) -> None:
    first = device.train(**OPTIONS)
    again = device.train(**OPTIONS, seed=1)
    assert again.outcome is Outcome.REFUSED_DATA  # refused before the first step
    assert "has learned from all of this" in again.message
    text = user_text(device.text.parent, 3 * LITTLE)
    assert text == device.text
    more = device.train(**OPTIONS, seed=1)
    assert more.decision is not None
    new, all_of_it = more.decision.against_active, more.decision.against_base
    assert new is not None and all_of_it is not None
    assert 20 <= new.groups < all_of_it.groups
    assert find_run(device.home, first.run).path.exists()


def test_after_a_reset_the_same_text_trains_again(device: Device) -> None:
    first = device.train(**OPTIONS)
    assert device.train(**OPTIONS).known
    refused = device.train(**OPTIONS, seed=1)
    assert refused.outcome is Outcome.REFUSED_DATA
    reset(device.home)
    again = device.train(**OPTIONS, seed=1)
    assert again.outcome is Outcome.ADOPTED and not again.known
    assert again.run not in (first.run, refused.run)


def test_more_text_begins_at_the_base_and_not_at_what_has_seen_it_all(device: Device) -> None:
    device.train(**OPTIONS)
    user_text(device.text.parent, 400)
    result = device.train(**OPTIONS)
    run = find_run(device.home, result.run)
    assert '"start": null' in (run.path / "run.json").read_text()
    assert result.decision is not None and result.decision.against_active is not None
    assert result.metrics is not None and result.metrics.select_tokens > 0


def test_steps_of_forward_passes_alone_need_more_text(device: Device) -> None:
    result = device.train()
    assert result.outcome is Outcome.REFUSED_DATA
    assert "Zeroth order needs at least 5400 tokens of text, got 1" in result.message


def test_few_long_conversations_are_refused_with_what_both_ways_need(device: Device, tmp_path: Path) -> None:
    long = "The river and the day. " * 60
    rows = [f'{{"prompt": "{n}", "completion": "{long}{n}"}}' for n in range(3)]
    (tmp_path / "few.jsonl").write_text("\n".join(rows))
    documents, _ = read_documents([tmp_path / "few.jsonl"])
    with pytest.raises(InputError, match=r"5400 tokens: .* 20 pieces of 24 tokens in the last 3 of 4 parts"):
        prepare(documents, package_tokenizer(device.package), row_tokens=32)
