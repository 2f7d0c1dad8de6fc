"""Tests of the paper's adapters: changes according to its equations, merging, and zeros."""

import math
from typing import Any

import pytest
import torch

from permille_lab.sparse.adapters import (
    PoolingAdapter,
    RecoveryAdapter,
    allocate,
    attach,
    change_norms,
    merge,
)
from permille_sparsify.plan import RecoveryPlan
from permille_sparsify.recovery import recover
from tests.sparsify.test_recovery import ROWS_NT, logits, names, pruned_model


def recovered(kind: RecoveryAdapter, *, masked: bool) -> Any:
    """Return a pruned model after 24 steps of recovery."""
    model = pruned_model()
    trained = attach(model, dict.fromkeys(names(model), 3), kind, masked=masked, seed=1)
    recover(model, trained, ROWS_NT, RecoveryPlan(steps=24, rows=3, rate=0.02, seed=5))
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


@pytest.mark.parametrize("kind", RecoveryAdapter)
def test_merging_a_masked_adapter_computes_as_before_and_keeps_zeros(kind: RecoveryAdapter) -> None:
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


@pytest.mark.parametrize("kind", RecoveryAdapter)
def test_a_dense_adapter_is_masked_when_it_is_merged(kind: RecoveryAdapter) -> None:
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
