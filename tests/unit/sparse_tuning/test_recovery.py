"""Adapters of pruned models: their change by the equations, merging, zeros, kills of the training."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from permille.errors import InputError
from permille.models.families import scoped_tensors
from permille.pruning.plan import AdapterKind, RecoveryPlan
from permille.sparse_tuning.adapters import (
    PoolingAdapter,
    allocate,
    attach,
    change_norms,
    merge,
)
from permille.sparse_tuning.recovery import STEPS_A_CHECKPOINT, recover, row_order
from tests.unit.engines.tiny import tiny_model

ROWS_NT = np.random.default_rng(0).integers(0, 60, (12, 10))


class KilledError(Exception):
    """What a test's `progress` raises."""


def pruned_model() -> Any:
    """A model whose linears have zeros in half of their places."""
    model = tiny_model("llama")
    rng = np.random.default_rng(3)
    with torch.no_grad():
        for name in names(model):
            weight = model.get_parameter(name)
            weight[torch.from_numpy(rng.random(tuple(weight.shape)) < 0.5)] = 0
    return model


def names(model: Any) -> list[str]:
    return [name for name, _ in scoped_tensors(model.config.to_dict())]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.as_tensor(model(input_ids=torch.from_numpy(ROWS_NT[:2])).logits)


def recovered(kind: AdapterKind, *, masked: bool, checkpoint: Path | None = None, stop: int = 0) -> Any:
    """A model trained for 24 steps, or killed after `stop`."""

    def progress(done: int, _total: int) -> None:
        if done == stop:
            raise KilledError

    model = pruned_model()
    trained = attach(model, dict.fromkeys(names(model), 3), kind, masked=masked, seed=1)
    plan = RecoveryPlan(steps=24, rows=3, rate=0.02, l2=1e-3, seed=5, recomputed=kind is AdapterKind.LORA)
    recover(model, trained, ROWS_NT, plan, checkpoint=checkpoint, progress=progress)
    return model


@pytest.mark.parametrize("shape", [(6, 6), (7, 5), (4, 9)])
def test_pooling_is_pool_multiply_expand(shape: tuple[int, int]) -> None:
    adapter = PoolingAdapter(shape, 3)
    with torch.no_grad():
        adapter.g.copy_(torch.randn(3, 3, generator=torch.Generator().manual_seed(0)))
    g_GG = adapter.g.detach()
    x_K = torch.randn(shape[1], generator=torch.Generator().manual_seed(1))
    n, k = math.ceil(shape[0] / 3), math.ceil(shape[1] / 3)
    padded = torch.cat([x_K, torch.zeros(3 * k - shape[1])])
    pooled = [float(padded[group * k : (group + 1) * k].sum()) / k for group in range(3)]
    y = [sum(float(g_GG[row, column]) * pooled[column] for column in range(3)) for row in range(3)]
    expanded = [y[place // n] for place in range(shape[0])]
    assert (adapter().detach() @ x_K).tolist() == pytest.approx(expanded, abs=1e-6)


def test_numbers_follow_the_loss_and_are_squares() -> None:
    shapes = {"a": (100, 50), "b": (100, 50), "c": (4, 9)}
    assert allocate({"a": 3.0, "b": 1.0, "c": 2.0}, shapes, 100.0) == {"a": 12, "b": 7, "c": 4}
    assert allocate({"a": 0.0, "b": 0.0, "c": 0.0}, shapes, 49.0) == {"a": 7, "b": 7, "c": 4}
    assert allocate({"a": 1.0, "b": 0.0}, shapes, 10.0) == {"a": 4, "b": 1}


@pytest.mark.parametrize("kind", AdapterKind)
def test_merging_a_masked_adapter_computes_as_before_and_keeps_zeros(kind: AdapterKind) -> None:
    model = recovered(kind, masked=True)
    before = logits(model)
    merge(model)
    assert torch.equal(logits(model), before)
    pruned = pruned_model()
    for name in names(model):
        zeros = pruned.get_parameter(name) == 0
        weight = model.get_parameter(name)
        assert not weight[zeros].any()
        assert not torch.signbit(weight[zeros]).any()
        assert bool((weight[~zeros] != pruned.get_parameter(name)[~zeros]).any())


@pytest.mark.parametrize("kind", AdapterKind)
def test_a_dense_adapter_is_masked_when_it_is_merged(kind: AdapterKind) -> None:
    model = recovered(kind, masked=False)
    before = logits(model)
    kept, pruned = change_norms(model)
    assert kept > 0
    assert pruned > 0
    expected = {}
    for name in names(model):
        module = model.get_submodule(name.removesuffix(".weight"))
        source = module.parametrizations["weight"].original
        expected[name] = torch.where(source != 0, module.weight, 0).detach().clone()
    merge(model)
    assert not torch.equal(logits(model), before)
    assert all(torch.equal(model.get_parameter(name), expected[name]) for name in expected)


def test_steps_lower_the_loss_and_touch_adapters_alone() -> None:
    model = pruned_model()
    source = {name: value.clone() for name, value in model.state_dict().items()}
    trained = attach(model, dict.fromkeys(names(model), 4), AdapterKind.LORA, masked=True, seed=0)
    losses = recover(model, trained, ROWS_NT, RecoveryPlan(steps=40, rows=4, rate=0.03))
    assert losses[0] == pytest.approx(math.log(model.config.vocab_size), abs=0.5)
    assert np.mean(losses[-5:]) < losses[0] - 0.3
    merge(model)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, source[name])}
    assert changed == set(names(model))


@pytest.mark.parametrize("kind", AdapterKind)
def test_a_killed_training_goes_on_to_the_same_bits(kind: AdapterKind, tmp_path: Path) -> None:
    path = tmp_path / "steps"
    with pytest.raises(KilledError):
        recovered(kind, masked=True, checkpoint=path, stop=STEPS_A_CHECKPOINT + 2)
    resumed, whole = recovered(kind, masked=True, checkpoint=path), recovered(kind, masked=True)
    for (_, first), (_, second) in zip(resumed.named_parameters(), whole.named_parameters(), strict=True):
        assert torch.equal(first, second)


def test_a_damaged_checkpoint_begins_again(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    with pytest.raises(KilledError):
        recovered(AdapterKind.POOLING, masked=True, checkpoint=path, stop=STEPS_A_CHECKPOINT)
    path.write_bytes(path.read_bytes()[:-9])
    resumed = recovered(AdapterKind.POOLING, masked=True, checkpoint=path)
    assert torch.equal(logits(resumed), logits(recovered(AdapterKind.POOLING, masked=True)))


def test_every_row_is_taken_once_a_turn() -> None:
    taken = np.concatenate([row_order(10, 4, 3, step) for step in range(5)])
    assert sorted(taken[:10]) == sorted(taken[10:]) == list(range(10))
    assert taken[:10].tolist() != taken[10:].tolist()


def test_too_little_text_is_refused() -> None:
    model = pruned_model()
    trained = attach(model, dict.fromkeys(names(model), 2), AdapterKind.POOLING, masked=True, seed=0)
    with pytest.raises(InputError, match="at least 16 rows"):
        recover(model, trained, ROWS_NT, RecoveryPlan(steps=1, rows=16, rate=0.1))
